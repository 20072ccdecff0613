//! What the kernels of dispatch are compiled for.
#![forbid(unsafe_code)]

use super::launch::IndexType;
use crate::ep::device::shape::{Shape, Uses, ep_sources};
use crate::ep::device::tuning::{Measure, Split, registers};
use crate::ep::{Config, Plan, Quantize};
use crate::gpu::{Carveout, Constant, Kernels, Program, Source, Targets};
use crate::tensor::DType;

pub(super) static KERNELS: Kernels<Spec> = Kernels::new();

const ROUTE: &[Source] = ep_sources!("ops/dispatch/routing.cuh", "ops/dispatch/route.cu");
const LOW_LATENCY: &[Source] = ep_sources!("ops/dispatch/routing.cuh", "ops/dispatch/low_latency.cu");
const PAYLOAD: &[Source] = ep_sources!("ops/dispatch/payload.cu");
const RECEIVE: &[Source] = ep_sources!("ops/dispatch/receive.cu");
const ARRANGE: &[Source] = ep_sources!("ops/dispatch/arrange.cu");
const REPORT: &[Source] = ep_sources!("ops/dispatch/report.cu");
const INDEX: &[Source] = ep_sources!("ops/dispatch/index.cu");

/// A kernel of dispatch, with everything that it is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Spec {
    pub shape: Shape,
    pub threads: u16,
    pub kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Route { small: bool, replay: bool, index: IndexType },
    LowLatency { small: bool, index: IndexType, row_bytes: u32, parts: u16, staged_rows: u16 },
    Payload { row: Row, split: Split, stream: bool, done: Done, measure: Measure },
    Receive,
    Arrange { replay: bool, row: Row, split: Split },
    Index { most_local: u32, record_bytes: u32 },
    Report { row_k: u8, record_bytes: u32 },
}

impl Kind {
    /// What the sources say.
    pub fn uses(&self, shape: &Shape) -> Uses {
        let by_expert = shape.is_by_expert();
        let all = Uses { k: true, words: true, fixed: true, owners: true, local_ids: false, may_drop: true };
        match self {
            Kind::Route { .. } | Kind::LowLatency { .. } => all,
            // Records by token are made for their receiver when they hold its own ids.
            Kind::Payload { .. } => {
                let local_ids = !by_expert && shape.local_ids;
                Uses { fixed: false, owners: by_expert || local_ids, local_ids, may_drop: false, ..all }
            }
            Kind::Receive => Uses { words: true, ..Uses::NOTHING },
            Kind::Arrange { .. } | Kind::Index { .. } => Uses { local_ids: true, may_drop: false, ..all },
            Kind::Report { .. } => Uses::NOTHING,
        }
    }
}

/// Who says that the rows of a rank are complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Done {
    /// Blocks of `payload`, one of which waits for the peers.
    Within,
    /// `receive`, which follows `payload` and waits.
    After,
    /// Nobody: to measure.
    Never,
}

/// A row on its way and as it arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Row {
    pub row_bytes: u32,
    pub record_bytes: u32,
    pub transit_bytes: u32,
    pub scale_bytes: u32,
    pub scales: Scales,
    /// Type of x before quantisation.
    pub quantize: Option<(Quantize, DType)>,
}

/// `SCALES` of payload.cu and arrange.cu: where the scales of a received row are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Scales {
    Absent = 0,
    InRecord = 1,
    Columns = 2,
}

impl Row {
    /// Of a configuration within the limits of a [`DeviceLayout`](crate::ep::device::memory::DeviceLayout).
    pub fn new(c: &Config, p: &Plan) -> Self {
        Row {
            row_bytes: p.row_bytes as u32,
            record_bytes: p.record_bytes as u32,
            transit_bytes: if c.layout.is_by_expert() { p.transit_bytes as u32 } else { 0 },
            scale_bytes: p.scale_bytes as u32,
            scales: match (p.scale_bytes, p.has_column_scales()) {
                (0, _) => Scales::Absent,
                (_, false) => Scales::InRecord,
                (_, true) => Scales::Columns,
            },
            quantize: c.quantize.map(|quantize| (quantize, c.dtype)),
        }
    }

    /// Vectors of 16 bytes as they travel.
    pub fn num_vectors(&self) -> u32 {
        self.row_bytes / 16
    }

    /// Vectors of x that make one that travels.
    pub fn x_vectors(&self) -> u32 {
        self.quantize.map_or(1, |(_, dtype)| dtype.size() as u32)
    }

    /// Bytes of a row of x.
    pub fn x_row_bytes(&self) -> u32 {
        self.row_bytes * self.x_vectors()
    }

    /// Vectors of which a part is a multiple: 8 lanes hold a block, 32 the four blocks of a word of packed scales (blocks.cuh, payload.cu).
    pub fn align(&self, is_by_expert: bool) -> u32 {
        match (self.quantize, self.scales) {
            (None, _) => 1,
            (Some((Quantize::PowerOfTwo, _)), Scales::Columns) if !is_by_expert => 32,
            (Some(_), _) => 8,
        }
    }

    fn text(&self) -> String {
        let scales = match self.scales {
            Scales::Absent => String::new(),
            Scales::InRecord => format!(", scales {}", self.scale_bytes),
            Scales::Columns => format!(", column scales {}", self.scale_bytes),
        };
        let quantize = match self.quantize {
            None => String::new(),
            Some((Quantize::F32, dtype)) => format!(" of {dtype}"),
            Some((Quantize::PowerOfTwo, dtype)) => format!(" of {dtype} by powers of two"),
        };
        format!("{} bytes{quantize}{scales}", self.row_bytes)
    }
}

impl crate::gpu::Spec for Spec {
    fn program(&self) -> Program {
        let Spec { shape, threads, kind } = *self;
        let mut constants = shape.constants();
        constants.push(Constant::Int("THREADS", threads.into()));
        let routing = |small: bool, replay: bool, index: IndexType| {
            [
                Constant::Bool("SMALL", small),
                Constant::Bool("REPLAY", replay),
                Constant::Bool("MAY_DROP", shape.may_drop),
                Constant::Type("Index", index.name()),
            ]
        };
        let int = |name, value: u32| Constant::Int(name, value.into());
        let small_text = |small: bool| if small { ", small" } else { "" };
        let (entry, sources, what, most) = match kind {
            Kind::Route { small, replay, index } => {
                constants.extend(routing(small, replay, index));
                let what = format!("{}{}", if replay { "replay" } else { index.name() }, small_text(small));
                ("route", ROUTE, what, 128)
            }
            Kind::LowLatency { small, index, row_bytes, parts, staged_rows } => {
                constants.extend(routing(small, false, index));
                constants.extend([
                    int("ROW_BYTES", row_bytes),
                    int("RECORD_BYTES", crate::ep::device::memory::route_bytes(shape.k.into()) as u32),
                    int("PARTS", parts.into()),
                    int("UNROLL", 1), // a part is a group of lanes or a little more
                    int("STAGED_ROWS", staged_rows.into()),
                ]);
                ("low_latency", LOW_LATENCY, format!("{row_bytes} bytes, {parts} parts, {}{}", index.name(), small_text(small)), 168)
            }
            Kind::Payload { row, split, stream, done, measure } => {
                let in_transit = shape.is_by_expert();
                let scales = if in_transit && row.scales != Scales::Absent { Scales::InRecord } else { row.scales };
                constants.extend([
                    int("ROW_BYTES", row.row_bytes),
                    int("RECORD_BYTES", if in_transit { row.transit_bytes } else { row.record_bytes }),
                    Constant::Bool("RELEASE_DEVICE", true), // measured (docs/ep-gpu.md): 1.2 us less than releasing to the system in each block
                    int("BULK", 0),
                    int("QUANTIZE", quantize_code(row)),
                    Constant::Type("Element", row.quantize.map_or("u8", |(_, dtype)| dtype.name())),
                    int("SCALES", scales as u32),
                    int("SCALE_BYTES", row.scale_bytes),
                    int("PARTS", split.parts.into()),
                    int("UNROLL", split.unroll.into()),
                    Constant::Bool("STREAM", stream),
                    Constant::Bool("WITH_ROWS", !measure.skip_payload),
                    Constant::Bool("WITH_RECORDS", !measure.skip_payload),
                    Constant::Bool("WITH_SIGNALS", done == Done::Within),
                    Constant::Bool("RECEIVE_FOLLOWS", done == Done::After),
                    Constant::Bool("LOCAL_ROWS", measure.local),
                ]);
                let stream_text = if stream { ", streaming" } else { "" };
                let done_text = if done == Done::After { ", without done words" } else { "" };
                let measure_text = if measure.is_on() { format!(", {measure:?}") } else { String::new() };
                ("payload", PAYLOAD, format!("{}, {split}{stream_text}{done_text}{measure_text}", row.text()), 255)
            }
            Kind::Receive => ("receive", RECEIVE, String::new(), 40),
            Kind::Arrange { replay, row, split } => {
                constants.extend([
                    Constant::Bool("REPLAY", replay),
                    int("ROW_BYTES", row.row_bytes),
                    int("RECORD_BYTES", row.record_bytes),
                    int("TRANSIT_BYTES", row.transit_bytes),
                    int("SCALES", row.scales as u32),
                    int("SCALE_BYTES", row.scale_bytes),
                    int("PARTS", split.parts.into()),
                    int("UNROLL", split.unroll.into()),
                ]);
                // Of how its rows were quantised it knows only the size of their scales.
                let row = Row { quantize: None, ..row };
                ("arrange", ARRANGE, format!("{}, {split}{}", row.text(), if replay { ", replay" } else { "" }), 128)
            }
            Kind::Index { most_local, record_bytes } => {
                constants.extend([int("MOST_LOCAL", most_local), int("RECORD_BYTES", record_bytes)]);
                ("index_rows", INDEX, format!("{most_local} local experts, records {record_bytes}"), 64)
            }
            Kind::Report { row_k, record_bytes } => {
                constants.extend([int("ROW_K", row_k.into()), int("RECORD_BYTES", record_bytes)]);
                ("report", REPORT, format!("records {record_bytes}"), 40)
            }
        };
        let separator = if what.is_empty() { "" } else { ", " };
        Program {
            name: format!("dispatch {entry} {shape}{separator}{what}, {threads} threads"),
            entry,
            sources,
            constants,
            threads: threads.into(),
            smem_bytes: 0,
            max_registers: registers(threads.into()).min(most),
            carveout: Carveout::Shared,
            targets: Targets::All,
        }
    }
}

/// `QUANTIZE` of payload.cu.
fn quantize_code(row: Row) -> u32 {
    match row.quantize {
        None => 0,
        Some((Quantize::F32, _)) => 1,
        Some((Quantize::PowerOfTwo, _)) => 2,
    }
}

/// The kernels that the table of resources lists: what the throughput and latency of 7168 bf16, top-8 of 256, choose among at 2 and 8 ranks, and for many rows at 4;
/// then each layout, payload and limit once.
pub(crate) fn shipped() -> Vec<Spec> {
    use super::tuning::Choice;
    use crate::ep::device::memory::DeviceLayout;
    use crate::ep::device::tuning::{Class, Tuning};
    use crate::ep::{IdSpace, Layout, Mode, Overflow, ScaleLayout};
    let base = || Config::new(7168, DType::BF16, 256, 8, 4096);
    let mut all: Vec<Spec> = Vec::new();
    let mut add = |config: Config, world: usize, of: &dyn Fn(&Choice) -> Vec<Spec>| {
        // Configurations that a plan accepts (a test says so).
        let Ok(plan) = config.plan(world) else { return };
        let Ok(layout) = DeviceLayout::new(&config, &plan) else { return };
        let choice = Choice::new(&config, &plan, &layout, (1, 132), Tuning::default()); // 132: multiprocessors of an H200
        for spec in of(&choice) {
            if !all.contains(&spec) {
                all.push(spec);
            }
        }
    };
    let (few, some, many) = (Class::Few, Class::Some, Class::Many);
    let low_latency = Config { mode: Mode::LowLatency, expected_tokens: 1, max_tokens: 128, ..base() };
    for ranks in [4, 8] {
        add(base(), ranks, &|c| vec![c.payload(many)]);
    }
    add(base(), 2, &|c| vec![c.route(true, IndexType::I64), c.payload(some), c.payload(many)]);
    add(low_latency.clone(), 2, &|c| vec![c.low_latency(true, IndexType::I64)]);
    add(base(), 8, &|c| vec![c.route(false, IndexType::I64), c.route(true, IndexType::I64), c.replay(), c.receive(), c.report()]);
    add(base(), 8, &|c| [few, some, many].map(|class| c.payload(class)).into_iter().chain(c.index()).collect());
    add(low_latency, 8, &|c| vec![c.low_latency(false, IndexType::I64), c.low_latency(true, IndexType::I64)]);
    add(Config { quantize: Some(Quantize::F32), ..base() }, 8, &|c| vec![c.payload(many)]);
    add(Config { quantize: Some(Quantize::F32), scale_layout: ScaleLayout::ColumnMajor, ..base() }, 8, &|c| vec![c.payload(some)]);
    let packed = Config { quantize: Some(Quantize::PowerOfTwo), scale_layout: ScaleLayout::PackedE8M0, ..base() };
    add(packed, 8, &|c| vec![c.payload(some), c.payload(many)]);
    add(Config { quantize: Some(Quantize::F32), ..Config::new(4096, DType::F32, 64, 6, 4096) }, 8, &|c| vec![c.payload(many)]);
    let opaque = Config { scale_bytes: 224, id_space: IdSpace::Local, ..Config::new(7168, DType::E4M3, 256, 8, 4096) };
    add(opaque.clone(), 8, &|c| vec![c.payload(some)]);
    add(Config { scale_layout: ScaleLayout::ColumnMajor, overflow: Overflow::Drop, ..opaque }, 8, &|c| vec![c.payload(many)]);
    let by_expert = Config { layout: Layout::ByExpert { segment_align: 128 }, ..base() };
    add(by_expert.clone(), 8, &|c| vec![c.route(false, IndexType::I64), c.route(true, IndexType::I64), c.payload(many)]);
    add(by_expert.clone(), 8, &|c| vec![c.arrange(false, some), c.arrange(false, many), c.arrange(true, many)]);
    let quantized = Config { quantize: Some(Quantize::F32), scale_layout: ScaleLayout::ColumnMajor, ..by_expert };
    add(quantized, 8, &|c| vec![c.payload(many), c.arrange(false, many)]);
    let owners = (0..2048).map(|e| crate::id::Rank(e * 7 % 8)).collect();
    let fixed = Layout::ByExpertFixed { rows_per_expert: 64 };
    let largest = Config { num_experts: 2048, expert_map: Some(owners), layout: fixed, overflow: Overflow::Drop, ..base() };
    add(largest, 8, &|c| vec![c.route(false, IndexType::I64), c.arrange(false, many)]);
    // The most ranks and routes that the tables are made for.
    add(Config { k: 32, ..base() }, 64, &|c| vec![c.route(false, IndexType::I64), c.payload(many)]);
    let low_latency = Config { k: 32, mode: Mode::LowLatency, expected_tokens: 1, max_tokens: 64, ..base() };
    add(low_latency, 64, &|c| vec![c.low_latency(false, IndexType::I64)]);
    // Rows that lanes do not divide.
    add(Config::new(2880, DType::BF16, 32, 4, 4096), 4, &|c| vec![c.payload(few), c.payload(many)]);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Spec as _;

    #[test]
    fn names_tell_kernels_apart() {
        let programs: Vec<Program> = shipped().iter().map(Spec::program).collect();
        assert!((30..=40).contains(&programs.len()), "{} programs", programs.len());
        for (i, a) in programs.iter().enumerate() {
            for b in &programs[..i] {
                assert!(a.name != b.name, "{} twice", a.name);
                assert!(a.text() != b.text(), "{} and {} are one", a.name, b.name);
            }
        }
        for entry in ["route", "low_latency", "payload", "receive", "arrange", "index_rows", "report"] {
            assert!(programs.iter().any(|program| program.entry == entry), "{entry}");
        }
    }

    #[test]
    fn constants_say_what_the_configuration_says() {
        let config = Config { quantize: Some(Quantize::PowerOfTwo), ..Config::new(256, DType::F32, 8, 2, 16) };
        let row = Row::new(&config, &config.plan(2).unwrap());
        assert_eq!((row.num_vectors(), row.x_vectors(), row.scale_bytes, row.scales, row.align(false)), (16, 4, 2, Scales::InRecord, 8));
        let split = Split { parts: 2, unroll: 1 };
        let kind = Kind::Payload { row, split, stream: true, done: Done::After, measure: Measure { local: true, ..Measure::default() } };
        let shape = Shape::new(&config, &config.plan(2).unwrap());
        let text = Spec { shape, threads: 256, kind }.program().text();
        for line in [
            "constexpr long long THREADS = 256;",
            "constexpr long long QUANTIZE = 2;",
            "using Element = f32;",
            "constexpr long long SCALES = 1;",
            "constexpr long long SCALE_BYTES = 2;",
            "constexpr long long RECORD_BYTES = 32;",
            "constexpr bool WITH_SIGNALS = false;",
            "constexpr bool RECEIVE_FOLLOWS = true;",
            "constexpr bool LOCAL_ROWS = true;",
        ] {
            assert!(text.contains(line), "{line}");
        }
    }
}
