//! Kernels compiled without a GPU, by the compilers of this machine. A trial whose compiler is missing counts as ignored.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use libtest_mimic::{Failed, Trial};
use moe_kernels::Error;
use moe_kernels::gpu::inspect::{Arch, Compilers, Report, Vendor, catalogue, markdown, pairs};
use moe_kernels::gpu::{Carveout, Constant, Program, Source, Targets};

type Outcome = Result<(), Failed>;
type Test = fn(Vendor) -> Outcome;

const VENDORS: [Vendor; 2] = [Vendor::Nvidia, Vendor::Amd];

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let compilers = Compilers::find();
    let each: [(&str, Test); 4] = [("small", small), ("spills", spills), ("budgets", budgets), ("a_bad_source", a_bad_source)];
    let mut trials = Vec::new();
    for vendor in VENDORS {
        let is_missing = compilers.version(vendor).is_err();
        for (name, test) in each {
            let name = format!("inspect::{}::{name}", vendor.to_string().to_lowercase());
            trials.push(Trial::test(name, move || test(vendor)).with_ignored_flag(is_missing));
        }
    }
    let is_missing = VENDORS.iter().any(|vendor| compilers.version(*vendor).is_err());
    trials.push(Trial::test("inspect::all_cores_give_the_same_table", all_cores_give_the_same_table).with_ignored_flag(is_missing));
    let no_program = PROGRAM.is_none();
    trials.push(Trial::test("inspect::committed_table_has_every_kernel", committed_table_has_every_kernel));
    trials.push(Trial::test("inspect::no_compiler", no_compiler).with_ignored_flag(no_program));
    trials.push(Trial::test("inspect::bad_options", bad_options).with_ignored_flag(no_program));
    trials.push(
        Trial::test("inspect::a_missing_compiler_is_left_out", a_missing_compiler_is_left_out).with_ignored_flag(no_program || is_missing),
    );
    trials
}

/// The program; absent from a build without the feature `cli`.
const PROGRAM: Option<&str> = option_env!("CARGO_BIN_EXE_moe");

/// A thread keeps `N` numbers alive at once: with 1024 threads 128 of them have no room in the registers of any architecture.
const SOURCES: &[Source] = &[
    Source {
        path: "probe.cu",
        text: r#"
#if defined(__HIP__)
#define KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, THREADS))) void
#define SHARED __attribute__((shared))
#define PARAMETERS const
#define THREAD __builtin_amdgcn_workitem_id_x()
#define BARRIER __builtin_amdgcn_s_barrier()
#else
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define SHARED __shared__
#define PARAMETERS const __grid_constant__
#define THREAD threadIdx.x
#define BARRIER __syncthreads()
#endif
"#,
    },
    Source {
        path: "probe_body.cu",
        text: r#"
struct Parameters { float* x; unsigned long long n; };
KERNEL probe(PARAMETERS Parameters p) {
    SHARED float shared[32];
    float a[N];
#pragma unroll
    for (int i = 0; i < N; i++) a[i] = p.x[i * 1024 + THREAD];
    if (THREAD < 32) shared[THREAD] = a[0];
    BARRIER; // all are loaded before any is used
#pragma unroll
    for (int j = 0; j < N; j++) a[j] *= a[(j * 7 + 3) % N] + shared[p.n % 32];
#pragma unroll
    for (int j = 0; j < N; j++) p.x[j * 1024 + THREAD] = a[j];
}
"#,
    },
];

fn probe(num: i64, threads: u32) -> Program {
    Program {
        name: format!("probe {num} {threads}"),
        entry: "probe",
        sources: SOURCES,
        constants: vec![Constant::Int("N", num), Constant::Int("THREADS", i64::from(threads)), Constant::Type("Unused", "float")],
        threads,
        smem_bytes: 16,
        max_registers: 255,
        carveout: Carveout::Shared,
        targets: Targets::All,
    }
}

fn archs(vendor: Vendor) -> Vec<Arch> {
    Arch::gate().into_iter().filter(|arch| arch.vendor() == vendor).collect()
}

fn report(program: &Program, arch: &Arch) -> Result<Report, Failed> {
    Ok(Compilers::find().report(program, arch)?)
}

fn small(vendor: Vendor) -> Outcome {
    for arch in archs(vendor) {
        let report = report(&probe(4, 128), &arch)?;
        let resources = report.resources;
        let lanes = if arch.name().starts_with("gfx9") { 64 } else { 32 };
        let is_plausible = (5..=64).contains(&resources.registers)
            && (100..10_000).contains(&resources.code_bytes)
            && resources.scalar_registers.is_some() == (vendor == Vendor::Amd)
            && resources.lanes == lanes
            && report.smem_bytes == 128 + 16;
        if !is_plausible || !report.faults.is_empty() {
            return Err(format!("{report:?}").into());
        }
    }
    Ok(())
}

fn spills(vendor: Vendor) -> Outcome {
    for arch in archs(vendor) {
        let report = report(&probe(256, 1024), &arch)?;
        if report.resources.spills == 0 || !report.faults.iter().any(|fault| fault.contains("spilled")) {
            return Err(format!("{report:?}").into());
        }
    }
    Ok(())
}

/// A budget of exactly what is used is kept, one less is broken.
fn budgets(vendor: Vendor) -> Outcome {
    for arch in archs(vendor) {
        let used = report(&probe(32, 128), &arch)?.resources.registers;
        let judge = |max_registers| report(&Program { max_registers, ..probe(32, 128) }, &arch);
        let least = (1..=used).find(|budget| arch.max_registers(&Program { max_registers: *budget, ..probe(32, 128) }) >= Some(used));
        let least = least.ok_or("no budget is enough")?;
        if !judge(least)?.faults.is_empty() || judge(least - 1)?.faults.len() != 1 {
            return Err(format!("{arch}: {used} registers, budget {least}").into());
        }
        let greedy = report(&Program { smem_bytes: 300 << 10, ..probe(4, 128) }, &arch)?;
        if !greedy.faults.iter().any(|fault| fault.contains("shared memory")) {
            return Err(format!("{greedy:?}").into());
        }
    }
    Ok(())
}

/// The error has the compiler's log, which names the file and the line of this crate, and says for which architecture.
fn a_bad_source(vendor: Vendor) -> Outcome {
    let mut program = probe(4, 128);
    program.constants.remove(0);
    for arch in archs(vendor) {
        match Compilers::find().report(&program, &arch) {
            Err(Error::Compile { kernel, log }) if kernel.contains(&program.name) && log.contains("probe_body.cu") => {}
            other => return Err(format!("{arch}: {other:?}").into()),
        }
    }
    Ok(())
}

fn all_cores_give_the_same_table() -> Outcome {
    let pairs = pairs(&[probe(4, 128), probe(8, 256)], &Arch::gate());
    let compilers = Compilers::find();
    let num_done = AtomicUsize::new(0);
    let table = || -> Result<String, Failed> {
        let reports = compilers.reports(&pairs, || {
            num_done.fetch_add(1, Ordering::Relaxed);
        });
        Ok(markdown(&[], &reports.into_iter().collect::<Result<Vec<_>, _>>()?))
    };
    let first = table()?;
    let in_order =
        first.lines().filter_map(|line| line.strip_prefix("| probe")).map(|line| line.split(" | ").take(2).collect::<Vec<_>>().join(" "));
    let want: Vec<String> = pairs.iter().map(|(program, arch)| format!("{} {arch}", program.name.trim_start_matches("probe"))).collect();
    if in_order.collect::<Vec<_>>() != want || table()? != first || num_done.into_inner() != 2 * pairs.len() {
        return Err(first.into());
    }
    Ok(())
}

/// No compiler is needed to see that a kernel was added without its lines.
fn committed_table_has_every_kernel() -> Outcome {
    let table = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/resources.md"))?;
    let want: Vec<String> =
        pairs(&catalogue(), &Arch::gate()).iter().map(|(program, arch)| format!("| {} | {arch} |", program.name)).collect();
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| kernel ")).collect();
    if rows.len() != want.len() {
        return Err(format!("{} rows for {} kernels and architectures", rows.len(), want.len()).into());
    }
    match rows.iter().zip(&want).find(|(row, want)| !row.starts_with(want.as_str())) {
        Some((row, want)) => Err(format!("row `{row}` where `{want}` should stand").into()),
        None => Ok(()),
    }
}

/// Runs `moe inspect`: status, stdout, stderr.
fn inspect(arguments: &[&str], environment: &[(&str, &str)]) -> Result<(Option<i32>, String, String), Failed> {
    let mut command = Command::new(PROGRAM.ok_or("no program")?);
    command.arg("inspect").args(arguments).envs(environment.iter().copied()).stdin(Stdio::null());
    let output = command.output()?;
    Ok((output.status.code(), String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?))
}

const NOWHERE: [(&str, &str); 2] = [("MOE_NVRTC", "/nowhere/libnvrtc.so"), ("MOE_CLANG", "/nowhere/clang")];

/// A compiler that must be there and is not: an error in one line that names the places.
fn no_compiler() -> Outcome {
    let nvrtc: &[&str] = &["libnvrtc", "/nowhere/libnvrtc.so"];
    let clang: &[&str] = &["clang with the AMDGPU target", "/nowhere/clang"];
    let cases: [(&[&str], &[&str]); 5] = [
        (&[], nvrtc),
        (&["--arch", "sm_90a"], nvrtc),
        (&["--arch", "gfx950"], clang),
        (&["--markdown"], nvrtc),
        (&["--check", "docs/resources.md"], nvrtc),
    ];
    for (arguments, parts) in cases {
        let (status, stdout, stderr) = inspect(arguments, &NOWHERE)?;
        let is_refused = status == Some(2) && stderr.starts_with("error: ") && stderr.trim_end().lines().count() == 1;
        if !is_refused || !stdout.is_empty() || !parts.iter().all(|part| stderr.contains(part)) {
            return Err(format!("{arguments:?}: status {status:?}\n{stdout}\n{stderr}").into());
        }
    }
    Ok(())
}

fn bad_options() -> Outcome {
    let cases: [(&[&str], &str); 5] = [
        (&["no such kernel"], "KERNEL"),
        (&["--arch", "sm_"], "architecture"),
        (&["--sweep", "nothing"], "--sweep"),
        (&["--markdown", "--json"], "cannot be used with"),
        (&["--check", "x", "--arch", "sm_80"], "cannot be used with"),
    ];
    for (arguments, part) in cases {
        let (status, stdout, stderr) = inspect(arguments, &[])?;
        if status != Some(2) || !stderr.contains(part) {
            return Err(format!("{arguments:?}: status {status:?}\n{stdout}\n{stderr}").into());
        }
    }
    Ok(())
}

/// One compiler of two: the other vendor's kernels are compiled, and a line says what was left out.
fn a_missing_compiler_is_left_out() -> Outcome {
    let kernel = catalogue().first().ok_or("no kernel")?.name.clone();
    for (at, line, left) in [(0, "NVIDIA is left out: ", "AMD by clang"), (1, "AMD is left out: ", "NVIDIA by NVRTC")] {
        let (status, stdout, stderr) = inspect(&[&kernel], &NOWHERE[at..=at])?;
        if status != Some(0) || !stderr.is_empty() || !stdout.lines().any(|text| text.starts_with(line)) || !stdout.contains(left) {
            return Err(format!("status {status:?}\n{stdout}\n{stderr}").into());
        }
    }
    Ok(())
}
