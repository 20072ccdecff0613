//! One rank's rounds of dispatch and combine on a GPU, of input that follows from (rank, round): see `rounds.cu`.

use moe_kernels::check::Shape as ObjectShape;
use moe_kernels::ep::{Config, ExpertParallel, Layout, Tuning, World};
use moe_kernels::gpu::{Buffer, Carveout, Constant, Geometry, Kernel, Kernels, Program, Source, Spec, Stream, Targets};
use moe_kernels::ops::combine::{self, ExpertRows};
use moe_kernels::ops::dispatch::{Arrival, Input, NumTokens, Outputs, Routing, Sent};
use moe_kernels::tensor::Layout as Strides;
use moe_kernels::{Backend, Cuda, DType, DeviceAddress, Error, Result, TensorView};

use super::gpus;

/// Constants of `rounds.cu`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shape {
    world: u8,
    k: u8,
    num_experts: u16,
    hidden: u16,
    align: u16,
    max_tokens: u32,
    full: bool,
    is_f32: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Entry {
    Fill,
    Expect,
    CheckRows,
    Experts,
    CheckSums,
    Advance,
}

const ENTRIES: [Entry; 6] = [Entry::Fill, Entry::Expect, Entry::CheckRows, Entry::Experts, Entry::CheckSums, Entry::Advance];

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Round {
    entry: Entry,
    shape: Shape,
}

static KERNELS: Kernels<Round> = Kernels::new();
const SOURCES: &[Source] =
    &[Source { path: "tests/gpu/dialect", text: "" }, Source { path: "tests/gpu/ep/rounds.cu", text: include_str!("rounds.cu") }];

impl Shape {
    fn new(world: usize, config: &Config, full: bool) -> Self {
        Shape {
            world: world as u8,
            k: config.k as u8,
            num_experts: config.num_experts as u16,
            hidden: config.hidden as u16,
            align: match config.layout {
                Layout::ByExpert { segment_align } => segment_align as u16,
                _ => 0,
            },
            max_tokens: config.max_tokens as u32,
            full,
            is_f32: config.dtype == DType::F32,
        }
    }
}

impl Spec for Round {
    fn program(&self) -> Program {
        let Round { entry, shape } = *self;
        let int = |name, value: u32| Constant::Int(name, value.into());
        Program {
            name: format!("rounds {self:?}"),
            entry: match entry {
                Entry::Fill => "fill",
                Entry::Expect => "expect",
                Entry::CheckRows => "check_rows",
                Entry::Experts => "experts",
                Entry::CheckSums => "check_sums",
                Entry::Advance => "advance",
            },
            sources: SOURCES,
            constants: vec![
                int("WORLD", shape.world.into()),
                int("NUM_EXPERTS", shape.num_experts.into()),
                int("K", shape.k.into()),
                int("HIDDEN", shape.hidden.into()),
                int("ALIGN", shape.align.into()),
                int("MAX_TOKENS", shape.max_tokens),
                Constant::Bool("FULL", shape.full),
                Constant::Bool("IS_F32", shape.is_f32),
            ],
            threads: 256,
            smem_bytes: 0,
            max_registers: 64,
            carveout: Carveout::Shared,
            targets: Targets::Nvidia,
        }
    }
}

/// Every kernel that rounds of an object launch.
pub fn programs((world, config, tuning): &ObjectShape) -> Vec<Program> {
    let mut all = config.programs(*world, *tuning).unwrap_or_default();
    let kernel = |entry| [false, true].map(|full| Round { entry, shape: Shape::new(*world, config, full) }.program());
    all.extend(ENTRIES.into_iter().flat_map(kernel));
    all
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Fill {
    x: u64,
    ids: u64,
    count: u64,
    round: u64,
    rank: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Expect {
    slots: u64,
    end: u64,
    round: u64,
    rank: u32,
    max_slots: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Rows {
    slots: u64,
    end: u64,
    num_rows: u64,
    x: u64,
    source: u64,
    source_stride: u64,
    round: u64,
    report: u64,
    max_slots: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Experts {
    x: u64,
    y: u64,
    num_rows: u64,
    factor: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Sums {
    out: u64,
    round: u64,
    report: u64,
    rank: u32,
    rows: u32,
}

/// What one call after the other uses; those of two arrivals that are alive at once have one each.
struct Set {
    x: Buffer,
    ids: Buffer,
    count: Buffer,
    out: Buffer,
    y: Buffer,
    round: Buffer,
    slots: Buffer,
    end: Buffer,
    routing: Option<Routing>,
    /// Of the routing.
    memory: Buffer,
}

/// Rows of the sums behind `max_tokens`.
const EXTRA_ROWS: usize = 2;
/// Words of `Report`.
const REPORT_WORDS: usize = 7;

/// How a rank's rounds are made.
#[derive(Clone)]
pub struct Options {
    pub tuning: Tuning,
    /// Every rank has all of its tokens in every round.
    pub full: bool,
    /// Experts write into memory of their own, which combine takes rows from.
    pub staged: bool,
    /// 2 for arrivals that are alive at the same time.
    pub num_sets: usize,
    /// Symmetric memory and the routing's start with 0xFF.
    pub poisoned: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { tuning: Tuning::default(), full: false, staged: false, num_sets: 1, poisoned: true }
    }
}

/// A rank and all that its rounds need, allocated before the first of them.
pub struct Rig {
    pub ep: ExpertParallel,
    pub stream: Stream,
    world: World,
    sets: Vec<Set>,
    report: Buffer,
    kernels: [Kernel; 6],
    options: Options,
    config: Config,
    num_sms: u32,
}

fn address(view: &TensorView<'_>) -> u64 {
    view.device().map_or(0, |at| at.address)
}

impl Rig {
    /// Collective.
    pub fn new(world: &World, config: &Config, options: Options) -> Result<Self> {
        let Backend::Cuda(cuda) = world.backend() else { panic!("rounds are made on GPUs") };
        let (stream, device) = (cuda.stream().clone(), cuda.device().clone());
        let ep = ExpertParallel::with_tuning(world, config.clone(), options.tuning)?;
        if options.poisoned {
            ep.poison()?;
        }
        let shape = Shape::new(world.size(), config, options.full);
        let mut kernels = Vec::new();
        for entry in ENTRIES {
            kernels.push(KERNELS.load(&device, Round { entry, shape })?.0);
        }
        let row = config.hidden * config.dtype.size();
        let max_rows = ep.plan().max_rows;
        let poisoned = |len: usize| -> Result<Buffer> {
            let buffer = Buffer::new(&device, len.max(1))?;
            buffer.fill(&stream, 0, buffer.len(), 0xFF)?;
            Ok(buffer)
        };
        let mut sets = Vec::new();
        for s in 0..options.num_sets {
            let memory = poisoned(if options.poisoned { Routing::bytes(&ep) } else { 1 })?;
            let routing = match options.poisoned {
                // SAFETY: the memory is dropped after the routing, by `Rig::drop`.
                true => unsafe { Routing::in_memory(&ep, memory.address()) }?,
                false => Routing::new(&ep)?,
            };
            let round = Buffer::new(&device, 4)?;
            round.upload(&stream, 0, &(1000 * s as u32).to_le_bytes())?; // other rounds for each set
            sets.push(Set {
                x: poisoned(config.max_tokens * row)?,
                ids: poisoned(config.max_tokens * config.k * 4)?,
                count: poisoned(4)?,
                out: poisoned((config.max_tokens + EXTRA_ROWS) * row)?,
                y: poisoned(if options.staged { max_rows * row } else { 1 })?,
                round,
                slots: poisoned(8 * max_rows)?,
                end: poisoned(4)?,
                routing: Some(routing),
                memory,
            });
        }
        let report = Buffer::new(&device, 4 * REPORT_WORDS)?;
        report.fill(&stream, 0, report.len(), 0)?;
        stream.synchronize()?;
        // Nobody allocates while another rank's kernels wait.
        world.barrier()?;
        let kernels = kernels.try_into().unwrap_or_else(|_| unreachable!("a kernel for each entry"));
        let num_sms = device.num_sms();
        Ok(Rig { ep, stream, world: world.clone(), sets, report, kernels, options, config: config.clone(), num_sms })
    }

    fn queue<P: Copy>(&self, entry: Entry, blocks: u32, parameters: P) -> Result<()> {
        let threads = if entry == Entry::Expect { 1024 } else { 256 };
        let geometry = Geometry { grid: [blocks.max(1), 1, 1], threads, ..Geometry::default() };
        let kernel = self.kernels[entry as usize];
        // SAFETY: the kernel takes this struct, whose addresses are those of the rig's buffers and of an arrival; `Rig::drop` waits for the stream.
        unsafe { kernel.launch(&self.stream, &geometry, &parameters) }
    }

    fn rank(&self) -> u32 {
        self.world.rank().0
    }

    fn grid(&self) -> u32 {
        2 * self.num_sms
    }

    /// Makes the input of the set's round.
    pub fn fill(&self, s: usize) -> Result<()> {
        let set = &self.sets[s];
        let at = |buffer: &Buffer| buffer.address().address;
        let fill = Fill { x: at(&set.x), ids: at(&set.ids), count: at(&set.count), round: at(&set.round), rank: self.rank().into() };
        self.queue(Entry::Fill, self.grid(), fill)
    }

    /// The input of the set's round, dispatched.
    pub fn dispatch(&mut self, s: usize) -> Result<Arrival> {
        self.fill(s)?;
        let (ep, config, set) = (&mut self.ep, &self.config, &mut self.sets[s]);
        let routing = set.routing.as_mut().expect("there until the rig is dropped");
        ep.dispatch(routing, &input(config, &set.x, &set.ids, &set.count)?, Outputs::default())
    }

    /// The same, with what `between` queues in its middle.
    pub fn dispatch_around(&mut self, s: usize, between: impl FnOnce() -> Result<()>) -> Result<Arrival> {
        self.fill(s)?;
        let (ep, config, set) = (&mut self.ep, &self.config, &mut self.sets[s]);
        let routing = set.routing.as_mut().expect("there until the rig is dropped");
        ep.dispatch_around(routing, &input(config, &set.x, &set.ids, &set.count)?, between)
    }

    /// The first half of it.
    pub fn dispatch_send(&mut self, s: usize) -> Result<Sent> {
        self.fill(s)?;
        let (ep, config, set) = (&mut self.ep, &self.config, &mut self.sets[s]);
        let routing = set.routing.as_mut().expect("there until the rig is dropped");
        ep.dispatch_send(routing, &input(config, &set.x, &set.ids, &set.count)?)
    }

    /// The second half of it.
    pub fn dispatch_receive(&mut self, s: usize, sent: Sent) -> Result<Arrival> {
        let routing = self.sets[s].routing.as_mut().expect("there until the rig is dropped");
        Ok(self.ep.dispatch_receive(routing, sent, Outputs::default())?)
    }

    /// The same routing, and payload of the same round, once more.
    pub fn replay(&mut self, s: usize) -> Result<Arrival> {
        let (ep, config, set) = (&mut self.ep, &self.config, &self.sets[s]);
        let x = input(config, &set.x, &set.ids, &set.count)?.x;
        let routing = set.routing.as_ref().expect("there until the rig is dropped");
        ep.replay(routing, &moe_kernels::ops::dispatch::Payload { x, scales: None })
    }

    /// Works out what must have arrived.
    pub fn expect(&self, s: usize) -> Result<()> {
        let set = &self.sets[s];
        let at = |buffer: &Buffer| buffer.address().address;
        let max_slots = self.ep.plan().max_rows as u32;
        self.queue(
            Entry::Expect,
            1,
            Expect { slots: at(&set.slots), end: at(&set.end), round: at(&set.round), rank: self.rank(), max_slots },
        )
    }

    /// Compares all rows of an arrival.
    pub fn check_rows(&self, s: usize, arrival: &Arrival) -> Result<()> {
        self.expect(s)?;
        self.compare_rows(s, arrival)
    }

    /// The same with what was expected before.
    pub fn compare_rows(&self, s: usize, arrival: &Arrival) -> Result<()> {
        let set = &self.sets[s];
        let at = |buffer: &Buffer| buffer.address().address;
        let source = arrival.source();
        let rows = Rows {
            slots: at(&set.slots),
            end: at(&set.end),
            num_rows: address(&arrival.num_rows()),
            x: address(&arrival.x()),
            source: address(&source),
            source_stride: source.strides()[0] as u64,
            round: at(&set.round),
            report: at(&self.report),
            max_slots: self.ep.plan().max_rows as u64,
        };
        self.queue(Entry::CheckRows, self.grid(), rows)
    }

    fn experts(&self, s: usize, arrival: &mut Arrival) -> Result<()> {
        let num_rows = address(&arrival.num_rows());
        let y = if self.options.staged {
            self.sets[s].y.address().address
        } else {
            arrival.expert_output().device().map_or(0, |at| at.address)
        };
        let x = address(&arrival.x());
        self.queue(Entry::Experts, self.grid(), Experts { x, y, num_rows, factor: u64::from(self.rank()) + 1 })
    }

    /// Experts, then the first half of combine.
    pub fn combine_send(&mut self, s: usize, mut arrival: Arrival) -> Result<combine::Sent> {
        self.experts(s, &mut arrival)?;
        let (ep, set) = (&mut self.ep, &self.sets[s]);
        let y = rows_of(&self.options, &self.config, ep.plan().max_rows, &set.y)?;
        let routing = set.routing.as_ref().expect("there until the rig is dropped");
        Ok(ep.combine_send(routing, arrival, &combine::Input { y, row_weights: None })?)
    }

    /// The second half of it.
    pub fn combine_receive(&mut self, s: usize, sent: combine::Sent) -> Result<()> {
        self.poison_sums(s)?;
        let (ep, config, set) = (&mut self.ep, &self.config, &mut self.sets[s]);
        let shape = [config.max_tokens + EXTRA_ROWS, config.hidden];
        let out = set.out.view_mut(0, Strides::contiguous("test", config.combine_dtype, &shape)?)?;
        let routing = set.routing.as_ref().expect("there until the rig is dropped");
        Ok(ep.combine_receive(routing, sent, combine::Output { out, add_to: None, topk_weights: None })?)
    }

    fn poison_sums(&self, s: usize) -> Result<()> {
        let out = &self.sets[s].out;
        out.fill(&self.stream, 0, out.len(), 0xFF)
    }

    /// Experts and combine; the sums are not compared.
    pub fn combine(&mut self, s: usize, mut arrival: Arrival) -> Result<()> {
        self.experts(s, &mut arrival)?;
        self.poison_sums(s)?;
        self.combine_alone(s, arrival)
    }

    /// Dispatch and combine alone, of whatever input and rows are there.
    pub fn bare_round(&mut self, s: usize) -> Result<()> {
        let (ep, config, set) = (&mut self.ep, &self.config, &mut self.sets[s]);
        let routing = set.routing.as_mut().expect("there until the rig is dropped");
        let arrival = ep.dispatch(routing, &input(config, &set.x, &set.ids, &set.count)?, Outputs::default())?;
        let shape = [config.max_tokens + EXTRA_ROWS, config.hidden];
        let out = set.out.view_mut(0, Strides::contiguous("test", config.combine_dtype, &shape)?)?;
        let input = combine::Input { y: ExpertRows::InPlace, row_weights: None };
        Ok(ep.combine(routing, arrival, &input, combine::Output { out, add_to: None, topk_weights: None })?)
    }

    /// Combine alone, of whatever rows are there.
    pub fn combine_alone(&mut self, s: usize, arrival: Arrival) -> Result<()> {
        let (ep, config, set) = (&mut self.ep, &self.config, &mut self.sets[s]);
        let y = rows_of(&self.options, config, ep.plan().max_rows, &set.y)?;
        let shape = [config.max_tokens + EXTRA_ROWS, config.hidden];
        let out = set.out.view_mut(0, Strides::contiguous("test", config.combine_dtype, &shape)?)?;
        let routing = set.routing.as_ref().expect("there until the rig is dropped");
        let input = combine::Input { y, row_weights: None };
        Ok(ep.combine(routing, arrival, &input, combine::Output { out, add_to: None, topk_weights: None })?)
    }

    /// Compares all sums.
    pub fn check_sums(&self, s: usize) -> Result<()> {
        let set = &self.sets[s];
        let at = |buffer: &Buffer| buffer.address().address;
        let rows = (self.config.max_tokens + EXTRA_ROWS) as u32;
        let sums = Sums { out: at(&set.out), round: at(&set.round), report: at(&self.report), rank: self.rank(), rows };
        self.queue(Entry::CheckSums, self.grid(), sums)
    }

    /// The set goes to its next round.
    pub fn advance(&self, s: usize) -> Result<()> {
        let round = self.sets[s].round.address().address;
        self.queue(Entry::Advance, 1, Experts { x: 0, y: 0, num_rows: round, factor: 1 })
    }

    /// A whole round, checked. Waits for nothing.
    pub fn round(&mut self, s: usize) -> Result<()> {
        let arrival = self.dispatch(s)?;
        self.check_rows(s, &arrival)?;
        self.combine(s, arrival)?;
        self.check_sums(s)?;
        self.advance(s)
    }

    /// A round without combine, checked.
    pub fn round_without_combine(&mut self, s: usize) -> Result<()> {
        let arrival = self.dispatch(s)?;
        self.check_rows(s, &arrival)?;
        self.advance(s)
    }

    /// The checks have found nothing yet.
    pub fn clear_report(&self) -> Result<()> {
        self.report.fill(&self.stream, 0, self.report.len(), 0)
    }

    /// Waits, and says what the checks have found.
    pub fn verdict(&self) -> Result<()> {
        self.ep.synchronize()?;
        let mut words = [0u32; REPORT_WORDS];
        self.report.download(&self.stream, 0, bytemuck::cast_slice_mut(&mut words))?;
        let [num_wrong, what, round, place, element, got, want] = words;
        if num_wrong == 0 {
            return Ok(());
        }
        let what = ["", "number of rows", "source", "payload", "sum", "a row that is not there"].get(what as usize).copied().unwrap_or("?");
        let why =
            format!("{num_wrong} wrong; one of them: {what}, round {round}, row {place}, element {element}: {got:#x}, expected {want:#x}");
        Err(Error::Io { what: format!("rank {}", self.rank()), why })
    }

    /// Where the number of rows of an arrival is: the same for all arrivals of its bank.
    pub fn num_rows_of(&self, arrival: &Arrival) -> DeviceAddress {
        arrival.num_rows().device().expect("in the memory of the GPU")
    }

    /// The set's last expected number of rows, and the number of rows there.
    pub fn ends(&self, s: usize, num_rows: DeviceAddress) -> Result<[u32; 2]> {
        let mut end = [0u32];
        self.sets[s].end.download(&self.stream, 0, bytemuck::cast_slice_mut(&mut end))?;
        // SAFETY: a number of the object, which is alive.
        let view = unsafe { TensorView::from_device(num_rows, Strides::contiguous("test", DType::U32, &[1])?) }?;
        Ok([end[0], bytemuck::pod_read_unaligned(&self.stream.read(&view)?)])
    }

    /// Whether the sums still are what they were poisoned with.
    pub fn sums_are_untouched(&self, s: usize) -> Result<bool> {
        let mut bytes = vec![0; self.sets[s].out.len()];
        self.sets[s].out.download(&self.stream, 0, &mut bytes)?;
        Ok(bytes.iter().all(|byte| *byte == 0xFF))
    }

    /// Spoils a byte of the sums.
    pub fn spoil_sums(&self, s: usize, at: usize) -> Result<()> {
        self.sets[s].out.fill(&self.stream, at, 1, 0x55)
    }

    /// Spoils a byte of what `check_rows` expects.
    pub fn spoil_slots(&self, s: usize, at: usize) -> Result<()> {
        self.sets[s].slots.fill(&self.stream, at, 1, 0x55)
    }

    /// Sets the round of a set. Waits.
    pub fn set_round(&self, s: usize, round: u32) -> Result<()> {
        self.sets[s].round.upload(&self.stream, 0, &round.to_le_bytes())
    }

    /// Queues from now on in another stream.
    pub fn set_stream(&mut self, stream: &Stream) -> Result<()> {
        self.ep.set_stream(stream)?;
        self.stream = stream.clone();
        Ok(())
    }

    /// The verdict; then waits for all ranks, so that memory can be freed.
    pub fn finish(self) -> Result<()> {
        let verdict = self.verdict();
        self.world.barrier()?;
        verdict
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
        for set in &mut self.sets {
            set.routing = None;
            let _ = &set.memory;
        }
    }
}

fn input<'a>(config: &Config, x: &'a Buffer, ids: &'a Buffer, count: &'a Buffer) -> Result<Input<'a>> {
    let matrix = |dtype, columns| Strides::contiguous("test", dtype, &[config.max_tokens, columns]);
    Ok(Input {
        x: x.view(0, matrix(config.dtype, config.hidden)?)?,
        topk_idx: ids.view(0, matrix(DType::I32, config.k)?)?,
        topk_weights: None,
        scales: None,
        num_tokens: NumTokens::Device(count.view(0, Strides::contiguous("test", DType::U32, &[1])?)?),
    })
}

fn rows_of<'a>(options: &Options, config: &Config, max_rows: usize, y: &'a Buffer) -> Result<ExpertRows<'a>> {
    if !options.staged {
        return Ok(ExpertRows::InPlace);
    }
    Ok(ExpertRows::Staged(y.view(0, Strides::contiguous("test", config.combine_dtype, &[max_rows, config.hidden])?)?))
}

/// Runs the ranks of a world on the GPUs that were asked for; says what went wrong, not what followed from it.
pub fn run<R: Send>(ranks: usize, programmatic: bool, work: impl Fn(World) -> Result<R> + Sync) -> Result<Vec<R>> {
    run_on(gpus()?, ranks, programmatic, work)
}

/// The same where the ranks share the first GPU, however many there are.
pub fn run_sharing<R: Send>(ranks: usize, programmatic: bool, work: impl Fn(World) -> Result<R> + Sync) -> Result<Vec<R>> {
    run_on(Cuda::new(0)?, ranks, programmatic, work)
}

fn run_on<R: Send>(cuda: Cuda, ranks: usize, programmatic: bool, work: impl Fn(World) -> Result<R> + Sync) -> Result<Vec<R>> {
    let results = World::run(&Backend::Cuda(cuda.programmatic(programmatic)), ranks, work)?;
    let follows = |error: &Error| matches!(error, Error::Timeout { .. } | Error::Poisoned { .. });
    let mut errors: Vec<&Error> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    errors.sort_by_key(|error| follows(error));
    if let Some(first) = errors.first() {
        return Err((*first).clone());
    }
    results.into_iter().collect()
}
