//! Dispatch and combine between processes: every rank is a process and walks through the same scripts as the ranks of a world of threads.
#![forbid(unsafe_code)]

use super::cases::{combine_script, dispatch_script, low_latency, traffics};
use super::script::{Script, run_joined};
use crate::backend::Backend;
use crate::check::Failed;
use crate::ensure;
use crate::ep::{Config, Layout, Quantize, Reduce, Wire, World};
use crate::tensor::DType;

/// Every layout, with payloads, wires and sums of different kinds, one of them in low-latency mode, for each traffic of `world` ranks; then the small
/// ones for tools that make kernels slow, if they are of so many ranks.
fn scripts(world: usize) -> Vec<Script> {
    let layouts = [
        Layout::ByToken,
        Layout::ByExpert { segment_align: 1 },
        Layout::ByExpert { segment_align: 8 },        // 8: arbitrary, pads
        Layout::ByExpertFixed { rows_per_expert: 0 }, // set by the traffic
    ];
    let mut scripts = Vec::new();
    for (t, traffic) in traffics().iter().filter(|traffic| traffic.world() == world).enumerate() {
        for (i, layout) in layouts.into_iter().enumerate() {
            let base = |dtype| traffic.config(144, dtype, layout); // 144: a scale block and a short one
            let quantized = Config { quantize: Some(Quantize::F32), ..base(DType::BF16) };
            scripts.push(dispatch_script("processes, quantised", quantized, traffic, t + i));
            let in_flight = Config { in_flight: 2, ..base(DType::F32) };
            scripts.push(low_latency(dispatch_script("processes, two banks", in_flight, traffic, t + i + 1)));
            let by_expert = layout.is_by_expert();
            let reduce = if by_expert && t.is_multiple_of(2) { Reduce::AtSource } else { Reduce::AtRank };
            let summed = Config { reduce, weighted: by_expert, fold_weights: true, ..base(DType::BF16) };
            scripts.push(combine_script("processes, folded", summed, traffic, t + i));
            let wire = Config { wire: Wire::Fp8Block, ..base(DType::BF16) };
            scripts.push(low_latency(combine_script("processes, fp8", wire, traffic, t + i + 1)));
        }
    }
    let small = crate::check::dispatch::sanitizer_scripts().into_iter().chain(crate::check::combine::sanitizer_scripts());
    scripts.extend(small.filter(|script| script.world == world));
    scripts
}

/// Runs every script whose name contains `filter` on `world`, each rank in its process, and returns how many there were: all that a rank sees is compared
/// with the oracle, and with what the same rank of a world of threads sees. Collective; every rank returns the same.
///
/// # Errors
/// What differs, on which rank, in which step; that there is no such script.
pub fn run(world: &World, filter: &str) -> Result<usize, Failed> {
    let backend = Backend::Cpu(world.cpu().clone());
    let mut scripts = scripts(world.size());
    scripts.retain(|script| script.name.contains(filter));
    ensure!(!scripts.is_empty(), "no script of {} ranks has `{filter}` in its name", world.size());
    let num_scripts = scripts.len();
    for script in scripts {
        let name = script.name.clone();
        let prepared = script.prepare()?;
        let digest = run_joined(&prepared, world)?.digest;
        // One process says what threads give; all hear of it.
        let of_threads =
            if world.rank().index() == 0 { prepared.run(&backend).map(|report| report.digest).map_err(|f| f.0) } else { Ok(0) };
        let of_threads: Vec<Result<u64, String>> = world.exchange("check", Ok(of_threads))?;
        let of_threads = of_threads[0].clone().map_err(Failed)?;
        ensure!(of_threads == digest, "{name}: processes and threads saw different bytes");
    }
    Ok(num_scripts)
}
