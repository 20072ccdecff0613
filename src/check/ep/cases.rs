//! The worlds, batches and routes on which dispatch and combine are checked, and the scripts made of them.

use super::inputs::{Draw, Ids, draw};
use super::script::{Batch, Count, Phase, Rows, Script, Step};
use crate::ep::{Config, IdSpace, Layout, Mode};
use crate::id::Rank;
use crate::oracle::dispatch::dispatch;
use crate::tensor::DType;

/// Which of a list a group takes. On a CPU all of it. On a GPU kernels are compiled for each world and configuration, one after the other by NVRTC, which
/// no number of threads makes faster: there a group takes a part, other groups with the same feature take others, and together they meet every pair.
#[derive(Debug, Clone, Copy)]
pub enum Part {
    /// All.
    Whole,
    /// Every so many-th, from this one on.
    Every(usize, usize),
}

impl Part {
    /// All on a CPU; on a GPU every `n`-th, from the `first`, which is taken modulo `n`, on.
    pub fn of(is_gpu: bool, n: usize, first: usize) -> Self {
        if is_gpu { Part::Every(n, first % n) } else { Part::Whole }
    }

    /// Whether the `i`-th is taken.
    pub fn takes(self, i: usize) -> bool {
        match self {
            Part::Whole => true,
            Part::Every(n, first) => i % n == first,
        }
    }
}

/// A world and what its ranks route.
#[derive(Debug, Clone)]
pub struct Traffic {
    /// T of each rank: also says how many ranks there are.
    pub tokens: Vec<usize>,
    /// Routes of a token.
    pub k: usize,
    /// Experts of all ranks.
    pub num_experts: usize,
    /// Owner of each expert, when it is not the default.
    pub map: Option<Vec<Rank>>,
    /// How experts are drawn.
    pub ids: Ids,
}

impl Traffic {
    fn new(tokens: &[usize], k: usize, num_experts: usize, ids: Ids) -> Self {
        Traffic { tokens: tokens.to_vec(), k, num_experts, map: None, ids }
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.tokens.len()
    }

    /// A configuration that holds this traffic at its worst.
    pub fn config(&self, hidden: usize, dtype: DType, layout: Layout) -> Config {
        let most = self.tokens.iter().copied().max().unwrap_or(0).max(1);
        let layout = match layout {
            // A segment holds every token of the world.
            Layout::ByExpertFixed { .. } => Layout::ByExpertFixed { rows_per_expert: self.tokens.iter().sum::<usize>().max(1) },
            other => other,
        };
        Config { expert_map: self.map.clone(), layout, ..Config::new(hidden, dtype, self.num_experts, self.k, most) }
    }
}

/// Worlds of 1, 2, 3, 4 and 8; K of 1, 2, 6, 8, 9, 10, 16 and 32; experts that do not divide by the ranks, with maps, one of which leaves a rank
/// without experts; ranks without tokens; duplicate, negative and out-of-range ids; everything masked; everything to one expert.
pub fn traffics() -> Vec<Traffic> {
    let map = |owners: &[u32]| Some(owners.iter().map(|&r| Rank(r)).collect::<Vec<_>>());
    vec![
        Traffic::new(&[7], 2, 8, Ids::Distinct),
        Traffic::new(&[5, 0], 1, 8, Ids::Distinct),
        Traffic::new(&[9, 4], 8, 60, Ids::Messy),
        Traffic::new(&[6, 1, 11], 6, 8, Ids::Distinct),
        Traffic::new(&[0, 0, 0, 0], 2, 8, Ids::Distinct),
        Traffic::new(&[3, 0, 17, 2], 9, 60, Ids::Wide),
        Traffic::new(&[4, 1, 0, 7, 2, 3, 5, 1], 10, 60, Ids::Distinct),
        Traffic::new(&[2, 3, 2, 2, 0, 2, 2, 1], 16, 256, Ids::Messy),
        Traffic::new(&[3, 2, 4], 32, 384, Ids::Distinct),
        Traffic::new(&[4, 4, 0, 1], 6, 8, Ids::Masked),
        Traffic::new(&[5, 6, 7, 8], 2, 60, Ids::AllTo(59)),
        Traffic { map: map(&[2, 0, 2, 2, 0, 0, 2, 0]), ..Traffic::new(&[5, 4, 6], 6, 8, Ids::Messy) },
        Traffic { map: map(&(0..60).map(|e| e % 4).collect::<Vec<_>>()), ..Traffic::new(&[8, 3, 1, 4], 8, 60, Ids::Distinct) },
        Traffic::new(&[6, 5, 4, 3, 2, 1, 7, 8], 32, 60, Ids::Wide),
        Traffic::new(&[1, 40], 8, 8, Ids::Distinct),
    ]
}

/// Tokens, rows and arrivals for several units of parallel work (32 of each) on every rank, and for the kernels of many tokens on GPUs.
pub fn many_tokens() -> Traffic {
    Traffic::new(&[515, 640], 6, 16, Ids::Distinct)
}

/// A batch of `traffic`; its form follows from `index`.
pub fn batch(config: &Config, traffic: &Traffic, tokens: &[usize], index: usize, specials: bool) -> Batch {
    let d = Draw { seed: 1000 + index as u64, tokens: tokens.to_vec(), ids: traffic.ids, weights: !index.is_multiple_of(3), specials };
    let wide = traffic.ids == Ids::Wide;
    Batch {
        ranks: draw(config, &d),
        ids: if wide || index.is_multiple_of(2) { DType::I64 } else { DType::I32 },
        count: [Count::All, Count::Device, Count::Host][index % 3],
        padded: index % 4 >= 2,
    }
}

/// Builds the steps of a script and numbers its arrivals.
#[derive(Debug, Default, Clone)]
pub struct Steps {
    /// So far.
    pub steps: Vec<Step>,
    num_arrivals: usize,
}

/// How a combine is made.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    /// Rows are written into the bank, not passed.
    pub in_place: bool,
    /// With `add_to`, of this type.
    pub add_to: Option<DType>,
    /// With per-row weights to be folded.
    pub fold: bool,
    /// One call or two, for the combine and the dispatch before it.
    pub phase: Phase,
}

impl Form {
    /// Bits of `index` choose; `add_to` is of the combine type or f32.
    pub fn of(index: usize, config: &Config) -> Self {
        let fold = config.fold_weights;
        let phase = if index & 1 == 0 { Phase::Both } else { Phase::Send };
        Form {
            in_place: index & 2 != 0,
            add_to: (index & 4 != 0).then_some(if index & 8 == 0 { config.combine_dtype } else { DType::F32 }),
            fold,
            phase,
        }
    }
}

impl Steps {
    /// A dispatch that gives an arrival; its number.
    pub fn dispatch(&mut self, batch: usize, routing: usize, phase: Phase) -> usize {
        self.steps.push(Step::Dispatch { batch, routing, phase });
        self.arrive(phase)
    }

    /// A dispatch whose arrival is then used, or, when it does not fit, one that every rank must refuse.
    pub fn dispatch_and(&mut self, batch: usize, routing: usize, phase: Phase, fits: bool, then: impl FnOnce(&mut Self, usize)) {
        if fits {
            let arrival = self.dispatch(batch, routing, phase);
            then(self, arrival);
            return;
        }
        self.steps.push(Step::Dispatch { batch, routing, phase });
        if phase == Phase::Send {
            self.steps.push(Step::Receive);
        }
    }

    /// A replay; the number of its arrival.
    pub fn replay(&mut self, batch: usize, routing: usize, phase: Phase) -> usize {
        self.steps.push(Step::Replay { batch, routing, phase });
        self.arrive(phase)
    }

    fn arrive(&mut self, phase: Phase) -> usize {
        if phase == Phase::Send {
            self.steps.push(Step::Receive);
        }
        self.num_arrivals += 1;
        self.num_arrivals - 1
    }

    /// A combine.
    pub fn combine(&mut self, arrival: usize, form: Form) {
        let Form { in_place, add_to, fold, phase } = form;
        self.steps.push(Step::Combine { arrival, in_place, add_to, fold, phase });
        if phase == Phase::Send {
            self.steps.push(Step::Receive);
        }
    }

    /// A drop.
    pub fn drop_arrival(&mut self, arrival: usize) {
        self.steps.push(Step::Drop { arrival });
    }
}

/// `true` when the oracle finds room for the batch.
fn fits(config: &Config, batch: &Batch) -> bool {
    dispatch(config, batch.ranks.len(), &batch.ranks).is_ok()
}

/// The traffic, half of it from the last rank to the first, and new payload for both; then whether the first two fit.
fn four_batches(config: &Config, traffic: &Traffic, first_index: usize, specials: bool) -> (Vec<Batch>, [bool; 2]) {
    let fewer: Vec<usize> = traffic.tokens.iter().rev().map(|&t| t / 2).collect();
    let make = |tokens: &[usize], i: usize| batch(config, traffic, tokens, first_index + i, specials);
    let batches = vec![make(&traffic.tokens, 0), make(&fewer, 1), make(&traffic.tokens, 2), make(&fewer, 3)];
    let fit = [fits(config, &batches[0]), fits(config, &batches[1])];
    (batches, fit)
}

/// Dispatches without combine: a batch, another one into the same bank, then both routings replayed with new payload, and one used again.
pub fn dispatch_script(name: &str, config: Config, traffic: &Traffic, index: usize) -> Script {
    let id_space = if index.is_multiple_of(2) { IdSpace::Global } else { IdSpace::Local };
    let config = Config { id_space, ..config };
    let specials = index % 3 == 1;
    let (batches, fit) = four_batches(&config, traffic, 7 * index, specials);
    let mut steps = Steps::default();
    let (a, b) = if index.is_multiple_of(2) { (Phase::Both, Phase::Send) } else { (Phase::Send, Phase::Both) };
    for (batch, phase) in [(0, a), (1, b)] {
        steps.dispatch_and(batch, batch, phase, fit[batch], Steps::drop_arrival);
    }
    for (batch, phase) in [(2, b), (3, a)] {
        if fit[batch - 2] {
            let arrival = steps.replay(batch, batch - 2, phase);
            steps.drop_arrival(arrival);
        }
    }
    steps.dispatch_and(0, 1, a, fit[0], Steps::drop_arrival);
    let name = format!("{name} {traffic:?}");
    Script { name, world: traffic.world(), config, batches, steps: steps.steps, rows: Rows::BySlot, specials, delays: false }
}

/// Dispatch, combine, dispatch, combine, then the first routing replayed and combined; the forms of each follow from `index`.
pub fn combine_script(name: &str, config: Config, traffic: &Traffic, index: usize) -> Script {
    let id_space = if index % 4 < 2 { IdSpace::Global } else { IdSpace::Local };
    let config = Config { id_space, ..config };
    let specials = index % 3 == 1;
    let (batches, fit) = four_batches(&config, traffic, 5 * index, specials);
    let mut steps = Steps::default();
    for batch in [0, 1] {
        let form = Form::of(index + 3 * batch, &config);
        steps.dispatch_and(batch, batch, form.phase, fit[batch], |steps, arrival| steps.combine(arrival, form));
    }
    if fit[0] {
        let form = Form::of(index + 6, &config);
        let arrival = steps.replay(2, 0, form.phase);
        steps.combine(arrival, form);
    }
    let name = format!("{name} {traffic:?}");
    Script { name, world: traffic.world(), config, batches, steps: steps.steps, rows: Rows::BySlot, specials, delays: false }
}

/// In low-latency mode, with `expected_tokens` that choose its one-message form.
pub fn low_latency_config(config: Config) -> Config {
    Config { mode: Mode::LowLatency, expected_tokens: 1, ..config }
}

/// The same in low-latency mode.
pub fn low_latency(mut script: Script) -> Script {
    script.config = low_latency_config(script.config);
    script.name.insert_str(0, "low latency ");
    script
}
