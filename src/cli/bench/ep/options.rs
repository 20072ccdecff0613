//! What is measured: the options of the benchmarks of dispatch and combine, and what they come to.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use moe_kernels::ep::{self, Config, MAX_K, MAX_RANKS, MAX_TOKENS, Measure, PhaseTuning, Quantize, Sums, Tuning};
use moe_kernels::routing::Routes;
use moe_kernels::routing::synthetic::{Kind, Synthetic};
use moe_kernels::routing::trace::{Options, Trace};
use moe_kernels::{Backend, DType, Error, Result};

use crate::names::{LayoutKind, ModeKind, ReduceKind, WireKind};

/// Bound of a rank's waits: what is measured takes milliseconds, and a hang is to be seen while somebody looks (arbitrary).
const TIMEOUT: Duration = Duration::from_secs(20);

/// Combines here add nothing: other kernels need not be compiled.
pub const SUMS: Sums = Sums { plain: true, add_to: false, add_to_f32: false, unfolded: true };

/// What is measured, and where.
#[derive(Debug, Clone, clap::Args)]
pub struct Shape {
    /// Where it runs: auto, cpu, cuda, cuda:N, or cuda:N,M,.. on whose GPUs the ranks take turns; those of one GPU share it
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub backend: String,
    /// Ranks: threads of this process. Under torchrun the processes that it started are the ranks
    #[arg(long, value_name = "R", default_value_t = 2)]
    pub ranks: usize,
    /// Each rank is a process of its own
    #[arg(long)]
    pub processes: bool,
    /// Tokens of each rank; several numbers are measured one after the other
    #[arg(long, value_name = "T,..", value_delimiter = ',', default_value = "128")]
    pub tokens: Vec<usize>,
    /// Elements of a row
    #[arg(long, value_name = "H", default_value_t = 7168)]
    pub hidden: usize,
    /// Experts of a token
    #[arg(long, value_name = "K", default_value_t = 8)]
    pub top_k: usize,
    /// Experts of all ranks
    #[arg(long, value_name = "E", default_value_t = 256)]
    pub experts: usize,
    /// Type of the rows of dispatch: bf16, f16, f32, e4m3, e5m2 (with 4 bytes of scale per 128 elements) or bytes
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    pub dtype: String,
    /// Rows are quantised to e4m3 on their way
    #[arg(long, value_enum)]
    pub quantize: Option<QuantizeKind>,
    /// In which form rows travel back
    #[arg(long, value_enum, default_value_t = WireKind::AsIs)]
    pub wire: WireKind,
    /// Protocol of dispatch and combine
    #[arg(long, value_enum, default_value_t = ModeKind::Throughput)]
    pub mode: ModeKind,
    /// Tokens that a call is said to have, which chooses the form of low-latency [default: those that it has]
    #[arg(long, value_name = "T")]
    pub expected_tokens: Option<usize>,
    /// How received rows are arranged
    #[arg(long, value_enum, default_value_t = LayoutKind::Token)]
    pub layout: LayoutKind,
    /// Rows to a multiple of which a segment is padded (by-expert)
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub segment_align: usize,
    /// Where expert rows are summed
    #[arg(long, value_enum, default_value_t = ReduceKind::Rank)]
    pub reduce: ReduceKind,
    /// Experts' rows lie in a tensor of the caller, not in the bank
    #[arg(long)]
    pub staged: bool,
    /// uniform, even, one, zipf:S (for example zipf:0.7), or a file of recorded routes
    #[arg(long, value_name = "KIND", default_value = "uniform")]
    pub routing: String,
    /// Layer to take from a file of several
    #[arg(long, value_name = "N")]
    pub trace_layer: Option<u32>,
    /// Seed of rows and routes
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// How launches are shaped.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Launching {
    /// Blocks and threads of the kernel that moves rows, for example 64x256; for one phase: dispatch=64x256 [default: chosen by number of tokens]
    #[arg(long, value_name = "[PHASE=]BxT")]
    pub geometry: Vec<String>,
    /// Most multiprocessors that a phase may occupy: 16, or dispatch=16
    #[arg(long, value_name = "[PHASE=]N")]
    pub sms: Vec<String>,
    /// Kernels are launched programmatically: they start while the one before them ends
    #[arg(long, value_name = "WHEN", value_enum, num_args = 0..=1, default_value = "off", default_missing_value = "on")]
    pub programmatic: Programmatic,
    /// With programmatic launch, ranks that share a GPU: combine may start while the dispatch before it still waits for rows
    #[arg(long)]
    pub early: bool,
}

/// Whether launches are programmatic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Programmatic {
    /// They are not
    #[default]
    Off,
    /// They are
    On,
    /// Without, and then with
    Both,
}

impl Programmatic {
    /// One after the other.
    pub fn each(self) -> &'static [bool] {
        match self {
            Programmatic::Off => &[false],
            Programmatic::On => &[true],
            Programmatic::Both => &[false, true],
        }
    }
}

/// Names of [`Quantize`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum QuantizeKind {
    /// A scale of 4 bytes per 128 elements
    F32,
    /// A power of two per 128 elements
    PowerOfTwo,
}

pub fn invalid(what: &str, got: impl ToString, want: impl ToString) -> Error {
    Error::Invalid { op: "bench", what: what.into(), got: got.to_string(), want: want.to_string() }
}

impl Shape {
    /// Fails for a number that no measurement can have, before anything is made.
    pub fn check(&self) -> Result<()> {
        let numbers = [("--ranks", self.ranks, 1, MAX_RANKS), ("--top-k", self.top_k, 1, MAX_K), ("--experts", self.experts, 1, 1 << 20)];
        let tokens = self.tokens.iter().map(|&tokens| ("--tokens", tokens, 0, MAX_TOKENS));
        let expected = self.expected_tokens.map(|tokens| ("--expected-tokens", tokens, 0, MAX_TOKENS));
        for (what, got, least, most) in numbers.into_iter().chain(tokens).chain(expected) {
            if !(least..=most).contains(&got) {
                return Err(invalid(what, got, format!("{least} to {most}")));
            }
        }
        if self.layout != LayoutKind::Expert && self.segment_align != 1 {
            return Err(invalid("--segment-align", self.segment_align, "absent, unless the layout is by-expert"));
        }
        self.kind()?;
        self.tokens.iter().try_for_each(|&tokens| self.config(tokens)?.plan(self.ranks).map(|_| ()))
    }

    pub fn backend(&self) -> Result<Backend> {
        Backend::from_name(&self.backend)
    }

    /// What all ranks agree on, for calls of this many tokens.
    pub fn config(&self, tokens: usize) -> Result<Config> {
        let dtype: DType = self.dtype.parse().map_err(|_| invalid("--dtype", format!("`{}`", self.dtype), DTYPES))?;
        let is_payload = dtype.is_float() || matches!(dtype, DType::E4M3 | DType::E5M2 | DType::Bytes);
        if !is_payload {
            return Err(invalid("--dtype", dtype, DTYPES));
        }
        let base = Config::new(self.hidden, dtype, self.experts, self.top_k, tokens.max(1));
        let layout = match self.layout {
            LayoutKind::Token => ep::Layout::ByToken,
            LayoutKind::Expert => ep::Layout::ByExpert { segment_align: self.segment_align },
            LayoutKind::ExpertFixed => ep::Layout::ByExpertFixed { rows_per_expert: (self.ranks * tokens).max(1) },
        };
        Ok(Config {
            layout,
            scale_bytes: if matches!(dtype, DType::E4M3 | DType::E5M2) { 4 * self.hidden.div_ceil(ep::SCALE_BLOCK) } else { 0 },
            quantize: self.quantize.map(|kind| match kind {
                QuantizeKind::F32 => Quantize::F32,
                QuantizeKind::PowerOfTwo => Quantize::PowerOfTwo,
            }),
            mode: self.mode.value(),
            expected_tokens: self.expected_tokens.unwrap_or(tokens),
            wire: self.wire.value(),
            reduce: self.reduce.value(),
            timeout: TIMEOUT,
            ..base
        })
    }

    fn kind(&self) -> Result<Option<Kind>> {
        match self.routing.parse() {
            Ok(kind) => Ok(Some(kind)),
            Err(_) if Path::new(&self.routing).is_file() => Ok(None),
            Err(_) => {
                let want = "uniform, even, one, zipf:S with S from 0 to 10, for example zipf:0.7, or a file of recorded routes";
                Err(invalid("--routing", format!("`{}`", self.routing), want))
            }
        }
    }

    /// The routes of every rank's tokens.
    pub fn routes(&self, tokens: usize) -> Result<Vec<Routes>> {
        match self.kind()? {
            Some(kind) => {
                let of_rank = |rank| {
                    Synthetic { kind, num_experts: self.experts, k: self.top_k, seed: self.seed, stream: rank as u64 }.routes(tokens)
                };
                (0..self.ranks).map(of_rank).collect()
            }
            None => {
                let path = PathBuf::from(&self.routing);
                let options = Options { num_experts: Some(self.experts), layer: self.trace_layer, keep_warmup: false };
                let trace = Trace::read(&path, &options)?;
                if trace.routes.k != self.top_k {
                    return Err(invalid("--top-k", self.top_k, format!("{}, as {} has", trace.routes.k, path.display())));
                }
                // Each rank goes on where the one before it stopped.
                let all = trace.tokens(self.ranks * tokens)?;
                let of_rank = |rank: usize| {
                    let part = rank * tokens * all.k..(rank + 1) * tokens * all.k;
                    Routes {
                        topk_idx: all.topk_idx[part.clone()].to_vec(),
                        topk_weights: all.topk_weights[part].to_vec(),
                        num_tokens: tokens,
                        k: all.k,
                    }
                };
                Ok((0..self.ranks).map(of_rank).collect())
            }
        }
    }
}

const DTYPES: &str = "bf16, f16, f32, e4m3, e5m2 or bytes";

impl Launching {
    /// What the options come to.
    ///
    /// # Errors
    /// An option that is no geometry or no number, or names no phase.
    pub fn tuning(&self) -> Result<Tuning> {
        let mut tuning = Tuning { sums: SUMS, early: self.early, measure: Measure::default(), ..Tuning::default() };
        for text in &self.geometry {
            const WANT: &str = "BLOCKSxTHREADS, such as 64x256 or dispatch=64x256";
            let (phase, value) = split("--geometry", text, WANT)?;
            let numbers = value.split_once('x').and_then(|(blocks, threads)| Some((blocks.parse().ok()?, threads.parse().ok()?)));
            let (blocks, threads): (u32, u32) = numbers.ok_or_else(|| invalid("--geometry", format!("`{text}`"), WANT))?;
            if blocks == 0 || !threads.is_multiple_of(64) || !(64..=1024).contains(&threads) {
                return Err(invalid("--geometry", format!("`{text}`"), "at least 1 block, of 64 to 1024 threads, a multiple of 64"));
            }
            phase.each(&mut tuning, |phase| phase.geometry = Some((blocks, threads)));
        }
        for text in &self.sms {
            const WANT: &str = "a number from 1 on, such as 16 or dispatch=16";
            let (phase, value) = split("--sms", text, WANT)?;
            let sms: u32 = value.parse().ok().filter(|&sms| sms > 0).ok_or_else(|| invalid("--sms", format!("`{text}`"), WANT))?;
            phase.each(&mut tuning, |phase| phase.sms = Some(sms));
        }
        Ok(tuning)
    }
}

/// Whose an option is.
#[derive(Clone, Copy)]
enum Phases {
    Dispatch,
    Combine,
    Both,
}

impl Phases {
    fn each(self, tuning: &mut Tuning, set: impl Fn(&mut PhaseTuning)) {
        if matches!(self, Phases::Dispatch | Phases::Both) {
            set(&mut tuning.dispatch);
        }
        if matches!(self, Phases::Combine | Phases::Both) {
            set(&mut tuning.combine);
        }
    }
}

fn split<'a>(option: &str, text: &'a str, want: &str) -> Result<(Phases, &'a str)> {
    match text.split_once('=') {
        None => Ok((Phases::Both, text)),
        Some(("dispatch", value)) => Ok((Phases::Dispatch, value)),
        Some(("combine", value)) => Ok((Phases::Combine, value)),
        Some(_) => Err(invalid(option, format!("`{text}`"), want)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuning(geometry: &[&str], sms: &[&str]) -> Result<Tuning> {
        let all = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Launching { geometry: all(geometry), sms: all(sms), ..Launching::default() }.tuning()
    }

    #[test]
    fn geometry_of_each_phase() {
        let t = tuning(&["64x256", "combine=33x512"], &["dispatch=16"]).unwrap();
        assert_eq!(t.dispatch, PhaseTuning { geometry: Some((64, 256)), sms: Some(16) });
        assert_eq!(t.combine, PhaseTuning { geometry: Some((33, 512)), sms: None });
        assert_eq!(tuning(&[], &[]).unwrap(), Tuning { sums: SUMS, ..Tuning::default() });
        for bad in ["64", "0x256", "64x100", "64x2048", "x", "route=64x256", "-1x64"] {
            assert!(tuning(&[bad], &[]).is_err(), "{bad}");
        }
        for bad in ["0", "many", "route=3"] {
            assert!(tuning(&[], &[bad]).is_err(), "{bad}");
        }
    }
}
