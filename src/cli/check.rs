//! `moe check`: every operation against its specification.
#![forbid(unsafe_code)]

use std::time::Instant;

use moe_kernels::check::precompile::{self, Share};
use moe_kernels::check::{Failed, Group, groups, runs_on};
use moe_kernels::gpu::Program;
use moe_kernels::measure::report;
use moe_kernels::{Backend, Error, Result};

use crate::output::{Output, Progress};

/// Options of `moe check`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Only this operation [default: all of them]
    #[arg(value_name = "OP")]
    op: Option<String>,
    /// Where it runs: auto, cpu, cuda, cuda:N, or cuda:N,M,.. on whose GPUs ranks take turns
    #[arg(long, value_name = "NAME", default_value = "auto")]
    backend: String,
    /// Only groups, or between processes scripts, whose name contains this text
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Instead: dispatch and combine between processes, one for each rank, against their specification and against threads
    #[arg(long, conflicts_with = "op")]
    processes: bool,
    /// Ranks [default: 1, 2, 3, 4 and 8, one after the other]
    #[arg(long, value_name = "R", requires = "processes")]
    ranks: Option<usize>,
}

/// Runs the chosen groups; `false` when one of them failed.
pub fn check(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    if arguments.processes {
        return processes::check(arguments, output);
    }
    let groups = groups().into_iter().filter(|group| runs_on(group.op, &arguments.backend)).collect();
    let chosen = choose(groups, arguments)?;
    if let Some(share) = Share::of_this_process() {
        return Ok(programs(&chosen).and_then(|programs| share.compile(&programs)).is_ok());
    }
    let backend = Backend::from_name(&arguments.backend)?;
    if let Backend::Cuda(cuda) = &backend {
        precompile::compile(cuda, &programs(&chosen).unwrap_or_default());
    }
    run(&chosen, &backend, output)
}

fn programs(chosen: &[Group]) -> Result<Vec<Program>, Failed> {
    let all: Result<Vec<_>, _> = chosen.iter().map(Group::programs).collect();
    Ok(all?.concat())
}

fn run(chosen: &[Group], backend: &Backend, output: &mut Output) -> Result<bool> {
    let name_width = chosen.iter().map(|group| label(group).chars().count()).max().unwrap_or(0);
    let progress = Progress::new(chosen.len(), "checking");
    let (mut num_passed, mut num_failed) = (0, 0);
    for group in chosen {
        progress.message(label(group));
        let start = Instant::now();
        let result = group.run(backend);
        let seconds = start.elapsed().as_secs_f64();
        let head = format!("{:<name_width$}", label(group));
        let text = match result {
            Ok(num_cases) => {
                num_passed += 1;
                format!("{head}  {:>7} cases  {:>8}  ok", report::count(num_cases as u64), report::duration(seconds))
            }
            Err(Failed(message)) => {
                num_failed += 1;
                format!("{head}  {:>13}  {:>8}  FAILED\n    {}", "", report::duration(seconds), message.replace('\n', "\n    "))
            }
        };
        progress.suspend(|| output.line(text))?;
        progress.step();
    }
    drop(progress);
    // A backend that is asked for and missing is an error above, so no group is ever skipped.
    output.line(format_args!("{num_passed} passed, {num_failed} failed, 0 ignored"))?;
    Ok(num_failed == 0)
}

fn label(group: &Group) -> String {
    format!("{} {}", group.op, group.name)
}

/// The groups that the arguments select: at least one.
fn choose(all: Vec<Group>, arguments: &Arguments) -> Result<Vec<Group>> {
    let mut ops: Vec<&str> = all.iter().map(|group| group.op).collect();
    ops.dedup();
    let invalid = |what: &str, got: &str, want: String| Error::Invalid { op: "check", what: what.into(), got: format!("`{got}`"), want };
    if let Some(op) = &arguments.op
        && !ops.contains(&op.as_str())
    {
        return Err(invalid("OP", op, format!("one of {}", ops.join(", "))));
    }
    let is_chosen = |group: &Group| {
        arguments.op.as_ref().is_none_or(|op| op == group.op)
            && arguments.filter.as_ref().is_none_or(|text| label(group).contains(text.as_str()))
    };
    let (chosen, others): (Vec<Group>, Vec<Group>) = all.into_iter().partition(is_chosen);
    if chosen.is_empty() {
        let names: Vec<String> = others.iter().filter(|group| arguments.op.as_ref().is_none_or(|op| op == group.op)).map(label).collect();
        let text = arguments.filter.as_deref().unwrap_or_default();
        return Err(invalid("--filter", text, format!("a part of one of these names: {}", names.join("; "))));
    }
    Ok(chosen)
}

/// Dispatch and combine between processes.
mod processes {
    use super::*;

    #[cfg(target_os = "linux")]
    pub fn check(arguments: &Arguments, output: &mut Output) -> Result<bool> {
        use moe_kernels::check::ep::processes::run;
        use moe_kernels::ep::{Rendezvous, World};
        const WORLDS: [usize; 5] = [1, 2, 3, 4, 8];
        let (ranks, backend) = (arguments.ranks, Backend::from_name(&arguments.backend)?);
        if !Rendezvous::is_in_env() {
            if let Some(ranks) = ranks.filter(|ranks| !WORLDS.contains(ranks)) {
                return Err(Error::Invalid { op: "check", what: "--ranks".into(), got: ranks.to_string(), want: "1, 2, 3, 4 or 8".into() });
            }
            let worlds = ranks.map_or(WORLDS.to_vec(), |ranks| vec![ranks]);
            return worlds.into_iter().try_fold(true, |all, ranks| Ok(crate::run::launch(ranks)? && all));
        }
        let start = Instant::now();
        let world = World::join(&backend, &Rendezvous::from_env("moe check")?)?;
        let result = run(&world, arguments.filter.as_deref().unwrap_or_default());
        if world.rank().index() > 0 {
            return Ok(result.is_ok());
        }
        let head = format!("processes, {} ranks", world.size());
        let seconds = report::duration(start.elapsed().as_secs_f64());
        match &result {
            Ok(num_cases) => output.line(format!("{head}  {:>7} cases  {seconds:>8}  ok", report::count(*num_cases as u64)))?,
            Err(Failed(message)) => output.line(format!("{head}  {seconds:>8}  FAILED\n    {}", message.replace('\n', "\n    ")))?,
        }
        Ok(result.is_ok())
    }

    #[cfg(not(target_os = "linux"))]
    pub fn check(_: &Arguments, _: &mut Output) -> Result<bool> {
        crate::run::launch(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_decides() {
        let good = || Group::new("op", "good", |_| Ok(3));
        let bad = || Group::new("op", "bad", |_| Err(Failed("case 7:\nwrong".into())));
        let empty = || Group::new("op", "empty", |_| Ok(0));
        for (groups, want) in [(vec![good(), good()], true), (vec![bad(), good()], false), (vec![good(), empty()], false)] {
            assert_eq!(run(&groups, &Backend::cpu(), &mut Output::closed()), Ok(want));
        }
    }

    #[test]
    fn nothing_chosen_is_an_error() {
        let arguments = |op: Option<&str>, filter: Option<&str>| Arguments {
            op: op.map(str::to_owned),
            backend: "cpu".into(),
            filter: filter.map(str::to_owned),
            processes: false,
            ranks: None,
        };
        let all = || vec![Group::new("a", "x", |_| Ok(1)), Group::new("b", "y", |_| Ok(1))];
        let names = |op, filter| choose(all(), &arguments(op, filter)).map(|groups| groups.iter().map(label).collect::<Vec<_>>());
        assert_eq!(names(None, None).unwrap(), ["a x", "b y"]);
        assert_eq!(names(Some("b"), None).unwrap(), ["b y"]);
        assert_eq!(names(None, Some("x")).unwrap(), ["a x"]);
        for (op, filter) in [(Some("c"), None), (Some("a"), Some("y")), (None, Some("z"))] {
            assert!(matches!(names(op, filter), Err(Error::Invalid { .. })));
        }
        assert!(choose(Vec::new(), &arguments(None, None)).is_err());
    }
}
