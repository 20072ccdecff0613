//! `moe inspect`: what each kernel needs on each architecture, as the compilers of this machine say.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

use moe_kernels::gpu::Program;
use moe_kernels::gpu::inspect::{Arch, Compilers, Report, Sweep, Vendor, catalogue, cells, difference, markdown, pairs};
use moe_kernels::measure::report;
use moe_kernels::{Error, Result};

use crate::output::{self, Output, Progress};

/// Options of `moe inspect`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Only kernels whose name contains one of these texts [default: all of them]
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,
    /// Only this architecture, like sm_90a or gfx950; may be given again [default: those of the compile gate]
    #[arg(long = "arch", value_name = "ARCH")]
    archs: Vec<String>,
    /// Print JSON instead
    #[arg(long, conflicts_with_all = ["markdown", "check"])]
    json: bool,
    /// Print the table that is committed; every compiler must be there
    #[arg(long, conflicts_with_all = ["kernels", "archs", "check"])]
    markdown: bool,
    /// Compare with the committed table; every compiler must be there
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kernels", "archs"])]
    check: Option<PathBuf>,
    /// Vary one constant of a kernel and show registers and spills: elements-per-lane
    #[arg(long, value_name = "NAME", conflicts_with_all = ["kernels", "archs", "markdown", "check"])]
    sweep: Option<String>,
}

#[derive(serde::Serialize)]
struct Json {
    compilers: Vec<Compiler>,
    /// Vendors whose compiler is missing, and why.
    left_out: Vec<String>,
    kernels: Vec<Report>,
    errors: Vec<String>,
}

#[derive(serde::Serialize)]
struct Compiler {
    vendor: String,
    version: String,
}

/// Compiles what was asked for; `false` when a kernel breaks a rule, does not compile, or the table differs.
pub fn inspect(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    if let Some(name) = &arguments.sweep {
        return sweep(name, arguments.json, output);
    }
    run(catalogue(), arguments, output)
}

fn run(programs: Vec<Program>, arguments: &Arguments, output: &mut Output) -> Result<bool> {
    let programs = choose(programs, &arguments.kernels)?;
    let archs = match arguments.archs.is_empty() {
        true => Arch::gate(),
        false => arguments.archs.iter().map(|name| Arch::from_name(name)).collect::<Result<_>>()?,
    };
    let compilers = Compilers::find();
    // Whoever names architectures, or wants the whole table, wants all of that.
    let must_have_all = !arguments.archs.is_empty() || arguments.markdown || arguments.check.is_some();
    let (versions, missing) = versions(&compilers, &archs, must_have_all)?;
    let archs: Vec<Arch> = archs.into_iter().filter(|arch| versions.iter().any(|(vendor, _)| *vendor == arch.vendor())).collect();
    let pairs = pairs(&programs, &archs);
    let progress = Progress::new(pairs.len(), "compiling");
    let results = compilers.reports(&pairs, || progress.step());
    drop(progress);

    let (mut reports, mut errors) = (Vec::new(), Vec::new());
    for (result, (_, arch)) in results.into_iter().zip(&pairs) {
        match result {
            Ok(report) => reports.push(report),
            Err(error) => errors.push(format!("{arch}: {error}")),
        }
    }
    let faults: Vec<String> = reports.iter().flat_map(faults).collect();
    let is_good = errors.is_empty() && faults.is_empty();
    if arguments.json {
        let compilers = versions.into_iter().map(|(vendor, version)| Compiler { vendor: vendor.to_string(), version }).collect();
        json(&Json { compilers, left_out: missing, kernels: reports, errors }, output)?;
        return Ok(is_good);
    }
    for line in missing {
        output.line(line)?;
    }
    let is_same = match (&arguments.check, arguments.markdown) {
        (Some(file), _) => check(file, &markdown(&versions, &reports), output)?,
        (None, true) => {
            output.line(markdown(&versions, &reports).trim_end())?;
            // On stdout stands the table and nothing else.
            faults.iter().chain(&errors).for_each(|line| output::warning(line));
            return Ok(is_good);
        }
        (None, false) => {
            // Names are long: scalar registers and local memory are left to --json and --markdown.
            let row = |report: &Report| {
                let [kernel, arch, registers, _, spills, _, smem, code] = cells(report);
                vec![kernel, arch, registers, spills, smem, code]
            };
            output.table(&["<kernel", "<arch", "registers", "spills", "smem", "code"], reports.iter().map(row))?;
            true
        }
    };
    for line in errors.iter().chain(&faults) {
        output.line(format_args!("FAILED {line}"))?;
    }
    let compiled_by = versions.iter().map(|(vendor, version)| format!("{vendor} by {version}")).collect::<Vec<_>>().join(", ");
    let num_bad = errors.len() + reports.iter().filter(|report| !report.faults.is_empty()).count();
    let num = report::count(pairs.len() as u64);
    output.line(format_args!("{num} kernels and architectures, {num_bad} break a rule ({compiled_by})"))?;
    Ok(is_good && is_same)
}

/// What each vendor's compiler calls itself.
type Versions = Vec<(Vendor, String)>;

/// The compilers that are there, and a line for each vendor whose compiler is missing: an error if it must be there, or if nothing is.
fn versions(compilers: &Compilers, archs: &[Arch], must_have_all: bool) -> Result<(Versions, Vec<String>)> {
    let mut vendors: Vec<Vendor> = archs.iter().map(Arch::vendor).collect();
    vendors.sort();
    vendors.dedup();
    let (mut versions, mut missing) = (Vec::new(), Vec::new());
    for vendor in vendors {
        match compilers.version(vendor) {
            Ok(version) => versions.push((vendor, version)),
            Err(error) if must_have_all => return Err(error),
            Err(error) => missing.push((vendor, error)),
        }
    }
    match missing.first() {
        Some((_, error)) if versions.is_empty() => Err(error.clone()),
        _ => Ok((versions, missing.iter().map(|(vendor, error)| format!("{vendor} is left out: {error}")).collect())),
    }
}

fn faults(report: &Report) -> Vec<String> {
    report.faults.iter().map(|fault| format!("{} for {}: {fault}", report.kernel, report.arch)).collect()
}

/// Prints how the file differs from `text`; `false` when it does.
fn check(file: &Path, text: &str, output: &mut Output) -> Result<bool> {
    let committed =
        fs::read_to_string(file).map_err(|error| Error::Io { what: format!("reading {}", file.display()), why: error.to_string() })?;
    let lines = difference(&committed, text);
    for line in &lines {
        output.line(line)?;
    }
    if !lines.is_empty() {
        let file = file.display();
        output.line(format_args!("{file} is not what the compilers say now; if that is meant: moe inspect --markdown > {file}"))?;
    }
    Ok(lines.is_empty())
}

/// The programs whose names contain one of `texts`: at least one.
fn choose(all: Vec<Program>, texts: &[String]) -> Result<Vec<Program>> {
    let names = all.iter().map(|program| program.name.clone()).collect::<Vec<_>>();
    if let Some(text) = texts.iter().find(|text| !names.iter().any(|name| name.contains(text.as_str()))) {
        let want = format!("a part of one of these names: {}", names.join("; "));
        return Err(Error::Invalid { op: "inspect", what: "KERNEL".into(), got: format!("`{text}`"), want });
    }
    Ok(all.into_iter().filter(|program| texts.is_empty() || texts.iter().any(|text| program.name.contains(text.as_str()))).collect())
}

fn sweep(name: &str, as_json: bool, output: &mut Output) -> Result<bool> {
    let sweeps = Sweep::all();
    let names = sweeps.iter().map(|sweep| sweep.name).collect::<Vec<_>>().join(", ");
    let invalid = || Error::Invalid { op: "inspect", what: "--sweep".into(), got: format!("`{name}`"), want: format!("one of {names}") };
    let sweep = sweeps.iter().find(|sweep| sweep.name == name).ok_or_else(invalid)?;
    let archs = sweep.archs.iter().map(|name| Arch::from_name(name)).collect::<Result<Vec<_>>>()?;
    let compilers = Compilers::find();
    let (_, missing) = versions(&compilers, &archs, false)?;
    let progress = Progress::new(sweep.archs.len() * sweep.published.len(), "compiling");
    let points = sweep.measure(&compilers, || progress.step())?;
    drop(progress);
    if as_json {
        json(&points, output)?;
        return Ok(true);
    }
    for line in missing {
        output.line(line)?;
    }
    output.paragraph("", 0, sweep.what)?;
    let header: Vec<&str> = [sweep.name, sweep.published_as].into_iter().chain(sweep.archs.iter().copied()).collect();
    let cell = |vendor: Vendor, (registers, spills): (u32, u32)| match (spills, vendor) {
        (0, _) => registers.to_string(),
        (_, Vendor::Nvidia) => format!("{registers} + {spills} B"),
        (_, Vendor::Amd) => format!("{registers} + {spills}"),
    };
    let rows = points.iter().map(|point| {
        let measured =
            point.measured.iter().zip(&archs).map(|(measured, arch)| measured.map_or("-".into(), |numbers| cell(arch.vendor(), numbers)));
        [point.value.to_string(), cell(Vendor::Amd, point.published)].into_iter().chain(measured).collect()
    });
    output.table(&header, rows)?;
    output.line("registers of a thread, + what was spilled: registers on AMD, bytes stored on NVIDIA")?;
    Ok(true)
}

fn json(value: &impl serde::Serialize, output: &mut Output) -> Result<()> {
    let text = serde_json::to_string_pretty(value);
    output.line(text.map_err(|error| Error::Io { what: "writing JSON".into(), why: error.to_string() })?)
}

#[cfg(test)]
mod tests {
    use moe_kernels::gpu::inspect::Resources;
    use moe_kernels::gpu::{Carveout, Targets};

    use super::*;

    fn program(name: &str) -> Program {
        let (constants, targets) = (Vec::new(), Targets::All);
        Program {
            name: name.into(),
            entry: "probe",
            sources: &[],
            constants,
            threads: 128,
            smem_bytes: 0,
            max_registers: 64,
            carveout: Carveout::Shared,
            targets,
        }
    }

    #[test]
    fn a_table_that_differs_is_a_failure() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "| a | 1 |\n").unwrap();
        let check = |text| check(file.path(), text, &mut Output::closed());
        assert_eq!(check("| a | 1 |\n"), Ok(true));
        assert_eq!(check("| a | 2 |\n"), Ok(false));
        assert_eq!(check("| a | 1 |\n| b | 1 |\n"), Ok(false));
        assert!(matches!(super::check("nowhere/table.md".as_ref(), "", &mut Output::closed()), Err(Error::Io { .. })));
    }

    #[test]
    fn kernels_are_chosen_by_a_part_of_their_name() {
        let all = || ["gate bf16", "gate f16", "cast bf16"].map(program).to_vec();
        let names = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            choose(all(), &texts).map(|programs| programs.into_iter().map(|program| program.name).collect::<Vec<_>>())
        };
        assert_eq!(names(&[]).unwrap().len(), 3);
        assert_eq!(names(&["bf16"]).unwrap(), ["gate bf16", "cast bf16"]);
        assert_eq!(names(&["cast", "gate f"]).unwrap(), ["gate f16", "cast bf16"]);
        assert!(matches!(names(&["gate", "dispatch"]), Err(Error::Invalid { .. })));
    }

    #[test]
    fn a_fault_is_named_with_kernel_and_architecture() {
        let resources = Resources {
            registers: 65,
            scalar_registers: None,
            spills: 4,
            scalar_spills: 0,
            stack_bytes: 0,
            static_smem_bytes: 0,
            code_bytes: 1,
            lanes: 32,
        };
        let report = Report::new(&program("gate bf16"), &Arch::from_name("sm_90a").unwrap(), resources);
        assert_eq!(faults(&report), ["gate bf16 for sm_90a: 4 bytes spilled", "gate bf16 for sm_90a: 65 registers, at most 64"]);
    }
}
