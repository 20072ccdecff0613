//! What a measurement comes to: what the tables show and `--json` writes.
#![forbid(unsafe_code)]

use moe_kernels::ep::{Launches, Tuning};
use moe_kernels::measure::ceiling::CopyCeiling;
use moe_kernels::measure::link::LinkCeiling;
use moe_kernels::measure::{Environment, IdleReport, Statistics};
use moe_kernels::{Backend, Result};

use super::case::{Case, Traffic};
use super::rank::{Arm, Plan, RankResult};
use super::{Arguments, Ceilings, Phase};
use crate::bench::statistics;

/// Everything.
#[derive(serde::Serialize)]
pub struct Record {
    pub bench: &'static str,
    pub unit: &'static str,
    pub environment: Environment,
    pub idle: Vec<IdleReport>,
    pub job: Job,
    pub runs: Vec<Run>,
}

/// What was asked for.
#[derive(serde::Serialize)]
pub struct Job {
    pub phase: &'static str,
    pub backend: &'static str,
    /// The model of the GPU.
    pub gpu: Option<String>,
    /// GPUs on which ranks take turns; 0 on a CPU.
    pub num_gpus: usize,
    pub ranks: usize,
    pub is_processes: bool,
    pub hidden: usize,
    pub top_k: usize,
    pub experts: usize,
    pub dtype: String,
    pub layout: String,
    pub mode: String,
    pub wire: String,
    pub routing: String,
    pub seed: u64,
    pub repeats: usize,
    pub inputs: usize,
    pub is_staged: bool,
    pub geometry: Vec<String>,
    pub sms: Vec<String>,
}

impl Job {
    pub fn new(phase: Phase, a: &Arguments, backend: &Backend) -> Self {
        let s = &a.shape;
        let dtype =
            s.quantize.map_or_else(|| s.dtype.clone(), |quantize| format!("{} to e4m3, {quantize:?} scales", s.dtype).to_lowercase());
        Job {
            phase: match phase {
                Phase::Dispatch => "dispatch",
                Phase::Combine => "combine",
                Phase::Pair => "pair",
            },
            backend: backend.name(),
            gpu: match backend {
                Backend::Cuda(cuda) => Some(cuda.device().properties().name.clone()),
                _ => None,
            },
            num_gpus: match backend {
                Backend::Cuda(cuda) => cuda.gpus().len().min(s.ranks),
                _ => 0,
            },
            ranks: s.ranks,
            is_processes: s.processes,
            hidden: s.hidden,
            top_k: s.top_k,
            experts: s.experts,
            dtype,
            layout: name(&s.layout),
            mode: name(&s.mode),
            wire: name(&s.wire),
            routing: s.routing.clone(),
            seed: s.seed,
            repeats: a.repeats.into(),
            inputs: a.inputs.into(),
            is_staged: s.staged,
            geometry: a.launching.geometry.clone(),
            sms: a.launching.sms.clone(),
        }
    }
}

/// A choice as the command line names it.
pub fn name<T: clap::ValueEnum>(value: &T) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// One number of tokens.
#[derive(serde::Serialize)]
pub struct Run {
    pub num_tokens: usize,
    pub is_programmatic: bool,
    /// How launches were shaped.
    pub tuning: Tuning,
    pub rounds: usize,
    /// The slowest rank of each replay.
    pub slowest: Times,
    /// By rank.
    pub ranks: Vec<RankRecord>,
    /// By GPU, when ranks are on several: its number among those of the backend.
    pub gpus: Vec<GpuRecord>,
    /// All ranks.
    pub traffic: Traffic,
    /// The best copy of what a dispatch of all ranks of the first GPU reads and writes, and of what their combine does; measured in the same run.
    pub copy_of_dispatch: Option<CopyCeiling>,
    pub copy_of_combine: Option<CopyCeiling>,
    /// The best that links do with as many bytes as leave the busiest GPU in a dispatch, and in a combine, when ranks are on several.
    pub links_of_dispatch: Option<LinkCeiling>,
    pub links_of_combine: Option<LinkCeiling>,
    pub launches: Option<Launches>,
    /// Launches of a dispatch and of a combine.
    pub num_launches: Option<[usize; 2]>,
    pub wrong: Vec<String>,
}

/// Seconds of a call; what was not measured is absent.
#[derive(serde::Serialize)]
pub struct Times {
    pub dispatch: Option<Statistics>,
    /// Pair less dispatch, sample by sample.
    pub combine: Option<Statistics>,
    pub pair: Option<Statistics>,
    pub payload_alone: Option<Statistics>,
    pub skip_payload: Option<Statistics>,
    pub local: Option<Statistics>,
    /// Dispatch less payload alone: of the medians.
    pub overhead: Option<f64>,
    /// Overhead in a dispatch: the share of routing, words and waits.
    pub routing_share: Option<f64>,
}

/// What a GPU's links carry, of all its ranks: bytes that leave it, against what links do at best when all directions are busy.
#[derive(Debug, serde::Serialize)]
pub struct GpuRecord {
    pub gpu: usize,
    pub num_ranks: usize,
    /// Against a kernel that writes.
    pub dispatch: Option<Use>,
    pub payload_alone: Option<Use>,
    /// Against a kernel that reads.
    pub combine: Option<Use>,
}

/// How well a link is used.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Use {
    pub bytes: u64,
    /// In the median of the GPU's slowest rank.
    pub bytes_per_second: f64,
    pub of_ceiling: f64,
}

impl Use {
    /// `None` when a rank has no time.
    fn new(bytes: u64, times: impl Iterator<Item = Option<Statistics>>, ceiling: f64) -> Option<Self> {
        let slowest = times.map(|time| time.map(|time| time.median)).reduce(|a, b| Some(a?.max(b?)))??;
        let bytes_per_second = bytes as f64 / slowest;
        Some(Use { bytes, bytes_per_second, of_ceiling: bytes_per_second / ceiling })
    }
}

impl GpuRecord {
    /// `write` and `read`: bytes per second of the ceilings.
    fn new(gpu: usize, ranks: &[RankRecord], write: f64, read: f64) -> Self {
        let own = || ranks.iter().filter(|rank| rank.gpu == gpu);
        let dispatch_bytes = own().map(|rank| rank.dispatch_link_bytes).sum();
        GpuRecord {
            gpu,
            num_ranks: own().count(),
            dispatch: Use::new(dispatch_bytes, own().map(|rank| rank.times.dispatch), write),
            payload_alone: Use::new(dispatch_bytes, own().map(|rank| rank.times.payload_alone), write),
            combine: Use::new(own().map(|rank| rank.combine_link_bytes).sum(), own().map(|rank| rank.times.combine), read),
        }
    }
}

/// One rank.
#[derive(serde::Serialize)]
pub struct RankRecord {
    pub rank: usize,
    /// Its GPU's number among those of the backend.
    pub gpu: usize,
    pub times: Times,
    pub traffic: Traffic,
    /// Bytes that leave the rank's GPU for others in a dispatch and in a combine; where all ranks share one, those that leave the rank.
    pub dispatch_link_bytes: u64,
    pub combine_link_bytes: u64,
    /// The same per second.
    pub dispatch_link_bytes_per_second: Option<f64>,
    pub combine_link_bytes_per_second: Option<f64>,
    /// Bytes of received rows, its own included.
    pub dispatch_algorithm_bytes_per_second: Option<f64>,
    pub combine_algorithm_bytes_per_second: Option<f64>,
    pub host: Option<Host>,
}

/// Seconds of the host for a call.
#[derive(serde::Serialize)]
pub struct Host {
    pub dispatch: Statistics,
    pub combine: Statistics,
    pub bare_launch: Statistics,
    /// Two kernels in turns.
    pub bare_launch_in_turns: Statistics,
    /// A dispatch, less as many bare launches as it makes, for each of them; the same of a combine.
    pub dispatch_beyond_per_launch: f64,
    pub combine_beyond_per_launch: f64,
}

impl Run {
    pub fn new(case: &Case, plan: &Plan, is_programmatic: bool, results: Vec<RankResult>, ceilings: &Ceilings) -> Result<Self> {
        let Ceilings { num_gpus, copies, links } = *ceilings;
        let of = |arm: Arm| -> Vec<&[f64]> { results.iter().filter_map(|result| super::samples(result, arm)).collect() };
        let slowest = |arm: Arm| -> Option<Vec<f64>> {
            let all = of(arm);
            let num = all.first()?.len();
            Some((0..num).map(|i| all.iter().map(|samples| samples[i]).fold(0.0, f64::max)).collect())
        };
        let mut traffic = Traffic::default();
        let mut ranks = Vec::new();
        for result in &results {
            let (own, link) = (case.traffic(result.rank)?, case.link_bytes(result.rank, num_gpus)?);
            traffic += own;
            let times = Times::new(|arm| super::samples(result, arm).map(<[f64]>::to_vec))?;
            let per_second = |bytes: u64, time: &Option<Statistics>| time.map(|time| bytes as f64 / time.median);
            let host = match (&result.host, result.num_launches) {
                (Some(host), Some([dispatch, combine])) => Some(Host::new(host, dispatch, combine)?),
                _ => None,
            };
            ranks.push(RankRecord {
                rank: result.rank,
                gpu: result.rank % num_gpus,
                dispatch_link_bytes: link.dispatch,
                combine_link_bytes: link.combine,
                dispatch_link_bytes_per_second: per_second(link.dispatch, &times.dispatch),
                combine_link_bytes_per_second: per_second(link.combine, &times.combine),
                dispatch_algorithm_bytes_per_second: per_second(own.dispatch_in_bytes, &times.dispatch),
                combine_algorithm_bytes_per_second: per_second(own.combine_in_bytes, &times.combine),
                times,
                traffic: own,
                host,
            });
        }
        Ok(Run {
            num_tokens: case.num_tokens(0),
            is_programmatic,
            tuning: plan.tuning,
            rounds: plan.rounds,
            slowest: Times::new(slowest)?,
            gpus: links.map_or_else(Vec::new, |[dispatch, combine]| {
                let (write, read) = (dispatch.write.together.bytes_per_second, combine.read.together.bytes_per_second);
                (0..num_gpus).map(|gpu| GpuRecord::new(gpu, &ranks, write, read)).collect()
            }),
            ranks,
            traffic,
            copy_of_dispatch: copies.map(|[dispatch, _]| dispatch),
            copy_of_combine: copies.map(|[_, combine]| combine),
            links_of_dispatch: links.map(|[dispatch, _]| dispatch),
            links_of_combine: links.map(|[_, combine]| combine),
            launches: results.first().and_then(|result| result.launches),
            num_launches: results.first().and_then(|result| result.num_launches),
            wrong: results.into_iter().flat_map(|result| result.wrong).collect(),
        })
    }
}

impl Times {
    fn new(samples: impl Fn(Arm) -> Option<Vec<f64>>) -> Result<Self> {
        let of = |arm: Arm| samples(arm).filter(|samples| !samples.is_empty()).map(|samples| statistics(&samples)).transpose();
        let combine = match (samples(Arm::Pair), samples(Arm::Dispatch)) {
            (Some(pair), Some(dispatch)) if !pair.is_empty() => {
                let differences: Vec<f64> = pair.iter().zip(&dispatch).map(|(pair, dispatch)| pair - dispatch).collect();
                Some(statistics(&differences)?)
            }
            _ => None,
        };
        let (dispatch, payload_alone) = (of(Arm::Dispatch)?, of(Arm::Payload)?);
        let overhead = dispatch.zip(payload_alone).map(|(dispatch, payload)| dispatch.median - payload.median);
        let routing_share = overhead.zip(dispatch).map(|(overhead, dispatch)| overhead / dispatch.median);
        Ok(Times {
            dispatch,
            combine,
            pair: of(Arm::Pair)?,
            payload_alone,
            skip_payload: of(Arm::SkipPayload)?,
            local: of(Arm::Local)?,
            overhead,
            routing_share,
        })
    }
}

impl Host {
    fn new(host: &super::rank::HostCost, num_dispatch: usize, num_combine: usize) -> Result<Self> {
        let (dispatch, combine, bare_launch) = (statistics(&host.dispatch)?, statistics(&host.combine)?, statistics(&host.bare)?);
        let beyond = |call: Statistics, num: usize| (call.median / num.max(1) as f64) - bare_launch.median;
        Ok(Host {
            dispatch_beyond_per_launch: beyond(dispatch, num_dispatch),
            combine_beyond_per_launch: beyond(combine, num_combine),
            dispatch,
            combine,
            bare_launch,
            bare_launch_in_turns: statistics(&host.bare_in_turns)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank whose samples of dispatch and of payload are all `seconds`, and those of a pair three times that.
    fn rank(rank: usize, gpu: usize, bytes: [u64; 2], seconds: f64) -> RankRecord {
        let samples = |arm: Arm| match arm {
            Arm::Dispatch => Some(vec![seconds; 3]),
            Arm::Pair => Some(vec![3.0 * seconds; 3]),
            _ => None,
        };
        RankRecord {
            rank,
            gpu,
            times: Times::new(samples).unwrap(),
            traffic: Traffic::default(),
            dispatch_link_bytes: bytes[0],
            combine_link_bytes: bytes[1],
            dispatch_link_bytes_per_second: None,
            combine_link_bytes_per_second: None,
            dispatch_algorithm_bytes_per_second: None,
            combine_algorithm_bytes_per_second: None,
            host: None,
        }
    }

    #[test]
    fn links_carry_what_all_ranks_of_a_gpu_send() {
        let ranks = [rank(0, 0, [100, 40], 2.0), rank(1, 1, [7, 9], 1.0), rank(2, 0, [60, 20], 4.0), rank(3, 1, [3, 1], 0.5)];
        let gpu = GpuRecord::new(0, &ranks, 50.0, 15.0);
        assert_eq!((gpu.gpu, gpu.num_ranks), (0, 2));
        // The slowest of its ranks takes 4 s and 8 s.
        assert_eq!(gpu.dispatch, Some(Use { bytes: 160, bytes_per_second: 40.0, of_ceiling: 0.8 }));
        assert_eq!(gpu.combine, Some(Use { bytes: 60, bytes_per_second: 7.5, of_ceiling: 0.5 }));
        assert_eq!(gpu.payload_alone, None);
        let other = GpuRecord::new(1, &ranks, 50.0, 15.0);
        assert_eq!(other.dispatch, Some(Use { bytes: 10, bytes_per_second: 10.0, of_ceiling: 0.2 }));
        assert_eq!(other.combine, Some(Use { bytes: 10, bytes_per_second: 5.0, of_ceiling: 5.0 / 15.0 }));
        assert_eq!(GpuRecord::new(2, &ranks, 1.0, 1.0).dispatch, None);
    }
}
