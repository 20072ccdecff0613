//! The launches of a dispatch or replay: parameters from addresses, kernels and grids by the table of `docs/ep-gpu.md`.

use super::params::{
    ArrangeParameters, CallParameters, IndexParameters, LowLatencyParameters, PayloadParameters, ReceiveParameters, ReportParameters,
    RouteParameters,
};
use super::spec::Done;
use crate::ep::device::context::Ctx;
use crate::ep::device::shape::Loaded;
use crate::ep::device::tuning::{Class, Tokens};
use crate::ep::signal::{Machine, Rules};
use crate::error::Result;
use crate::gpu::Geometry;

/// Type of `topk_idx`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum IndexType {
    I32 = 0,
    I64 = 1,
}

impl IndexType {
    pub(super) fn name(self) -> &'static str {
        match self {
            IndexType::I32 => "i32",
            IndexType::I64 => "i64",
        }
    }
}

/// Rows and scales of the caller, as addresses of this rank's device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Payload {
    pub x: u64,
    /// Bytes from row to row, a multiple of 16.
    pub x_stride: u64,
    /// Rows of x that may be read.
    pub x_rows: u32,
    /// 0 without scales.
    pub scales: u64,
    /// Bytes.
    pub scale_stride: u64,
}

/// A dispatch, as addresses of this rank's device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub topk_idx: u64,
    pub index: IndexType,
    /// Elements from row to row.
    pub idx_stride: u64,
    /// 0: every weight is 1.
    pub topk_weights: u64,
    /// Elements.
    pub weight_stride: u64,
    /// Address of a u32 with the number of tokens; 0: `tokens.most` of them.
    pub device_tokens: u64,
    /// A host count: exactly that, and it may be above `max_tokens`, which all ranks are told. A device count: at most the rows of x and `topk_idx`.
    pub tokens: Tokens,
    pub payload: Payload,
    /// Memory of the routing, `layout.routing.num_bytes`.
    pub routing: u64,
    pub bank: u32,
}

/// A replay, as addresses of this rank's device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReplayCall {
    /// What the host knows of the tokens of the routing.
    pub tokens: Tokens,
    pub payload: Payload,
    pub routing: u64,
    pub bank: u32,
}

/// The second half of a dispatch or replay.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReceiveCall {
    pub tokens: Tokens,
    pub routing: u64,
    pub bank: u32,
}

/// What is to be known of the rows of an arrival by token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IndexCall {
    pub bank: u32,
    /// u32 `[L]`: rows with a route to each local expert. 0: in this rank's own memory, `layout.private.banks[bank].expert_rows`.
    pub num_rows_per_expert: u64,
    /// u32 `[L + 1]`: where segments begin; 0: not wanted.
    pub segment_start: u64,
    /// i32, room for all segments; 0: not wanted.
    pub gather_idx: u64,
    /// u64 `[L]`, added to; 0: not wanted.
    pub statistics: u64,
    /// u32 `[L]` in pinned host memory, as the device knows it; 0: not wanted.
    pub counts_host: u64,
    /// Rows to whose multiple segments of `gather_idx` are padded, at least 1.
    pub align: u32,
}

/// What a caller asks of an arrival beside its views: addresses of this rank's device, each 0 when it is not wanted.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReportCall {
    pub bank: u32,
    /// i32 `[rows, 2]`, contiguous; with it the next two.
    pub source: u64,
    /// i32 `[rows, row_k]`.
    pub topk_idx: u64,
    /// f32 `[rows, row_k]`.
    pub topk_weights: u64,
    /// Expert layouts: u64 `[L]`, added to.
    pub statistics: u64,
    /// Expert layouts: u32 `[L]` in pinned host memory, as the device knows it.
    pub counts_host: u64,
}

/// A whole dispatch.
pub(crate) fn dispatch(ctx: &Ctx, call: &Call) -> Result<()> {
    dispatch_around(ctx, call, || Ok(()))
}

/// The same, with what `between` queues behind the kernel that makes the routes, if rows are another kernel's.
pub(crate) fn dispatch_around(ctx: &Ctx, call: &Call, between: impl FnOnce() -> Result<()>) -> Result<()> {
    if ctx.kernels.dispatch.low_latency.is_some() {
        return low_latency(ctx, call);
    }
    route(ctx, call)?;
    between()?;
    payload(ctx, &call.replay(), true)?;
    arrange(ctx, &call.receive(), false)
}

/// The first half of a dispatch: nothing waits for rows.
pub(crate) fn dispatch_send(ctx: &Ctx, call: &Call) -> Result<()> {
    route(ctx, call)?;
    payload(ctx, &call.replay(), false)
}

/// The second half of a dispatch.
pub(crate) fn dispatch_receive(ctx: &Ctx, call: &ReceiveCall) -> Result<()> {
    receive(ctx, call)?;
    arrange(ctx, call, false)
}

/// A whole replay.
pub(crate) fn replay(ctx: &Ctx, call: &ReplayCall) -> Result<()> {
    route_again(ctx, call)?;
    payload(ctx, call, true)?;
    arrange(ctx, &call.receive(), true)
}

/// The kernel that moves the rows, alone: for kernels that exchange no done words, by a routing whose bank is not refused.
pub(crate) fn payload_alone(ctx: &Ctx, call: &ReplayCall) -> Result<()> {
    payload(ctx, call, true)
}

/// The first half of a replay.
pub(crate) fn replay_send(ctx: &Ctx, call: &ReplayCall) -> Result<()> {
    route_again(ctx, call)?;
    payload(ctx, call, false)
}

/// The second half of a replay.
pub(crate) fn replay_receive(ctx: &Ctx, call: &ReceiveCall) -> Result<()> {
    receive(ctx, call)?;
    arrange(ctx, call, true)
}

impl Call {
    fn replay(&self) -> ReplayCall {
        ReplayCall { tokens: self.tokens, payload: self.payload, routing: self.routing, bank: self.bank }
    }

    fn receive(&self) -> ReceiveCall {
        ReceiveCall { tokens: self.tokens, routing: self.routing, bank: self.bank }
    }

    fn parameters(&self, ctx: &Ctx) -> CallParameters {
        let has_device_tokens = self.device_tokens != 0;
        CallParameters {
            topk_idx: self.topk_idx,
            topk_weights: self.topk_weights,
            device_tokens: self.device_tokens,
            idx_stride: self.idx_stride,
            weight_stride: self.weight_stride,
            num_tokens: self.tokens.most,
            // A count on the device beyond the caller's rows is refused as one beyond max_tokens is: nothing is read there.
            most_tokens: if has_device_tokens { ctx.max_tokens.min(self.tokens.most) } else { ctx.max_tokens },
            ..kept(ctx, self.bank, self.routing)
        }
    }
}

impl ReplayCall {
    fn receive(&self) -> ReceiveCall {
        ReceiveCall { tokens: self.tokens, routing: self.routing, bank: self.bank }
    }
}

/// What of a `Call` is kept: the routing and the bank.
fn kept(ctx: &Ctx, bank: u32, routing: u64) -> CallParameters {
    let (r, b) = (&ctx.layout.routing, ctx.bank(bank));
    let at = |offset: usize| routing + offset as u64;
    CallParameters {
        topk_idx: 0,
        topk_weights: 0,
        device_tokens: 0,
        idx_stride: 0,
        weight_stride: 0,
        num_tokens: 0,
        max_tokens: ctx.max_tokens,
        max_rows: ctx.max_rows,
        most_tokens: ctx.max_tokens,
        routing: at(r.head),
        counts: at(r.counts),
        sent: at(r.sent),
        records: at(r.records),
        arrival: ctx.private(b.head),
        rows: at(r.rows),
        places: at(r.places),
        arriving: ctx.private(b.arriving),
        expert_rows: ctx.private(b.expert_rows),
        segment_start: ctx.private(b.segment_start),
        segment_align: ctx.segment_align,
        rows_per_expert: ctx.rows_per_expert,
    }
}

fn route(ctx: &Ctx, call: &Call) -> Result<()> {
    let kernels = &ctx.kernels.dispatch;
    // A call that is refused for its number of tokens routes none.
    let small = call.tokens.most.min(ctx.max_tokens) <= kernels.choice.small_route_tokens();
    let kernel = &kernels.route[usize::from(small)][call.index as usize];
    let blocks = if small { kernels.small_route_blocks(kernel) } else { kernels.route_blocks(call.tokens, kernel) };
    queue_route(ctx, kernel, blocks, call.parameters(ctx), &call.payload, call.bank)
}

fn route_again(ctx: &Ctx, call: &ReplayCall) -> Result<()> {
    queue_route(ctx, &ctx.kernels.dispatch.replay, 1, kept(ctx, call.bank, call.routing), &call.payload, call.bank)
}

fn queue_route(ctx: &Ctx, kernel: &Loaded<RouteParameters>, blocks: u32, call: CallParameters, payload: &Payload, bank: u32) -> Result<()> {
    let choice = &ctx.kernels.dispatch.choice;
    let parameters = RouteParameters {
        call,
        block_words: ctx.private(ctx.layout.private.block_words),
        x: payload.x,
        x_stride: payload.x_stride,
        x_row_bytes: choice.row.x_row_bytes(),
        warm_rows: choice.warm_rows().min(payload.x_rows),
        me: *ctx.me(bank),
    };
    queue(ctx, kernel, blocks, &parameters)
}

fn low_latency(ctx: &Ctx, call: &Call) -> Result<()> {
    let kernels = &ctx.kernels.dispatch;
    let Some(by_size) = &kernels.low_latency else { return Ok(()) };
    let small = call.tokens.most.min(ctx.max_tokens) <= kernels.choice.small_low_latency_tokens();
    let kernel = &by_size[usize::from(small)][call.index as usize];
    let regions = &ctx.layout.regions;
    let parameters = LowLatencyParameters {
        call: call.parameters(ctx),
        x: call.payload.x,
        x_stride: call.payload.x_stride,
        x_region: ctx.region(call.bank, regions.x),
        record_region: ctx.region(call.bank, regions.records),
        staging: regions.staging as u64,
        copies: Machine::staging_copies(ctx.in_flight as usize) as u32,
        x_rows: call.payload.x_rows,
        me: *ctx.me(call.bank),
    };
    queue(ctx, kernel, kernels.low_latency_blocks(call.tokens, kernel), &parameters)
}

fn payload(ctx: &Ctx, call: &ReplayCall, waits: bool) -> Result<()> {
    let (kernels, kept) = (&ctx.kernels.dispatch, kept(ctx, call.bank, call.routing));
    let class = Class::of(call.tokens.likely);
    let regions = &ctx.layout.regions;
    let Payload { x, x_stride, x_rows, scales, scale_stride } = call.payload;
    let parameters = PayloadParameters {
        x,
        x_stride,
        scales,
        scale_stride,
        routing: kept.routing,
        sent: kept.sent,
        records: kept.records,
        rows: kept.rows,
        places: kept.places,
        counts: kept.counts,
        x_region: ctx.region(call.bank, regions.x),
        record_region: ctx.region(call.bank, if ctx.is_by_expert { regions.transit } else { regions.records }),
        scale_region: ctx.region(call.bank, regions.scales),
        scale_rows: ctx.scale_rows,
        max_rows: ctx.max_rows,
        max_tokens: ctx.max_tokens,
        x_rows,
        waits: waits.into(),
        triggers: triggers(ctx),
        spare: 0,
        me: *ctx.me(call.bank),
    };
    queue(ctx, &kernels.payload[class as usize], kernels.choice.payload_blocks(call.tokens, class), &parameters)?;
    match kernels.choice.done(class) {
        Done::After => queue_receive(ctx, kept.counts, call.bank, [true, waits]),
        Done::Within | Done::Never => Ok(()),
    }
}

/// Whether what is launched programmatically behind a dispatch may start before the rows of the peers are here. What comes next is not known here, and might fill a
/// device that is shared, as `arrange` would.
fn triggers(ctx: &Ctx) -> u32 {
    let kernels = &ctx.kernels.dispatch;
    (ctx.ranks_on_device == 1 && kernels.is_alone() || kernels.choice.tuning.early && !ctx.is_by_expert).into()
}

fn receive(ctx: &Ctx, call: &ReceiveCall) -> Result<()> {
    queue_receive(ctx, call.routing + ctx.layout.routing.counts as u64, call.bank, [false, true])
}

fn queue_receive(ctx: &Ctx, counts: u64, bank: u32, [posts, waits]: [bool; 2]) -> Result<()> {
    // Of a receiving half alone nothing was said so far of what may follow.
    let triggers = if posts { triggers(ctx) } else { 0 };
    let parameters = ReceiveParameters { counts, posts: posts.into(), waits: waits.into(), triggers, spare: 0, me: *ctx.me(bank) };
    queue(ctx, &ctx.kernels.dispatch.receive, 1, &parameters)
}

/// Expert layouts only.
fn arrange(ctx: &Ctx, call: &ReceiveCall, is_replay: bool) -> Result<()> {
    let kernels = &ctx.kernels.dispatch;
    let Some(by_call) = &kernels.arrange else { return Ok(()) };
    let class = Class::of(call.tokens.likely);
    let (r, b, regions) = (&ctx.layout.routing, ctx.bank(call.bank), &ctx.layout.regions);
    let at = |offset: usize| call.routing + offset as u64;
    let own = |region: usize| ctx.own(call.bank, region);
    let parameters = ArrangeParameters {
        arrival: ctx.private(b.head),
        arriving: ctx.private(b.arriving),
        expert_rows: ctx.private(b.expert_rows),
        segment_start: ctx.private(b.segment_start),
        x: own(regions.x),
        records: own(regions.records),
        transit: own(regions.transit),
        scales: own(regions.scales),
        scale_rows: ctx.scale_rows,
        primary: at(r.primary),
        slots: at(r.slots),
        experts: at(r.experts),
        weights: at(r.weights),
        segment_align: ctx.segment_align,
        rows_per_expert: ctx.rows_per_expert,
        me: *ctx.me(call.bank),
    };
    queue(ctx, &by_call[usize::from(is_replay)][class as usize], kernels.choice.arrange_blocks(call.tokens, class), &parameters)
}

/// Counts of the rows of an arrival by token, and what is asked for beside them. After the dispatch, in the same stream.
///
/// # Errors
/// `Unsupported` when a rank has too many experts for it.
pub(crate) fn index_rows(ctx: &Ctx, call: &IndexCall) -> Result<()> {
    let kernel = ctx.kernels.dispatch.index("dispatch")?;
    let bank = ctx.bank(call.bank);
    let or_own = |address: u64, offset: usize| if address == 0 { ctx.private(offset) } else { address };
    let parameters = IndexParameters {
        arrival: ctx.private(bank.head),
        records: ctx.own(call.bank, ctx.layout.regions.records),
        num_rows_per_expert: or_own(call.num_rows_per_expert, bank.expert_rows),
        segment_start: or_own(call.segment_start, bank.segment_start),
        gather_idx: call.gather_idx,
        statistics: call.statistics,
        counts_host: call.counts_host,
        align: call.align.max(1),
        spare: 0,
        me: *ctx.me(call.bank),
    };
    queue(ctx, kernel, 1, &parameters)
}

/// Metadata of an arrival unpacked; counts of an expert layout to where the caller wants them. After the dispatch, in the same stream.
pub(crate) fn report(ctx: &Ctx, call: &ReportCall) -> Result<()> {
    let kernel = &ctx.kernels.dispatch.report;
    let bank = ctx.bank(call.bank);
    let parameters = ReportParameters {
        arrival: ctx.private(bank.head),
        records: ctx.own(call.bank, ctx.layout.regions.records),
        expert_rows: if ctx.is_by_expert { ctx.private(bank.expert_rows) } else { 0 },
        source: call.source,
        ids: call.topk_idx,
        weights: call.topk_weights,
        statistics: call.statistics,
        counts_host: call.counts_host,
        num_local: ctx.num_local,
        rows_per_expert: if ctx.is_fixed { ctx.rows_per_expert } else { 0 },
        me: *ctx.me(call.bank),
    };
    let blocks = if call.source == 0 { 1 } else { ctx.max_rows.div_ceil(kernel.threads).clamp(1, 2 * ctx.num_sms) };
    // A large grid, which must not take the place of other ranks' kernels behind a dispatch that lets it start early.
    let programmatic = ctx.cuda.is_programmatic() && !(ctx.ranks_on_device > 1 && ctx.kernels.dispatch.choice.tuning.early);
    queue_as(ctx, kernel, blocks, &parameters, programmatic)
}

fn queue<P: Copy>(ctx: &Ctx, kernel: &Loaded<P>, blocks: u32, parameters: &P) -> Result<()> {
    queue_as(ctx, kernel, blocks, parameters, ctx.cuda.is_programmatic())
}

/// Queues a kernel. Grids whose blocks wait are no larger than the registry of the device allows: they find room block by block, and need not be launched
/// cooperatively, which costs 0.1 us (2 ranks) to 0.5 us (8 ranks) a launch (measured, H200, one token).
fn queue_as<P: Copy>(ctx: &Ctx, kernel: &Loaded<P>, blocks: u32, parameters: &P, programmatic: bool) -> Result<()> {
    let geometry = Geometry { grid: [blocks, 1, 1], threads: kernel.threads, programmatic, ..Geometry::default() };
    // SAFETY: the kernel was loaded for this device and takes `P` (`Loaded`); the context's memory lives as long as the object, and the callers'
    // validators have checked that the addresses of a call belong to the device and cover what its shapes say.
    unsafe { kernel.kernel.launch(ctx.cuda.stream(), &geometry, parameters) }
}
