//! Compiling, and the cache on disk.

use std::fs;
use std::path::{Path, PathBuf};

use libtest_mimic::Failed;
use moe_kernels::Error;
use moe_kernels::gpu::jit::{self, Origin};
use moe_kernels::gpu::{Nvrtc, Spec};

use super::child::{finish, run_in_child, start};
use super::kernels::{KERNELS, Test as Kernel, check_scale};
use super::{Needs, Outcome, Test, ensure, gpu, report, same};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("errors of the compiler", Needs::Compiler, errors),
    ("errors of the compiler leave the stream usable", Needs::Gpu, error_on_a_stream),
    ("cache of kernels", Needs::Compiler, cache),
    ("cache folder of the environment", Needs::Compiler, cache_folder),
    ("processes that compile at once", Needs::Compiler, at_once),
    ("a compiler that is named and missing", Needs::Compiler, missing),
    ("time to compile and to load", Needs::GpuAlone, times),
];

/// An architecture that every NVRTC of CUDA 12 and 13 knows.
const ARCH: &str = "sm_90a";

/// The error names the kernel and holds the whole log: both errors, with their places.
fn check_log(error: Option<Error>) -> Outcome {
    let Some(Error::Compile { kernel, log }) = &error else { return Err(format!("{error:?}").into()) };
    same("kernel", kernel.as_str(), "test Broken")?;
    for part in ["tests/gpu/broken.cu(3)", "unknown_type", "tests/gpu/broken.cu(6)", "undeclared_function", "2 errors"] {
        ensure(log.contains(part), format!("the log lacks `{part}`:\n{log}"))?;
    }
    let text = error.as_ref().map(Error::to_string).unwrap_or_default();
    ensure(text.contains("test Broken") && text.contains(log.as_str()), text)
}

fn errors() -> Outcome {
    let folder = tempfile::tempdir()?;
    check_log(jit::compile(&Kernel::Broken.program(), ARCH, Some(folder.path())).err())?;
    ensure(files(folder.path()).is_empty(), "a kernel that does not compile is in the cache")?;
    match jit::compile(&Kernel::Nothing.program(), "sm_1", None) {
        Err(Error::Compile { kernel, log }) => ensure(kernel == "test Nothing" && log.contains("--gpu-architecture"), log),
        other => Err(format!("{other:?}").into()),
    }?;
    let architectures = Nvrtc::get()?.architectures()?;
    ensure(architectures.contains(&90) && architectures.is_sorted(), format!("{architectures:?}"))
}

fn error_on_a_stream() -> Outcome {
    let (_, stream) = gpu()?;
    for _ in 0..2 {
        check_log(KERNELS.get("test", &stream, Kernel::Broken).err())?;
        check_scale(&stream, 100, 1)?;
    }
    Ok(())
}

/// Every file below a folder that is not the driver's own (it keeps some in `.nv` of the home folder).
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let ours = entries.filter(|path| path.file_name().is_none_or(|name| name != ".nv"));
    ours.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

fn cache() -> Outcome {
    let folder = tempfile::tempdir()?;
    let program = Kernel::Scale { factor: 61 }.program();
    let compile = |folder: &Path| jit::compile(&program, ARCH, Some(folder)).map_err(Failed::from);
    let first = compile(folder.path())?;
    same("origin", first.origin, Origin::Compiler)?;
    ensure(first.log.contains("registers"), format!("no registers in the log: {}", first.log))?;
    let second = compile(folder.path())?;
    same("origin", second.origin, Origin::Disk)?;
    ensure(first.image == second.image, "the image from the disk is another one")?;
    report(format!("compiled in {:?}, from the disk in {:?}", first.time, second.time));
    // Nothing but what decides the code makes another file.
    let other = Kernel::Scale { factor: 67 }.program();
    same("origin of other constants", jit::compile(&other, ARCH, Some(folder.path()))?.origin, Origin::Compiler)?;
    same("origin for another architecture", jit::compile(&program, "sm_80", Some(folder.path()))?.origin, Origin::Compiler)?;
    same("files", files(folder.path()).len(), 3)?;
    // Spoiled in every way: compiled again, never loaded, and whole afterwards.
    let alone = tempfile::tempdir()?;
    compile(alone.path())?;
    let [file] = &files(alone.path())[..] else { return Err("one file was expected".into()) };
    let good = fs::read(file)?;
    let middle = good.len() / 2;
    let spoiled = [
        ("empty", Vec::new()),
        ("half", good[..middle].to_vec()),
        ("one byte short", good[..good.len() - 1].to_vec()),
        ("one byte long", [&good[..], &[0]].concat()),
        ("one bit of the image", [&good[..middle], &[good[middle] ^ 1], &good[middle + 1..]].concat()),
        ("one bit of the head", [&[good[0] ^ 1], &good[1..]].concat()),
        ("zeros", vec![0; good.len()]),
    ];
    for (case, bytes) in spoiled {
        fs::write(file, bytes)?;
        let compiled = compile(alone.path())?;
        ensure(compiled.origin == Origin::Compiler && compiled.image == first.image, format!("{case}: {:?}", compiled.origin))?;
        ensure(fs::read(file)? == good, format!("{case}: the file was not replaced"))?;
    }
    same("origin", compile(alone.path())?.origin, Origin::Disk)?;
    same("files", files(alone.path()).len(), 1)?;
    // A folder that is not there is made; one that cannot be made costs time only.
    same("origin", compile(&alone.path().join("a/b"))?.origin, Origin::Compiler)?;
    same("origin", compile(&alone.path().join("a/b"))?.origin, Origin::Disk)?;
    same("origin", compile(&file.join("c"))?.origin, Origin::Compiler)?;
    same("origin", compile(&file.join("c"))?.origin, Origin::Compiler)
}

fn cache_folder() -> Outcome {
    let root = tempfile::tempdir()?;
    let (ours, shared, home) = (root.path().join("ours"), root.path().join("shared"), root.path().join("home"));
    let everywhere = [("MOE_CACHE_DIR", ours.as_path()), ("XDG_CACHE_HOME", &shared), ("HOME", &home)];
    // The first variable that is set decides.
    for (i, folder) in [ours.clone(), shared.join("moe-kernels"), home.join(".cache/moe-kernels")].iter().enumerate() {
        let variables = &everywhere[i..];
        for origin in ["Compiler", "Disk"] {
            let printed = run_in_child("compile", variables)?;
            ensure(printed.starts_with(origin), format!("{variables:?}: {printed}"))?;
        }
        same("files", files(root.path()).len(), i + 1)?;
        same("files in the folder", files(folder).len(), 1)?;
    }
    Ok(())
}

fn at_once() -> Outcome {
    const NUM: usize = 4;
    let folder = tempfile::tempdir()?;
    let variables = [("MOE_CACHE_DIR", folder.path())];
    let children = (0..NUM).map(|_| start("compile", &variables)).collect::<Result<Vec<_>, _>>()?;
    let printed = children.into_iter().map(finish).collect::<Result<Vec<_>, _>>()?;
    let image = |line: &str| line.split_once(' ').map(|(_, image)| image.to_owned());
    ensure(printed.iter().all(|line| image(line) == image(&printed[0])), format!("images differ: {printed:?}"))?;
    report(format!("{} of {NUM} processes compiled", printed.iter().filter(|line| line.starts_with("Compiler")).count()));
    same("files", files(folder.path()).len(), 1)?;
    let last = run_in_child("compile", &variables)?;
    ensure(last.starts_with("Disk") && image(&last) == image(&printed[0]), last)
}

fn missing() -> Outcome {
    let folder = tempfile::tempdir()?;
    let nowhere = folder.path().join("libnvrtc.so.13");
    let error = match run_in_child("compile", &[("MOE_CACHE_DIR", folder.path()), ("MOE_NVRTC", &nowhere)]) {
        Err(failed) => failed.message().unwrap_or_default().to_owned(),
        Ok(printed) => return Err(printed.into()),
    };
    let wanted = format!("library libnvrtc (CUDA run-time compiler) was not found; searched {}", nowhere.display());
    ensure(error.contains(&wanted), error)
}

fn times() -> Outcome {
    let folder = tempfile::tempdir()?;
    let variables = [("MOE_CACHE_DIR", folder.path())];
    let mut milliseconds = Vec::new();
    for (case, origin) in [("cold", "compiler"), ("warm", "disk"), ("warm again", "disk")] {
        let printed = run_in_child("load", &variables)?;
        report(format!("milliseconds, {case}: {}", printed.lines().collect::<Vec<_>>().join(", ")));
        for name in ["first", "second"] {
            let line = printed.lines().find_map(|line| line.strip_prefix(name)).ok_or("a line is missing")?;
            let (time, from) = line.trim().split_once(' ').ok_or("a time is missing")?;
            same("origin", from, origin)?;
            milliseconds.push(time.parse::<f64>()?);
        }
    }
    // The promise is 1 s and 5 ms; three times that leaves room for a machine with other work (arbitrary).
    let [cold, warm] = [&milliseconds[..2], &milliseconds[2..]].map(|times| times.iter().copied().fold(0.0, f64::max));
    ensure(cold < 3000.0 && warm < 15.0, format!("cold {cold} ms, warm {warm} ms"))
}
