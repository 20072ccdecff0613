//! Which kernels an object's combines choose among, and with how many blocks. Measured figures are of one H200 that ranks share, 7168 bf16, top-8 of
//! 256 (docs/ep-gpu.md); what lies between them follows the same rules.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rayon::prelude::*;

use super::params::{CombineParameters, PrepareParameters, SendParameters};
use super::spec::{Add, KERNELS, Kind, Row, Spec};
use crate::ep::device::registry::Waiting;
use crate::ep::device::shape::{self, Shape};
use crate::ep::device::table::{Key, Measured, TablePhase};
use crate::ep::device::tuning::{
    ChosenBy, Class, LANES, Launch, PhaseTuning, Split, Tokens, Tuning, blocks_for, registers, without_repeats,
};
use crate::ep::{Config, Plan};
use crate::error::{Error, Result};
use crate::gpu::{Device, Program};
use crate::tensor::DType;

/// As in dispatch.
const SMALL_WORLD: u32 = 4;
/// Most blocks of `prepare` (arbitrary: it streams, and waits for nobody).
const MOST_BLOCKS: u32 = 1024;
/// Rows whose loads are in flight together (measured at 8 ranks: 8 rows of 2 vectors are faster than 2 of 4).
const MOST_GROUP: u32 = 8;

/// What decides the launches of an object's combines, beside the number of tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub shape: Shape,
    pub row: Row,
    pub has_fold: bool,
    /// No call has more, so neither do classes of calls.
    pub max_tokens: u32,
    pub ranks_on_device: u32,
    pub tuning: Tuning,
    /// What a table says of this GPU.
    pub measured: Measured,
    /// By class, once all of the above is known: a call need not find them again (measured: half of the host's time of a call).
    pub mappings: Option<[Mapping; 3]>,
}

/// Threads of a block, the split of a row of the result, rows at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mapping {
    pub threads: u32,
    pub split: Split,
    pub max_group: u32,
    pub stream: bool,
    /// A kernel of one block waits for the peers, and the one that sums starts behind it: a launch more, but then its blocks need not all run at once.
    pub waits_before: bool,
}

impl Choice {
    pub fn new(c: &Config, p: &Plan, ranks_on_device: u32, tuning: Tuning) -> Self {
        let ranks_on_device = ranks_on_device.max(1);
        Choice {
            shape: Shape::new(c, p),
            row: Row::new(c, p),
            has_fold: c.fold_weights,
            max_tokens: c.max_tokens as u32,
            ranks_on_device,
            tuning,
            measured: Measured::default(),
            mappings: None,
        }
    }

    /// The same, with its mappings found.
    pub fn with_mappings(self) -> Self {
        Choice { mappings: Some(Class::ALL.map(|class| self.mapping(class))), ..self }
    }

    fn phase(&self) -> PhaseTuning {
        self.tuning.combine
    }

    /// What chooses threads and blocks.
    pub fn chosen_by(&self, class: Class) -> ChosenBy {
        match (self.phase().geometry, self.measured.threads(self.reachable(class))) {
            (Some(_), _) => ChosenBy::Caller,
            (None, Some(_)) => ChosenBy::Table,
            (None, None) => ChosenBy::Rule,
        }
    }

    /// Threads of a block: those of the caller, of a table, or what the rule has chosen.
    fn threads(&self, class: Class, chosen: u32) -> u32 {
        let measured = self.measured.threads(class).unwrap_or(chosen);
        self.phase().geometry.map_or(measured, |(_, threads)| threads)
    }

    /// Blocks, likewise.
    fn blocks(&self, tokens: Tokens, class: Class, chosen: u32) -> u32 {
        let measured = self.measured.blocks(tokens.likely, class).unwrap_or(chosen);
        self.within(self.phase().geometry.map_or(measured, |(blocks, _)| blocks))
    }

    fn is_small_world(&self) -> bool {
        u32::from(self.shape.world) <= SMALL_WORLD
    }

    /// Rows that a token's result is the sum of, at most.
    fn most_terms(&self) -> u32 {
        if self.shape.is_by_expert() && !self.row.sums { self.shape.k.into() } else { self.shape.num_destinations() }
    }

    fn spec(&self, threads: u32, kind: Kind) -> Spec {
        Spec { shape: self.shape.only(kind.uses(&self.shape)), threads: threads as u16, kind }
    }

    /// Whether rows are written before they travel, when experts wrote them in place.
    pub fn prepares_in_place(&self) -> bool {
        self.row.sums || self.row.is_converted()
    }

    /// Most tokens of the middle class, in which every block waits itself, and so few blocks of each of the ranks that share a device. Measured (us) against
    /// one block that waits before the others: 2 ranks, 192 tokens 5.4 and 6.4, 256 tokens 8.5 and 7.7; 4 ranks, 128 tokens 14.8 and 15.8 (early 16.2 and
    /// 15.3), 256 tokens 24.1 and 22.2; 8 ranks, 32 tokens 7.8 and 9.0, 48 tokens 16.2 and 13.4.
    fn most_some(&self) -> u32 {
        match self.ranks_on_device {
            _ if self.phase().sms.is_some() => Class::Some.most(),
            0..=2 => 192,
            3..=4 => 128,
            _ => 32,
        }
    }

    /// The kernels of the sums of so many tokens.
    pub fn class_of(&self, num_tokens: u32) -> Class {
        Class::within(num_tokens, self.most_some())
    }

    fn reachable(&self, class: Class) -> Class {
        class.min(self.class_of(self.max_tokens))
    }

    pub fn mapping(&self, class: Class) -> Mapping {
        if let Some(mappings) = &self.mappings {
            return mappings[class as usize];
        }
        let class = self.reachable(class);
        // Few blocks are to do it all, and wait themselves.
        let few_sms = self.phase().sms.is_some();
        // Of many, a block for each two parts: new ones take the places of those that end, and all of the device is busy to the end.
        let waits_before = class == Class::Many && !few_sms;
        let chosen = match class {
            _ if few_sms => 512,
            _ if waits_before => 64,
            // So many ranks share the device that few blocks of each may wait at once.
            Class::Some if self.ranks_on_device > 2 => 512,
            Class::Few if self.is_small_world() => 512,
            Class::Few | Class::Some | Class::Many => 256,
        };
        let threads = self.threads(class, chosen);
        let groups = self.row.num_vectors().div_ceil(LANES);
        let (parts, unroll) = match class {
            Class::Few => (groups, 1),
            Class::Some if self.is_small_world() => (7, 2),
            Class::Some => (7, 1),
            Class::Many if few_sms => (1, 2),
            Class::Many => (7, 2),
        };
        // Words of rows in flight, as registers hold them beside what else a thread keeps (derived: 48 registers; at most what was measured).
        let words = registers(threads).saturating_sub(48).clamp(4, 64);
        let piece = self.row.piece_words();
        let max_group = (words / piece).clamp(1, MOST_GROUP);
        let unroll = unroll.min(words / (piece * max_group.min(self.most_terms()))).max(1);
        let split = Split::new(self.row.num_vectors(), parts, unroll, 1);
        Mapping { threads, split, max_group, stream: class == Class::Many, waits_before }
    }

    pub fn combine(&self, class: Class, add: Add, folds: bool) -> Spec {
        let Mapping { threads, split, max_group, stream, waits_before } = self.mapping(class);
        let (row, with_signals) = (self.row, !waits_before && !self.tuning.measure.skip_signals);
        // What is only of `prepare` does not make another kernel.
        let row = if row.sums { Row { weighted: false, ..row } } else { row };
        self.spec(threads, Kind::Combine { row, add, folds, split, max_group: max_group as u16, stream, with_signals })
    }

    /// Whether a kernel that waits stands before the one that sums.
    pub fn waits_before(&self, class: Class) -> bool {
        self.mapping(class).waits_before && !self.tuning.measure.skip_signals
    }

    /// Whether the caller's blocks wait for peers. They are meant for the largest calls: where those wait before, blocks of smaller ones that wait are cut.
    fn waits_with_geometry(&self) -> bool {
        self.phase().geometry.is_some() && !self.mapping(Class::Many).waits_before
    }

    fn prepare_parts(&self, class: Class) -> u32 {
        // In groups of 8 lanes of 16 elements, 4 of them a warp's step; arbitrary: all of a row's steps at once when rows are few.
        let steps = self.row.hidden.div_ceil(16 * LANES);
        if self.reachable(class) == Class::Many { 1 } else { steps }
    }

    pub fn prepare(&self, class: Class, with_rows: bool) -> Spec {
        let parts = if with_rows { self.prepare_parts(class) } else { 1 };
        // Without sums its rows are not weighted, and kernels of both kinds are one.
        let row = Row { weighted: self.row.weighted && self.row.sums, ..self.row };
        self.spec(256, Kind::Prepare { row, parts: parts as u16, with_rows })
    }

    pub fn send(&self, waits: bool) -> Spec {
        self.spec(64, Kind::Send { waits }) // 64: a thread for each rank
    }

    fn within(&self, blocks: u32) -> u32 {
        self.phase().sms.map_or(blocks, |sms| blocks.min(sms)).max(1)
    }

    /// A warp for each part of a token; as many as run at once is the caller's to know.
    pub fn combine_blocks(&self, tokens: Tokens, class: Class) -> u32 {
        let Mapping { threads, split, .. } = self.mapping(class);
        let chosen = blocks_for(u64::from(tokens.likely) * u64::from(split.parts), threads);
        self.blocks(tokens, self.reachable(class), chosen)
    }

    pub fn prepare_blocks(&self, tokens: Tokens, class: Class) -> u32 {
        let most_terms = if self.shape.is_by_expert() { u32::from(self.shape.k) } else { self.shape.num_destinations() };
        let rows = u64::from(tokens.likely.max(1)) * u64::from(most_terms);
        self.within(blocks_for(rows * u64::from(self.prepare_parts(class)), 256).min(MOST_BLOCKS))
    }

    /// Every kernel that a call may choose.
    pub fn all(&self) -> Vec<Spec> {
        if !self.tuning.sums.are_any() {
            return Vec::new();
        }
        let mut all = vec![self.send(false)];
        if Class::ALL.iter().any(|class| self.waits_before(*class)) {
            all.push(self.send(true));
        }
        for class in Class::ALL {
            all.push(self.prepare(class, true));
            for (add, folds) in self.results() {
                all.push(self.combine(class, add, folds));
            }
        }
        if self.has_fold {
            all.push(self.prepare(Class::Few, false));
        }
        without_repeats(all)
    }

    /// What a call may ask for.
    fn results(&self) -> impl Iterator<Item = (Add, bool)> + use<> {
        let sums = self.tuning.sums;
        let folds: &[bool] = match (self.has_fold, sums.unfolded) {
            (false, _) => &[false],
            (true, false) => &[true],
            (true, true) => &[false, true],
        };
        let is_f32 = self.row.value == DType::F32;
        let (value, f32) = if is_f32 { (sums.add_to || sums.add_to_f32, false) } else { (sums.add_to, sums.add_to_f32) };
        let adds = [(Add::Nothing, sums.plain), (Add::Value, value), (Add::F32, f32)];
        let adds = adds.into_iter().filter(|(_, is_there)| *is_there);
        adds.flat_map(move |(add, _)| folds.iter().map(move |folds| (add, *folds)))
    }
}

/// Every kernel that a combine of this configuration may choose, whatever the device.
pub(crate) fn programs(c: &Config, p: &Plan, tuning: Tuning) -> Vec<Program> {
    let of = |ranks_on_device: u32| Choice::new(c, p, ranks_on_device, tuning).all();
    without_repeats(of(1).into_iter().chain(of(p.world as u32)).collect()).iter().map(crate::gpu::Spec::program).collect()
}

/// The kernels of an object's combines, loaded.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    pub(super) choice: Choice,
    /// By class. As the next ones, only in an object that combines.
    prepare: Option<[shape::Loaded<PrepareParameters>; 3]>,
    /// Weights alone.
    pub(super) fold: Option<shape::Loaded<PrepareParameters>>,
    send: Option<shape::Loaded<SendParameters>>,
    /// The kernel that waits before the one that sums, where there is one.
    wait: Option<shape::Loaded<SendParameters>>,
    /// By class, by what is added, by whether weights are folded back; those that no call may ask for are missing.
    combine: [[[Option<shape::Loaded<CombineParameters>>; 2]; 3]; 3],
    most_waiting: Arc<AtomicU32>,
}

impl Loaded {
    pub fn load(device: &Device, c: &Config, p: &Plan, ranks_on_device: u32, tuning: Tuning) -> Result<Self> {
        let choice = Choice::new(c, p, ranks_on_device, tuning);
        let key = Key::new(TablePhase::Combine, c, p, choice.ranks_on_device, tuning.combine.sms);
        let choice = Choice { measured: Measured::within(&device.properties().name, &key, choice.most_some()), ..choice }.with_mappings();
        // All at once first; what follows finds them loaded.
        choice.all().into_par_iter().try_for_each(|spec| KERNELS.load(device, spec).map(|_| ()))?;
        fn of<P>(device: &Device, choice: &Choice, spec: Spec) -> Result<shape::Loaded<P>> {
            shape::Loaded::load(&KERNELS, device, choice.ranks_on_device, spec)
        }
        let mut combine = [[[None; 2]; 3]; 3];
        for class in Class::ALL {
            for (add, folds) in choice.results() {
                combine[class as usize][add as usize][usize::from(folds)] = Some(of(device, &choice, choice.combine(class, add, folds))?);
            }
        }
        let combines = choice.tuning.sums.are_any();
        let prepare = |class| of(device, &choice, choice.prepare(class, true));
        let [few, some, many] = Class::ALL;
        Ok(Loaded {
            prepare: if combines { Some([prepare(few)?, prepare(some)?, prepare(many)?]) } else { None },
            fold: if combines && choice.has_fold { Some(of(device, &choice, choice.prepare(few, false))?) } else { None },
            send: if combines { Some(of(device, &choice, choice.send(false))?) } else { None },
            wait: if combines && Class::ALL.iter().any(|class| choice.waits_before(*class)) {
                Some(of(device, &choice, choice.send(true))?)
            } else {
                None
            },
            combine,
            most_waiting: Arc::new(AtomicU32::new(u32::MAX)),
            choice,
        })
    }

    /// # Errors
    /// As of those that follow: [`Error::Unsupported`] for a sum that the object was made without.
    pub(super) fn prepare(&self, class: Class) -> Result<&shape::Loaded<PrepareParameters>> {
        self.prepare.as_ref().map(|by_class| &by_class[class as usize]).ok_or_else(|| self.missing())
    }

    pub(super) fn send(&self) -> Result<&shape::Loaded<SendParameters>> {
        self.send.as_ref().ok_or_else(|| self.missing())
    }

    /// What is launched before the kernel that sums, if that does not wait itself.
    pub(super) fn wait(&self, class: Class) -> Option<&shape::Loaded<SendParameters>> {
        self.wait.as_ref().filter(|_| self.choice.waits_before(class))
    }

    pub(super) fn combine(&self, class: Class, add: Add, folds: bool) -> Result<&shape::Loaded<CombineParameters>> {
        let add = if self.choice.row.value == DType::F32 && add == Add::F32 { Add::Value } else { add };
        self.combine[class as usize][add as usize][usize::from(folds)].as_ref().ok_or_else(|| self.missing())
    }

    fn missing(&self) -> Error {
        let why = format!("the object was made with {:?}", self.choice.tuning.sums);
        Error::Unsupported { op: "combine", what: "this sum".into(), why }
    }

    /// The grids whose blocks wait for peers.
    pub fn waiting(&self, device: &Device) -> Result<Vec<Waiting>> {
        let is_fixed = self.choice.waits_with_geometry();
        let mut all = Vec::new();
        if let Some(wait) = &self.wait {
            all.push(wait.waiting(device, "send", 1, is_fixed)?);
        }
        for class in Class::ALL {
            if self.choice.mapping(class).waits_before {
                continue;
            }
            for kernel in self.combine[class as usize].iter().flatten().flatten() {
                let most = if class == Class::Some { self.choice.most_some() } else { class.most() };
                let blocks = self.combine_blocks(Tokens::exactly(most), class, kernel);
                // Another number of tokens of a table may have more.
                let measured = if is_fixed { 1 } else { self.choice.within(self.choice.measured.most_blocks(class)) };
                let blocks = blocks.max(measured.min(kernel.most_blocks).min(self.most_waiting()));
                all.push(kernel.waiting(device, "combine", blocks, is_fixed)?);
            }
        }
        Ok(all)
    }

    /// How the kernel that sums is launched for a call of so many tokens.
    pub fn launches(&self, num_tokens: u32) -> Launch {
        let class = self.choice.class_of(num_tokens);
        let Mapping { threads, split, .. } = self.choice.mapping(class);
        let tokens = Tokens::exactly(num_tokens);
        let kernel = self.combine[class as usize].iter().flatten().flatten().next();
        let blocks = kernel.map_or_else(|| self.choice.combine_blocks(tokens, class), |kernel| self.combine_blocks(tokens, class, kernel));
        Launch {
            blocks,
            threads,
            parts: split.parts.into(),
            unroll: split.unroll.into(),
            route_blocks: 0,
            chosen_by: self.choice.chosen_by(class),
        }
    }

    /// Unless the caller has said how many.
    pub fn limit_waiting(&self, blocks: u32) {
        if !self.choice.waits_with_geometry() {
            self.most_waiting.store(blocks.max(1), Ordering::Relaxed);
        }
    }

    fn most_waiting(&self) -> u32 {
        self.most_waiting.load(Ordering::Relaxed)
    }

    pub(super) fn combine_blocks(&self, tokens: Tokens, class: Class, kernel: &shape::Loaded<CombineParameters>) -> u32 {
        let blocks = self.choice.combine_blocks(tokens, class);
        if self.choice.mapping(class).waits_before { blocks } else { blocks.min(kernel.most_blocks).min(self.most_waiting()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::device::tuning::Measure;
    use crate::ep::{Layout, Reduce, Wire};

    fn base() -> Config {
        Config::new(7168, DType::BF16, 256, 8, 4096)
    }

    /// Of ranks that share an H200.
    fn choice(config: &Config, world: usize, tuning: Tuning) -> Choice {
        Choice::new(config, &config.plan(world).unwrap(), world as u32, tuning)
    }

    /// Blocks, threads, parts, vectors at a time.
    fn combine(c: &Choice, num_tokens: u32) -> (u32, u32, u16, u16) {
        let class = c.class_of(num_tokens);
        let Mapping { threads, split, .. } = c.mapping(class);
        (c.combine_blocks(Tokens::exactly(num_tokens), class), threads, split.parts, split.unroll)
    }

    #[test]
    fn what_was_measured_best() {
        let (two, eight) = (choice(&base(), 2, Tuning::default()), choice(&base(), 8, Tuning::default()));
        assert_eq!([0, 1, 128, 4096].map(|t| combine(&two, t)), [(1, 512, 28, 1), (2, 512, 28, 1), (112, 256, 7, 2), (14336, 64, 7, 2)]);
        assert_eq!([1, 128, 4096].map(|t| combine(&eight, t)), [(4, 256, 28, 1), (448, 64, 7, 2), (14336, 64, 7, 2)]);
        assert_eq!(Class::ALL.map(|class| two.mapping(class).stream), [false, false, true]);
        assert_eq!(Class::ALL.map(|class| eight.mapping(class).max_group), [8, 8, 8]);
        assert_eq!([192, 193].map(|t| two.waits_before(two.class_of(t))), [false, true]);
        assert_eq!([32, 33].map(|t| eight.waits_before(eight.class_of(t))), [false, true]);
        let alone = Tuning { measure: Measure { skip_signals: true, ..Measure::default() }, ..Tuning::default() };
        assert!(Class::ALL.iter().all(|class| !choice(&base(), 8, alone).waits_before(*class)));
    }

    #[test]
    fn rows_in_flight_fit_in_registers() {
        let by_expert = Config { layout: Layout::ByExpert { segment_align: 1 }, ..base() };
        let forms = [
            base(),
            Config { k: 32, reduce: Reduce::AtSource, ..by_expert.clone() },
            Config { reduce: Reduce::AtRankF32, ..by_expert },
            Config { wire: Wire::Fp8Block, ..base() },
            Config { combine_dtype: DType::F32, ..base() },
        ];
        for config in forms {
            for threads in [64, 256, 512, 1024] {
                let phase = PhaseTuning { geometry: Some((10, threads)), sms: None };
                let c = choice(&config, 8, Tuning { combine: phase, ..Tuning::default() });
                for class in Class::ALL {
                    let Mapping { split, max_group, .. } = c.mapping(class);
                    let group = max_group.min(c.most_terms());
                    let words = group * u32::from(split.unroll) * c.row.piece_words();
                    assert!(group >= 1 && words <= 64 && words + 48 <= registers(threads), "{config:?} {threads}: {words}");
                    assert_eq!(combine(&c, 100).0, 10);
                }
            }
        }
    }

    #[test]
    fn blocks_of_a_caller_wait_only_where_the_largest_calls_do() {
        let phase = |sms| PhaseTuning { geometry: Some((14336, 64)), sms };
        let of = |max_tokens, sms| {
            choice(&Config { max_tokens, ..base() }, 2, Tuning { combine: phase(sms), ..Tuning::default() }).waits_with_geometry()
        };
        assert_eq!(
            [(128, None), (192, None), (193, None), (4096, None), (4096, Some(66))].map(|(t, sms)| of(t, sms)),
            [true, true, false, false, true]
        );
        assert!(!choice(&Config { max_tokens: 128, ..base() }, 2, Tuning::default()).waits_with_geometry());
    }

    #[test]
    fn few_multiprocessors() {
        let phase = PhaseTuning { geometry: None, sms: Some(4) };
        let c = choice(&base(), 2, Tuning { combine: phase, ..Tuning::default() });
        assert_eq!([1, 4096].map(|t| combine(&c, t)), [(2, 512, 28, 1), (4, 512, 1, 2)]);
        assert_eq!(c.prepare_blocks(Tokens::exactly(4096), Class::Many), 4);
    }

    #[test]
    fn rows_are_prepared_when_they_change() {
        let of = |config: Config| choice(&config, 2, Tuning::default()).prepares_in_place();
        let by_expert = Config { layout: Layout::ByExpert { segment_align: 1 }, ..base() };
        assert!(!of(base()) && of(Config { wire: Wire::Fp8Direct, ..base() }));
        assert!(of(by_expert.clone()) && !of(Config { reduce: Reduce::AtSource, ..by_expert }));
    }

    #[test]
    fn every_kernel_of_a_call_is_loaded_before() {
        for has_fold in [false, true] {
            let c = choice(&Config { fold_weights: has_fold, ..base() }, 4, Tuning::default());
            let all = c.all();
            for class in Class::ALL {
                for add in [Add::Nothing, Add::Value, Add::F32] {
                    assert!(all.contains(&c.combine(class, add, false)) && all.contains(&c.combine(class, add, true)) == has_fold);
                }
                assert!(all.contains(&c.prepare(class, true)));
            }
            assert_eq!(all.contains(&c.prepare(Class::Few, false)), has_fold);
        }
    }
}
