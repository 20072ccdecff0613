//! `moe run --processes`: every rank is a process; rank 0 gathers what all did, checks it and prints.
#![forbid(unsafe_code)]

use moe_kernels::Result;

use super::options::{Arguments, invalid};

#[cfg(target_os = "linux")]
pub use self::linux::{launch, run_rank};

/// A comparison with a recording runs with threads.
pub fn refuse_recording(arguments: &Arguments) -> Result<()> {
    match arguments.processes {
        true => Err(invalid("--processes", "given", "absent: a comparison with a recording runs with threads")),
        false => Ok(()),
    }
}

/// Processes of one world are only on Linux.
#[cfg(not(target_os = "linux"))]
pub fn launch(_: usize) -> Result<bool> {
    let why = "it needs memory files and futexes, which only Linux has".into();
    Err(moe_kernels::Error::Unsupported { op: "run", what: "--processes".into(), why })
}

#[cfg(target_os = "linux")]
mod linux {
    use std::os::unix::process::ExitStatusExt;
    use std::time::Duration;

    use moe_kernels::ep::{Rendezvous, World};
    use moe_kernels::layer::Report;
    use moe_kernels::routing::Routes;
    use moe_kernels::{Error, Result};

    use super::super::Task;
    use super::super::execute::{Buffer, RankRun, Weights, Work};
    use super::super::model::Model;
    use super::super::options::{Arguments, TIMEOUT};
    use crate::output::{Output, Progress};

    /// What the other ranks get to end by themselves once one has failed (arbitrary: they are told within milliseconds of the end of a process).
    const GRACE: Duration = Duration::from_secs(10);

    fn io(what: &str, why: impl ToString) -> Error {
        Error::Io { what: what.into(), why: why.to_string() }
    }

    /// Starts this program again, with its arguments, as each of `ranks`, and ends as they do.
    pub fn launch(ranks: usize) -> Result<bool> {
        let program = std::env::current_exe().map_err(|e| io("finding this program", e))?;
        let failed = moe_kernels::ep::launch(program, std::env::args_os().skip(1), ranks)?.relay(GRACE)?;
        let Some((rank, status)) = failed else { return Ok(true) };
        match (status.code(), status.signal()) {
            (Some(1), _) => Ok(false),
            // That rank has said what is wrong.
            (Some(code), _) => std::process::exit(code),
            (None, signal) => {
                let why = format!("its process was ended by signal {}", signal.unwrap_or(0));
                Err(io(&format!("rank {rank}"), why))
            }
        }
    }

    /// This process's part, as the rank that its environment says.
    pub fn run_rank(arguments: &Arguments, output: &mut Output) -> Result<bool> {
        let rendezvous = Rendezvous::from_env("moe run")?.timeout(TIMEOUT)?;
        let arguments = Arguments { ranks: rendezvous.size(), processes: true, ..arguments.clone() };
        let is_first = rendezvous.rank().index() == 0;
        let result = as_rank(&arguments, &rendezvous, output);
        match &result {
            // Rank 0 says it for all, unless it is the one that ended.
            Err(Error::Poisoned { first }) if !is_first && first.rank.index() != 0 => Ok(false),
            Err(Error::Setup { .. } | Error::Mismatch { .. }) if !is_first => Ok(false),
            _ => result,
        }
    }

    fn as_rank(arguments: &Arguments, rendezvous: &Rendezvous, output: &mut Output) -> Result<bool> {
        arguments.check()?;
        let (rank, ranks, seed) = (rendezvous.rank().index(), arguments.ranks, arguments.seed);
        let checkpoint = Model::of_checkpoint(arguments)?;
        if let Some(model) = &checkpoint
            && model.recording(arguments)?.is_some()
        {
            super::refuse_recording(arguments)?;
        }
        let task = Task::new(arguments, arguments.backend()?, checkpoint)?;
        let start = if rank == 0 { Some(task.announce(output)?) } else { None };
        let world = World::join(&task.backend, rendezvous)?;
        let Task { backend, source, config, .. } = &task;
        let common = Weights::common(backend, config, &source.model, seed)?;
        let experts = Weights::experts(backend, config, &source.model, ranks, rank, seed)?;
        let progress = start.is_some().then(|| Progress::new(arguments.iterations + 1, "running"));
        let work = Work { backend, config, source, num_iterations: arguments.iterations, seed };
        let run = work.on_rank(&world, &common, &experts, progress.as_ref());
        drop(progress);
        let all = world.gather(run.and_then(|run| to_bytes(&run)))?;
        let Some(start) = start else { return Ok(true) };
        // The other ranks end and free their weights, of which the check needs all.
        drop(world);
        let runs = all.iter().map(|bytes| from_bytes(bytes)).collect::<Result<Vec<_>>>()?;
        let progress = Progress::new(ranks, "making weights to check with");
        let of_rank = |other: usize| {
            let weights =
                if other == rank { Ok(experts.clone()) } else { Weights::experts(backend, config, &source.model, ranks, other, seed) };
            progress.step();
            weights
        };
        let weights = Weights { common, experts: (0..ranks).map(of_rank).collect::<Result<_>>()? };
        drop(progress);
        task.finish(start, &weights, &runs, output)
    }

    /// What stands before the arrays of a rank's run.
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Head {
        iterations: Vec<(Duration, Report)>,
        num_tokens: usize,
        k: usize,
        x_bytes: usize,
        is_repeatable: bool,
    }

    /// The length of a head, the head, then ids, weights, tokens and results.
    fn to_bytes(run: &RankRun) -> Result<Vec<u8>> {
        let RankRun { iterations, routes, x, out, is_repeatable } = run;
        let (num_tokens, k, x_bytes) = (routes.num_tokens, routes.k, x.len());
        let head = Head { iterations: iterations.clone(), num_tokens, k, x_bytes, is_repeatable: *is_repeatable };
        let head = serde_json::to_vec(&head).map_err(|e| io("writing a rank's results", e))?;
        let arrays = [bytemuck::cast_slice(&routes.topk_idx), bytemuck::cast_slice(&routes.topk_weights), x, &out.bytes()[..x_bytes]];
        let mut bytes = (head.len() as u64).to_le_bytes().to_vec();
        bytes.extend(head);
        arrays.into_iter().for_each(|array| bytes.extend(array));
        Ok(bytes)
    }

    fn from_bytes(bytes: &[u8]) -> Result<RankRun> {
        let short = || io("reading a rank's results", "they are incomplete");
        let (len, rest) = bytes.split_first_chunk().ok_or_else(short)?;
        let (head, mut rest) = rest.split_at_checked(u64::from_le_bytes(*len) as usize).ok_or_else(short)?;
        let Head { iterations, num_tokens, k, x_bytes, is_repeatable } =
            serde_json::from_slice(head).map_err(|e| io("reading a rank's results", e))?;
        let mut take = |len: usize| -> Result<&[u8]> {
            let (array, after) = rest.split_at_checked(len).ok_or_else(short)?;
            rest = after;
            Ok(array)
        };
        let routes_bytes = num_tokens.checked_mul(k).and_then(|n| n.checked_mul(4)).ok_or_else(short)?; // 4: an i32, an f32
        let routes = Routes {
            topk_idx: take(routes_bytes)?.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
            topk_weights: take(routes_bytes)?.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
            num_tokens,
            k,
        };
        let x = take(x_bytes)?.to_vec();
        let mut out = Buffer::new(x_bytes, u128::MAX);
        out.bytes_mut()[..x_bytes].copy_from_slice(take(x_bytes)?);
        Ok(RankRun { iterations, routes, x, out, is_repeatable })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_run_travels() {
            let mut out = Buffer::new(40, 7);
            out.bytes_mut()[39] = 9;
            let routes = Routes { topk_idx: vec![3, -1, 0, 2], topk_weights: vec![0.5, 0.0, 1.0, f32::MIN_POSITIVE], num_tokens: 2, k: 2 };
            let report = Report { num_rows: 5, num_rows_per_expert: vec![2, 3], ..Report::default() };
            let iterations = vec![(Duration::from_nanos(1_234_567), report)];
            let run = RankRun { iterations, routes, x: (0..40).collect(), out, is_repeatable: true };
            let bytes = to_bytes(&run).unwrap();
            let got = from_bytes(&bytes).unwrap();
            assert!(got.iterations == run.iterations && got.routes == run.routes && got.x == run.x && got.is_repeatable);
            assert_eq!(got.out.bytes()[..40], run.out.bytes()[..40]);
            for len in [0, 7, 8, 50, bytes.len() - 1] {
                assert!(from_bytes(&bytes[..len]).is_err(), "{len} bytes");
            }
        }
    }
}
