//! Work of a process of its own: what ends a context, and what happens once in a process.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use libtest_mimic::Failed;
use moe_kernels::Error;
use moe_kernels::gpu::{Buffer, Device, Nvrtc, Spec, Stream, jit};
use moe_kernels::measure::environment::cache_folder;

use super::kernels::{KERNELS, Scale, Test as Kernel, check_scale, scale};
use super::{Outcome, ensure, gpu};

/// Names the work, in the environment of the child.
pub const VARIABLE: &str = "MOE_KERNELS_TEST_CHILD";

/// Runs the work that the parent named; the status of the process says whether it went well.
pub fn main(work: &str) -> std::process::ExitCode {
    let result = match work {
        "fault" => fault(),
        "compile" => compile(),
        "load" => load(),
        "capture" => super::gate::capture(),
        "share" => super::shareable::share_rank(),
        "abort killed" => super::waiting::abort_rank(super::waiting::End::Killed),
        "abort panicked" => super::waiting::abort_rank(super::waiting::End::Panicked),
        "abort gave up" => super::waiting::abort_rank(super::waiting::End::GaveUp),
        _ => Err(format!("no work named `{work}`").into()),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(failed) => {
            eprintln!("{work}: {}", failed.message().unwrap_or("failed"));
            std::process::ExitCode::FAILURE
        }
    }
}

/// Starts this program again for one piece of work. Variables that choose where compilers and caches are come from `variables` alone.
pub fn start(work: &str, variables: &[(&str, &Path)]) -> Result<Child, Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(VARIABLE, work).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if !variables.is_empty() {
        command.env_remove("MOE_CACHE_DIR").env_remove("XDG_CACHE_HOME");
    }
    Ok(command.envs(variables.iter().copied()).spawn()?)
}

/// What a child printed, if it ended well.
pub fn finish(child: Child) -> Result<String, Failed> {
    let output = child.wait_with_output()?;
    let (stdout, stderr) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
    if output.status.success() { Ok(stdout) } else { Err(format!("a child ended with {}\n{stdout}\n{stderr}", output.status).into()) }
}

/// [`start`] and [`finish`].
pub fn run_in_child(work: &str, variables: &[(&str, &Path)]) -> Result<String, Failed> {
    finish(start(work, variables)?)
}

/// A kernel writes where no memory is. That ends the context: each later call says so, nothing hangs or panics.
fn fault() -> Outcome {
    let (device, stream) = gpu()?;
    check_scale(&stream, 100, 1)?;
    let memory = Buffer::new(&device, 4000)?;
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    scale(&stream, kernel, Scale { from: memory.address().address, to: 0x100, num: 1000, addend: 0 }, false)?;
    let is_illegal = |result: moe_kernels::Result<()>| match result {
        Err(Error::Gpu { code: 700, name, .. }) if name == "CUDA_ERROR_ILLEGAL_ADDRESS" => Ok(()), // spec: cuda.h
        other => Err(Failed::from(format!("{other:?}"))),
    };
    is_illegal(stream.synchronize())?;
    is_illegal(stream.synchronize())?;
    is_illegal(memory.download(&stream, 0, &mut [0; 4]))?;
    is_illegal(memory.fill(&stream, 0, 4, 0))?;
    is_illegal(Buffer::new(&device, 4).map(drop))?;
    is_illegal(Stream::new(&device).map(drop))?;
    is_illegal(scale(&stream, kernel, Scale { from: memory.address().address, to: memory.address().address, num: 1, addend: 0 }, false))?;
    drop((memory, stream));
    println!("every call after it says so");
    Ok(())
}

/// Compiles a kernel with the cache of the environment; needs no GPU.
fn compile() -> Outcome {
    let compiled = jit::compile(&Kernel::Scale { factor: 47 }.program(), "sm_90a", cache_folder().as_deref())?;
    ensure(!compiled.image.is_empty(), "no image")?;
    // The sum of its bytes tells two images apart well enough here.
    println!("{:?} {} {}", compiled.origin, compiled.image.len(), compiled.image.iter().map(|byte| u64::from(*byte)).sum::<u64>());
    Ok(())
}

/// Loads two kernels on the GPU with the cache of the environment, and says how long each step took.
fn load() -> Outcome {
    let time = |start: Instant| start.elapsed().as_secs_f64() * 1e3;
    let start = Instant::now();
    let device = Device::open(0)?;
    let stream = Stream::new(&device)?;
    println!("context {:.3}", time(start));
    let start = Instant::now();
    Nvrtc::get()?;
    println!("nvrtc {:.3}", time(start));
    for (name, factor) in [("first", 53), ("second", 59)] {
        let start = Instant::now();
        let (_, origin) = KERNELS.load(&device, Kernel::Scale { factor })?;
        println!(
            "{name} {:.3} {}",
            time(start),
            origin.map_or("memory", |origin| if origin == jit::Origin::Disk { "disk" } else { "compiler" })
        );
    }
    check_scale(&stream, 100, 1)
}
