//! Which kernels an object's dispatches choose among, and with how many blocks. Measured figures are of one H200 that ranks share, 7168 bf16, top-8 of
//! 256 (docs/ep-gpu.md); what lies between them follows the same rules.
#![forbid(unsafe_code)]

use super::launch::IndexType;
use super::spec::{Done, Kind, Row, Spec};
use crate::ep::device::memory::{DeviceLayout, MAX_ROUTE_BLOCKS, STATIC_SMEM_BYTES};
use crate::ep::device::shape::Shape;
use crate::ep::device::table::Measured;
use crate::ep::device::tuning::{ChosenBy, Class, LANES, PhaseTuning, Split, Tokens, Tuning, blocks_for, registers, without_repeats};
use crate::ep::{Config, Plan};
use crate::gpu::Program;

/// Most tokens that `route` takes with one block, and with 4 (measured: above 512 one block takes longer than several).
const ROUTE_BLOCKS: [(u32, u32); 2] = [(512, 1), (2048, 4)];
const ROUTE_THREADS: u32 = 512;
/// With few tokens (measured: as fast, and half of the registers).
const SMALL_ROUTE_THREADS: u32 = 256;
/// Bytes of rows that the `route`s of all ranks of a device ask into its second-level cache while words travel (measured, us of a dispatch with none, half, all and
/// twice of it: 281.5, 280.7, 280.4 and 280.8 with 4 ranks and 4096 tokens; 760.6, -, 758.9 and 759.6 with 8; 28.7, -, 28.0 and 28.0 with 8 and 128).
const WARM_BYTES: u32 = 7 << 20;
/// Ranks of a device from which on that pays (measured at 4096 tokens: with 2 it gains nothing).
const WARM_RANKS: u32 = 3;
/// Blocks that do so behind one that routes alone (measured with 8 ranks and 128 tokens, twice the bytes: 27.6 us with 4, 28.0 with 8, 28.2 with 16, 28.7 without;
/// 2 ranks lose 0.1 us).
const WARMING_BLOCKS: u32 = 4;
/// Tokens that `low_latency` routes at a time (`TILE` of low_latency.cu).
const LOW_LATENCY_TILE: u32 = 64;
/// Worlds that are launched like those of 2 ranks; the others like those of 8 (measured: 2 and 8; the bound is arbitrary).
const SMALL_WORLD: u32 = 4;
/// Most blocks of `payload` and `arrange` (measured up to here: more blocks cost more than they bring).
const MOST_BLOCKS: u32 = 1024;
/// The same of `payload` when there are many rows, whose blocks have a warp for each part and end (measured up to here: at 16384 tokens and 2 ranks 361.2 us with 57344
/// blocks, 365.0 with 16384).
const MOST_SMALL_BLOCKS: u32 = 65536;
/// Bytes of a part of a row, as it travels, when there are many: two vectors of a lane (measured at 4096 tokens with at most 24 warps a multiprocessor, parts of 512
/// bytes, 1 KiB, 2 KiB: 105.1, 92.9 and 92.4 us at 2 ranks, 766.4, 752.8 and 760.7 at 8; of 512 bytes and 1 KiB in e4m3 77.6 and 62.1 at 2, 216.0 and 191.9 at 4,
/// 591.0 and 542.3 at 8).
const PART_BYTES: u32 = 1024;
/// Threads of a block then (measured with 8 ranks: 754.6 us, 760.3 with 256, 757.1 with 320, 756.6 with 448).
const PART_THREADS: u32 = 128;

/// What decides the launches of an object's dispatches, beside the number of tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub shape: Shape,
    pub row: Row,
    pub staged_rows: u32,
    pub max_local: u32,
    /// No call has more, so neither do classes of calls.
    pub max_tokens: u32,
    pub ranks_on_device: u32,
    pub num_sms: u32,
    pub tuning: Tuning,
    /// What a table says of this GPU.
    pub measured: Measured,
    /// Once all of the above is known: a call need not find them again (measured: half of the host's time of a call).
    mappings: Option<Mappings>,
}

/// Mappings by class.
#[derive(Debug, Clone, Copy)]
struct Mappings {
    payload: [Mapping; 3],
    arrange: [Mapping; 3],
}

/// Threads of a block and the split of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mapping {
    pub threads: u32,
    pub split: Split,
    pub stream: bool,
}

impl Choice {
    pub fn new(c: &Config, p: &Plan, layout: &DeviceLayout, (ranks_on_device, num_sms): (u32, u32), tuning: Tuning) -> Self {
        // What is left out is left out of `payload`.
        let staged_rows = if tuning.measure.is_on() { 0 } else { layout.staged_rows as u32 };
        let ranks_on_device = ranks_on_device.max(1);
        Choice {
            shape: Shape::new(c, p),
            row: Row::new(c, p),
            staged_rows,
            max_local: p.max_local as u32,
            max_tokens: c.max_tokens as u32,
            ranks_on_device,
            num_sms,
            tuning,
            measured: Measured::default(),
            mappings: None,
        }
    }

    /// The same, with what a table says, and its mappings found.
    pub fn with_measured(self, measured: Measured) -> Self {
        let choice = Choice { measured, mappings: None, ..self };
        let [payload, arrange] = [Choice::payload_mapping, Choice::arrange_mapping].map(|of| Class::ALL.map(|class| of(&choice, class)));
        Choice { mappings: Some(Mappings { payload, arrange }), ..choice }
    }

    pub fn phase(&self) -> PhaseTuning {
        self.tuning.dispatch
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

    /// Blocks, likewise, but of rule and table at most `most`.
    fn blocks(&self, tokens: Tokens, class: Class, chosen: u32, most: u32) -> u32 {
        let measured = self.measured.blocks(tokens.likely, class).unwrap_or(chosen).min(most);
        self.within(self.phase().geometry.map_or(measured, |(blocks, _)| blocks))
    }

    fn is_small_world(&self) -> bool {
        u32::from(self.shape.world) <= SMALL_WORLD
    }

    /// Most tokens for which `route` may be `SMALL`: one tile.
    pub fn small_route_tokens(&self) -> u32 {
        const BIT_BYTES: u32 = 16384; // as in routing.cuh
        let tile = if self.shape.is_by_expert() { BIT_BYTES * 8 / self.shape.num_experts / 64 * 64 } else { SMALL_ROUTE_THREADS };
        tile.min(SMALL_ROUTE_THREADS)
    }

    /// Most tokens for which `low_latency` may be `SMALL`: one tile, and every row has its message.
    pub fn small_low_latency_tokens(&self) -> u32 {
        LOW_LATENCY_TILE.min(self.staged_rows)
    }

    fn spec(&self, threads: u32, kind: Kind) -> Spec {
        Spec { shape: self.shape.only(kind.uses(&self.shape)), threads: threads as u16, kind }
    }

    fn reachable(&self, class: Class) -> Class {
        class.min(Class::of(self.max_tokens))
    }

    pub fn route(&self, small: bool, index: IndexType) -> Spec {
        let small = small || self.max_tokens <= self.small_route_tokens();
        self.spec(if small { SMALL_ROUTE_THREADS } else { ROUTE_THREADS }, Kind::Route { small, replay: false, index })
    }

    /// A replay looks at no token: small whatever their number.
    pub fn replay(&self) -> Spec {
        self.spec(SMALL_ROUTE_THREADS, Kind::Route { small: true, replay: true, index: IndexType::I32 })
    }

    pub fn low_latency(&self, small: bool, index: IndexType) -> Spec {
        let small = small || self.max_tokens <= self.small_low_latency_tokens();
        let threads = self.threads(Class::Few, if self.is_small_world() { 256 } else { 128 }).max(128);
        let parts = self.row.num_vectors().div_ceil(LANES) as u16;
        let staged_rows = self.staged_rows as u16;
        self.spec(threads, Kind::LowLatency { small, index, row_bytes: self.row.row_bytes, parts, staged_rows })
    }

    pub fn payload_mapping(&self, class: Class) -> Mapping {
        if let Some(mappings) = &self.mappings {
            return mappings.payload[class as usize];
        }
        let class = self.reachable(class);
        let chosen = match class {
            // Few blocks are to do it all.
            _ if self.phase().sms.is_some() => 512,
            Class::Some if !self.is_small_world() => 512,
            Class::Few | Class::Some => 256,
            Class::Many => PART_THREADS,
        };
        let threads = self.threads(class, chosen);
        let parts = match class {
            Class::Few => 14,
            Class::Some => 4,
            Class::Many => self.many_parts(),
        };
        let stream = class == Class::Many || class == Class::Some && !self.is_small_world();
        Mapping { threads, split: self.split(parts, threads, 28), stream }
    }

    /// Parts of a row when there are many: one of few blocks, and of rows that do not move.
    fn many_parts(&self) -> u32 {
        let is_whole = self.phase().sms.is_some() || self.tuning.measure.skip_payload;
        if is_whole { 1 } else { self.row.row_bytes / PART_BYTES }
    }

    /// Who says that the rows of a call are complete: with few, or few blocks, a launch more costs more than blocks that wait for their stores do.
    pub fn done(&self, class: Class) -> Done {
        match self.reachable(class) {
            _ if self.tuning.measure.skip_signals => Done::Never,
            _ if self.phase().sms.is_some() => Done::Within,
            Class::Few | Class::Some => Done::Within,
            Class::Many => Done::After,
        }
    }

    pub fn payload(&self, class: Class) -> Spec {
        let Mapping { threads, split, stream } = self.payload_mapping(class);
        self.spec(threads, Kind::Payload { row: self.row, split, stream, done: self.done(class), measure: self.tuning.measure })
    }

    /// At most `most` vectors of a lane, and as many as registers hold: derived from what the kernels need beside them.
    fn split(&self, parts: u32, threads: u32, most: u32) -> Split {
        let beside = if self.row.quantize.is_some() { 88 } else { 56 };
        // 16 vectors of x: above that the wider forms of them spill on RDNA, whose threads have as many registers as NVIDIA's.
        let most = if self.row.quantize.is_some() { 16 / self.row.x_vectors() } else { most };
        let unroll = registers(threads).saturating_sub(beside) / (4 * self.row.x_vectors());
        Split::new(self.row.num_vectors(), parts, unroll.min(most), self.row.align(self.shape.is_by_expert()))
    }

    pub fn receive(&self) -> Spec {
        self.spec(64, Kind::Receive) // 64: a thread for each rank
    }

    pub fn arrange_mapping(&self, class: Class) -> Mapping {
        if let Some(mappings) = &self.mappings {
            return mappings.arrange[class as usize];
        }
        let class = self.reachable(class);
        let parts = if class == Class::Many { 1 } else { 7 }; // arbitrary
        let row = Row { quantize: None, ..self.row };
        Mapping { threads: 256, split: Split::new(row.num_vectors(), parts, 7, 1), stream: false }
    }

    pub fn arrange(&self, replay: bool, class: Class) -> Spec {
        let Mapping { threads, split, .. } = self.arrange_mapping(class);
        self.spec(threads, Kind::Arrange { replay, row: Row { quantize: None, ..self.row }, split })
    }

    /// Most threads whose bits of all local experts fit in shared memory (`Shared` of index.cu).
    pub fn index(&self) -> Option<Spec> {
        let bytes = |threads: usize| self.max_local as usize * 4 * (threads / 32 + 2) + 4;
        let threads = [1024, 512, 256, 128, 64].into_iter().find(|threads| bytes(*threads) <= STATIC_SMEM_BYTES)?;
        let (most_local, record_bytes) = (self.max_local.max(1), self.row.record_bytes);
        Some(self.spec(threads as u32, Kind::Index { most_local, record_bytes }))
    }

    pub fn report(&self) -> Spec {
        let row_k = if self.shape.is_by_expert() { 1 } else { self.shape.k };
        self.spec(256, Kind::Report { row_k, record_bytes: self.row.record_bytes }) // 256: arbitrary
    }

    /// Blocks of a grid when the phase may occupy only so many multiprocessors.
    pub fn within(&self, blocks: u32) -> u32 {
        self.phase().sms.map_or(blocks, |sms| blocks.min(sms)).max(1)
    }

    pub fn route_blocks(&self, tokens: Tokens) -> u32 {
        let by_tokens = ROUTE_BLOCKS.iter().find(|(most, _)| tokens.likely <= *most).map_or(MAX_ROUTE_BLOCKS as u32, |(_, blocks)| *blocks);
        self.within(by_tokens.min((self.num_sms / self.ranks_on_device).max(1)))
    }

    /// Rows of a rank that `route` warms.
    pub fn warm_rows(&self) -> u32 {
        if self.ranks_on_device < WARM_RANKS || self.tuning.measure.skip_payload {
            return 0;
        }
        WARM_BYTES / self.ranks_on_device / self.row.x_row_bytes().max(1)
    }

    /// Blocks that only do that, behind the one of a `route` that is small.
    pub fn warming_blocks(&self) -> u32 {
        let pays = self.warm_rows() > 0 && self.ranks_on_device > SMALL_WORLD;
        if pays && self.phase().sms.is_none() { WARMING_BLOCKS } else { 0 }
    }

    pub fn low_latency_blocks(&self, tokens: Tokens, threads: u32) -> u32 {
        // A warp for each part that leaves and, about as many again for each peer, that arrives; measured for 2 ranks, and for 8, which stop at 4.
        let parts = self.row.num_vectors().div_ceil(LANES);
        let items = u64::from(tokens.likely.max(1)) * u64::from(parts) * u64::from(self.shape.num_destinations().min(4));
        let share = self.num_sms * 256 / threads / self.ranks_on_device; // each multiprocessor has 256 such threads
        self.blocks(tokens, Class::Few, blocks_for(items, threads).min(share.max(1)), MOST_BLOCKS)
    }

    pub fn payload_blocks(&self, tokens: Tokens, class: Class) -> u32 {
        let Mapping { threads, split, .. } = self.payload_mapping(class);
        let blocks = blocks_for(u64::from(tokens.likely) * u64::from(split.parts), threads);
        let most = if class == Class::Many && self.phase().sms.is_none() { MOST_SMALL_BLOCKS } else { MOST_BLOCKS };
        self.blocks(tokens, self.reachable(class), blocks, most)
    }

    pub fn arrange_blocks(&self, tokens: Tokens, class: Class) -> u32 {
        let Mapping { threads, split, .. } = self.arrange_mapping(class);
        let arrivals = u64::from(tokens.likely.max(1)) * u64::from(self.shape.num_destinations());
        self.within(blocks_for(arrivals * u64::from(split.parts), threads).min(MOST_BLOCKS))
    }

    /// `index_rows` counts the rows of `ByToken`; expert layouts have counts.
    pub fn index_if_any(&self) -> Option<Spec> {
        if self.shape.is_by_expert() { None } else { self.index() }
    }

    /// Every kernel that a call may choose.
    pub fn all(&self) -> Vec<Spec> {
        let mut all = vec![self.replay(), self.receive(), self.report()];
        for (small, index) in [(false, IndexType::I32), (false, IndexType::I64), (true, IndexType::I32), (true, IndexType::I64)] {
            all.push(self.route(small, index));
            if self.staged_rows > 0 {
                all.push(self.low_latency(small, index));
            }
        }
        for class in Class::ALL {
            all.push(self.payload(class));
            if self.shape.is_by_expert() {
                all.extend([self.arrange(false, class), self.arrange(true, class)]);
            }
        }
        all.extend(self.index_if_any());
        without_repeats(all)
    }
}

/// Every kernel that a dispatch of this configuration may choose, whatever the device.
pub(crate) fn programs(c: &Config, p: &Plan, layout: &DeviceLayout, tuning: Tuning) -> Vec<Program> {
    Choice::new(c, p, layout, (1, 1), tuning).all().iter().map(crate::gpu::Spec::program).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::device::table::{Key, TablePhase};
    use crate::ep::device::tuning::Measure;
    use crate::ep::{Layout, Mode, Provenance, Quantize, Table, TableRow};
    use crate::tensor::DType;

    fn base() -> Config {
        Config::new(7168, DType::BF16, 256, 8, 4096)
    }

    /// Of ranks that share an H200.
    fn choice(config: &Config, world: usize, tuning: Tuning) -> Choice {
        let plan = config.plan(world).unwrap();
        let layout = DeviceLayout::new(config, &plan).unwrap();
        Choice::new(config, &plan, &layout, (world as u32, 132), tuning)
    }

    /// Blocks, threads, parts, vectors at a time of `payload`.
    fn payload(c: &Choice, num_tokens: u32) -> (u32, u32, u16, u16) {
        let class = Class::of(num_tokens);
        let Mapping { threads, split, .. } = c.payload_mapping(class);
        (c.payload_blocks(Tokens::exactly(num_tokens), class), threads, split.parts, split.unroll)
    }

    #[test]
    fn what_was_measured_best() {
        let (two, eight) = (choice(&base(), 2, Tuning::default()), choice(&base(), 8, Tuning::default()));
        assert_eq!([1, 128, 4096].map(|t| payload(&two, t)), [(2, 256, 14, 2), (64, 256, 4, 7), (14336, 128, 14, 2)]);
        assert_eq!([1, 128, 4096].map(|t| payload(&eight, t)), [(2, 256, 14, 2), (32, 512, 4, 7), (14336, 128, 14, 2)]);
        let e4m3 = Config::new(7168, DType::E4M3, 256, 8, 4096);
        assert_eq!(payload(&choice(&e4m3, 4, Tuning::default()), 4096), (7168, 128, 7, 2));
        let done = |c: &Choice| Class::ALL.map(|class| c.done(class));
        assert_eq!(done(&two), [Done::Within, Done::Within, Done::After]);
        // Calls of few tokens alone have no kernel for many.
        assert_eq!(done(&choice(&Config { max_tokens: 512, ..base() }, 2, Tuning::default())), [Done::Within; 3]);
        let few = Tuning { dispatch: PhaseTuning { geometry: None, sms: Some(16) }, ..Tuning::default() };
        assert_eq!(done(&choice(&base(), 2, few)), [Done::Within; 3]);
        let alone = Tuning { measure: Measure { skip_signals: true, ..Measure::default() }, ..Tuning::default() };
        assert_eq!(done(&choice(&base(), 2, alone)), [Done::Never; 3]);
        let streams = |c: &Choice| Class::ALL.map(|class| c.payload_mapping(class).stream);
        assert_eq!((streams(&two), streams(&eight)), ([false, false, true], [false, true, true]));
        let route = |t| two.route_blocks(Tokens::exactly(t));
        assert_eq!([0, 512, 513, 2048, 2049, u32::MAX].map(route), [1, 1, 4, 4, 16, 16]);
        let low_latency = Config { mode: Mode::LowLatency, expected_tokens: 1, ..base() };
        let of = |world| {
            let c = choice(&low_latency, world, Tuning::default());
            let Kind::LowLatency { parts, staged_rows, .. } = c.low_latency(true, IndexType::I64).kind else { panic!() };
            let threads = u32::from(c.low_latency(true, IndexType::I64).threads);
            (c.low_latency_blocks(Tokens::exactly(1), threads), threads, parts, staged_rows)
        };
        assert_eq!((of(2), of(8)), ((7, 256, 28, 32), (28, 128, 28, 32)));
    }

    #[test]
    fn tables_have_as_many_blocks_as_the_rule_may() {
        let of = |world: usize, blocks| {
            let config = base();
            let key = Key::new(TablePhase::Dispatch, &config, &config.plan(world).unwrap(), world as u32, None);
            let row = TableRow { key: key.clone(), tokens: 4096, blocks, threads: 256, seconds: 1e-5, before_seconds: 1e-5 };
            let gpu = format!("a made-up GPU of {world} ranks");
            Table { gpu: gpu.clone(), arch: String::new(), provenance: Provenance::default(), rows: vec![row] }.install();
            let choice = Choice { measured: Measured::find(&gpu, &key), ..choice(&config, world, Tuning::default()) };
            [4096, 16384].map(|tokens| payload(&choice, tokens).0)
        };
        assert_eq!((of(2, 600), of(4, 1639), of(8, 28000)), ([600, 2400], [1639, 6556], [28000, 65536]));
    }

    #[test]
    fn rows_are_warmed_where_it_pays() {
        let of = |config: &Config, world, tuning| {
            let c = choice(config, world, tuning);
            (c.warm_rows(), c.warming_blocks())
        };
        let plain = |world| of(&base(), world, Tuning::default());
        assert_eq!([1, 2, 4, 8].map(plain), [(0, 0), (0, 0), (128, 0), (64, 4)]);
        let f32_rows = Config { quantize: Some(Quantize::F32), ..Config::new(7168, DType::F32, 256, 8, 4096) };
        assert_eq!(of(&f32_rows, 8, Tuning::default()), (32, 4), "rows as they are read");
        let measure = Measure { skip_payload: true, ..Measure::default() };
        assert_eq!(of(&base(), 8, Tuning { measure, ..Tuning::default() }), (0, 0));
        let sms = PhaseTuning { geometry: None, sms: Some(4) };
        assert_eq!(of(&base(), 8, Tuning { dispatch: sms, ..Tuning::default() }), (64, 0));
    }

    #[test]
    fn blocks_that_wait_leave_room() {
        for world in [1, 2, 3, 8, 64] {
            let low_latency = Config { mode: Mode::LowLatency, expected_tokens: 0, ..base() };
            let c = choice(&low_latency, world, Tuning::default());
            let many = Tokens::exactly(u32::MAX);
            assert!(c.route_blocks(many) * world as u32 <= 132, "{world}");
            for threads in [128, 256] {
                let blocks = c.low_latency_blocks(many, threads);
                assert!(blocks * threads * world as u32 <= 132 * 256, "{world}: {blocks}");
            }
        }
    }

    #[test]
    fn what_the_caller_sets_wins() {
        let of = |geometry, sms| Tuning { dispatch: PhaseTuning { geometry, sms }, ..Tuning::default() };
        let set = choice(&base(), 2, of(Some((48, 512)), None));
        assert_eq!([1, 128, 4096].map(|t| payload(&set, t)), [(48, 512, 14, 2), (48, 512, 4, 7), (48, 512, 14, 2)]);
        let limited = choice(&base(), 2, of(None, Some(8)));
        assert_eq!([1, 128, 4096].map(|t| payload(&limited, t)), [(1, 512, 14, 2), (8, 512, 4, 7), (8, 512, 1, 14)]);
        assert_eq!(limited.route_blocks(Tokens::exactly(4096)), 8);
        // Registers of a large block.
        assert_eq!(payload(&choice(&base(), 2, of(Some((1, 1024)), None)), 4096), (1, 1024, 14, 2));
        let measure = Measure { skip_payload: true, ..Measure::default() };
        let skips = |geometry| Tuning { measure, ..of(geometry, None) };
        assert_eq!(payload(&choice(&base(), 2, skips(Some((264, 256)))), 4096).2, 1);
        let low_latency = Config { mode: Mode::LowLatency, expected_tokens: 1, ..base() };
        assert_eq!(choice(&low_latency, 2, skips(None)).staged_rows, 0);
    }

    #[test]
    fn one_block_routes_what_fits_in_a_tile() {
        let tokens = |num_experts, layout| choice(&Config { num_experts, layout, ..base() }, 8, Tuning::default()).small_route_tokens();
        let by_expert = Layout::ByExpert { segment_align: 1 };
        assert_eq!(tokens(2048, Layout::ByToken), 256);
        assert_eq!([256, 512, 1024, 2048].map(|e| tokens(e, by_expert)), [256, 256, 128, 64]);
        let staged = |max_tokens| {
            let config = Config { mode: Mode::LowLatency, expected_tokens: 1, max_tokens, ..base() };
            choice(&config, 2, Tuning::default()).small_low_latency_tokens()
        };
        assert_eq!((staged(20), staged(4096)), (20, 32));
    }

    #[test]
    fn counts_of_many_experts_have_fewer_threads() {
        let index =
            |num_experts, world| choice(&Config { num_experts, ..base() }, world, Tuning::default()).index().map(|spec| spec.threads);
        assert_eq!(index(256, 1), Some(1024));
        assert_eq!(index(1024, 1), Some(256));
        assert_eq!(index(3000, 1), Some(64));
        assert_eq!(index(4096, 1), None);
        assert_eq!(index(4096, 4), Some(256));
    }

    #[test]
    fn every_kernel_of_a_call_is_loaded_before() {
        let forms = [
            base(),
            Config { mode: Mode::LowLatency, expected_tokens: 2, ..base() },
            Config { layout: Layout::ByExpert { segment_align: 8 }, quantize: Some(Quantize::F32), ..base() },
        ];
        for config in forms {
            let c = choice(&config, 4, Tuning::default());
            let all = c.all();
            let mut wanted = vec![c.replay(), c.receive()];
            for num_tokens in [0, 1, 17, 128, 513, 4096, 70000] {
                let class = Class::of(num_tokens);
                wanted.push(c.payload(class));
                for flag in [false, true] {
                    let index = if flag { IndexType::I32 } else { IndexType::I64 };
                    wanted.push(c.route(num_tokens <= c.small_route_tokens(), index));
                    if config.layout.is_by_expert() {
                        wanted.push(c.arrange(flag, class));
                    }
                    if c.staged_rows > 0 {
                        wanted.push(c.low_latency(num_tokens <= c.small_low_latency_tokens(), index));
                    }
                }
            }
            for spec in wanted {
                assert!(all.contains(&spec), "{spec:?}");
            }
            for (i, spec) in all.iter().enumerate() {
                assert!(u32::from(spec.threads) >= c.shape.world.into() && !all[..i].contains(spec), "{spec:?}");
            }
        }
    }
}
