//! The launches of a combine: parameters from addresses, kernels and grids by the table of `docs/ep-gpu.md`.

use super::params::{CombineParameters, PrepareParameters, SendParameters};
use super::spec::Add;
use crate::ep::device::context::Ctx;
use crate::ep::device::shape::Loaded;
use crate::ep::device::tuning::{Class, Tokens};
use crate::error::Result;
use crate::gpu::Geometry;

/// Rows of the caller, as an address of this rank's device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Staged {
    pub y: u64,
    /// Bytes from row to row, a multiple of 16.
    pub y_stride: u64,
}

/// f32 `[rows, row_k]` of the caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowWeights {
    pub address: u64,
    /// Elements from row to row.
    pub stride: u64,
}

/// What is added last.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Addend {
    pub address: u64,
    /// Bytes from row to row, a multiple of 16.
    pub stride: u64,
    /// In f32; otherwise in the type of the result. When that is f32 either will do.
    pub is_f32: bool,
}

/// f32 `[T, k]` of the caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Folded {
    pub address: u64,
    /// Elements from row to row.
    pub stride: u64,
}

/// The first half of a combine: this rank's rows are complete.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Send {
    /// What the host knows of the tokens of the routing.
    pub tokens: Tokens,
    /// Memory of the routing with which the arrival came.
    pub routing: u64,
    pub bank: u32,
    /// `None`: in the bank's `expert_output`.
    pub staged: Option<Staged>,
    pub row_weights: Option<RowWeights>,
}

/// The second half of a combine: the sums.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Receive {
    /// What the host knows of the tokens of the routing.
    pub tokens: Tokens,
    pub routing: u64,
    pub bank: u32,
    pub out: u64,
    /// Bytes from row to row, a multiple of 16.
    pub out_stride: u64,
    pub add: Option<Addend>,
    pub folded: Option<Folded>,
}

impl Receive {
    fn adds(&self) -> Add {
        match self.add {
            None => Add::Nothing,
            Some(Addend { is_f32: false, .. }) => Add::Value,
            Some(Addend { is_f32: true, .. }) => Add::F32,
        }
    }
}

/// That the object was made for such a call: before anything is queued.
///
/// # Errors
/// `Unsupported` for a sum that it was made without.
pub(crate) fn check(ctx: &Ctx, call: &Receive) -> Result<()> {
    let kernels = &ctx.kernels.combine;
    kernels.combine(kernels.choice.class_of(call.tokens.likely), call.adds(), call.folded.is_some()).map(|_| ())
}

/// As [`check`], for the first half.
pub(crate) fn check_send(ctx: &Ctx) -> Result<()> {
    ctx.kernels.combine.send().map(|_| ())
}

/// A whole combine.
pub(crate) fn combine(ctx: &Ctx, send: &Send, receive: &Receive) -> Result<()> {
    prepare(ctx, send)?;
    combine_receive(ctx, receive)
}

/// The first half of a combine.
pub(crate) fn combine_send(ctx: &Ctx, call: &Send) -> Result<()> {
    prepare(ctx, call)?;
    queue(
        ctx,
        ctx.kernels.combine.send()?,
        1,
        &SendParameters { counts: call.routing + ctx.layout.routing.counts as u64, me: *ctx.me(call.bank) },
    )
}

/// The second half of a combine, which says once more that rows may be read: by a kernel of its own, which waits, or by the one that sums.
pub(crate) fn combine_receive(ctx: &Ctx, call: &Receive) -> Result<()> {
    let kernels = &ctx.kernels.combine;
    let class = kernels.choice.class_of(call.tokens.likely);
    let (r, regions) = (&ctx.layout.routing, &ctx.layout.regions);
    let at = |offset: usize| call.routing + offset as u64;
    let kernel = kernels.combine(class, call.adds(), call.folded.is_some())?;
    if let Some(wait) = kernels.wait(class) {
        queue(ctx, wait, 1, &SendParameters { counts: at(r.counts), me: *ctx.me(call.bank) })?;
    }
    let rows_region = if kernels.choice.row.is_converted() { regions.wire } else { regions.expert_output };
    let parameters = CombineParameters {
        routing: at(r.head),
        sent: at(r.sent),
        counts: at(r.counts),
        out: call.out,
        out_stride: call.out_stride,
        add_to: call.add.map_or(0, |add| add.address),
        add_stride: call.add.map_or(0, |add| add.stride),
        rows_region: ctx.region(call.bank, rows_region),
        fold_region: ctx.region(call.bank, regions.fold),
        folded: call.folded.map_or(0, |folded| folded.address),
        folded_stride: call.folded.map_or(0, |folded| folded.stride),
        records: at(r.records),
        rows: at(r.rows),
        places: at(r.places),
        max_rows: ctx.max_rows,
        max_tokens: ctx.max_tokens,
        me: *ctx.me(call.bank),
    };
    queue(ctx, kernel, kernels.combine_blocks(call.tokens, class, kernel), &parameters)
}

/// Puts rows and weights where peers read them; nothing to do for rows in place, as they are.
fn prepare(ctx: &Ctx, call: &Send) -> Result<()> {
    let kernels = &ctx.kernels.combine;
    let with_rows = call.staged.is_some() || kernels.choice.prepares_in_place();
    let class = Class::of(call.tokens.likely);
    let kernel = match (&kernels.fold, call.row_weights) {
        _ if with_rows => kernels.prepare(class)?,
        (Some(fold), Some(_)) => fold,
        _ => return Ok(()),
    };
    let (r, regions) = (&ctx.layout.routing, &ctx.layout.regions);
    let at = |offset: usize| call.routing + offset as u64;
    let own = |region: usize| ctx.own(call.bank, region);
    let in_place = Staged { y: own(regions.expert_output), y_stride: ctx.expert_row_bytes };
    let Staged { y, y_stride } = call.staged.unwrap_or(in_place);
    let parameters = PrepareParameters {
        arrival: ctx.private(ctx.bank(call.bank).head),
        y,
        y_stride,
        out: own(if kernels.choice.row.is_converted() { regions.wire } else { regions.expert_output }),
        primary: at(r.primary),
        slots: at(r.slots),
        weights: at(r.weights),
        row_weights: call.row_weights.map_or(0, |weights| weights.address),
        row_weight_stride: call.row_weights.map_or(0, |weights| weights.stride),
        fold: own(regions.fold),
        rows: if ctx.is_fixed { ctx.num_local * ctx.rows_per_expert } else { 0 },
        spare: 0,
        me: *ctx.me(call.bank),
    };
    queue(ctx, kernel, kernels.choice.prepare_blocks(call.tokens, class), &parameters)
}

/// Queues a kernel, as the launches of a dispatch are queued.
fn queue<P: Copy>(ctx: &Ctx, kernel: &Loaded<P>, blocks: u32, parameters: &P) -> Result<()> {
    let geometry =
        Geometry { grid: [blocks, 1, 1], threads: kernel.threads, programmatic: ctx.cuda.is_programmatic(), ..Geometry::default() };
    // SAFETY: the kernel was loaded for this device and takes `P` (`Loaded`); the context's memory lives as long as the object, and the callers'
    // validators have checked that the addresses of a call belong to the device and cover what its shapes say.
    unsafe { kernel.kernel.launch(ctx.cuda.stream(), &geometry, parameters) }
}
