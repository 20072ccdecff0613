//! Worlds, configurations and objects of expert parallelism.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use super::handle::{Handle, OP, Tagged, drop_handle, get, get_mut, give, handle, required, wrapped};
use super::tensor::{Growing, Place, dtype, read, write};
use super::{MoeBackend, guard, text};
use crate::backend::Backend;
use crate::ep::{Config, ExpertParallel, IdSpace, Layout, Mode, Overflow, PhaseTuning, Quantize, Reduce, ScaleLayout, Tuning, Wire, World};
use crate::error::{Error, Result};
use crate::gpu::Stream;
use crate::id::Rank;

/// One rank's membership of a world of ranks. Used by one thread at a time; every rank makes its collective calls in the same order.
pub struct MoeWorld(Tagged<World>);

handle!(MoeWorld, World, 2);

/// One rank's end of the buffers through which tokens travel to experts and back. Used by one thread at a time.
pub struct MoeEp(Tagged<EpValue>);

handle!(MoeEp, EpValue, 3);

/// An object, and where the tensors of its calls are.
pub(super) struct EpValue {
    pub(super) ep: ExpertParallel,
    pub(super) place: Place,
}

/// One row per (token, rank), ordered by (source rank, token).
pub const MOE_LAYOUT_BY_TOKEN: i32 = 0;
/// One row per (token, local expert), grouped by expert, segments padded to multiples of `layout_rows`.
pub const MOE_LAYOUT_BY_EXPERT: i32 = 1;
/// [local experts, layout_rows, hidden] and counts.
pub const MOE_LAYOUT_BY_EXPERT_FIXED: i32 = 2;

/// More rows than fit: MOE_CAPACITY on every rank, nothing written.
pub const MOE_OVERFLOW_ERROR: i32 = 0;
/// More rows than fit: the last are dropped, counted, and add nothing in combine.
pub const MOE_OVERFLOW_DROP: i32 = 1;

/// Rows travel as they are.
pub const MOE_QUANTIZE_NONE: i32 = 0;
/// e4m3 with one f32 scale per 128 elements.
pub const MOE_QUANTIZE_F32: i32 = 1;
/// e4m3 with one E8M0 scale per 128 elements.
pub const MOE_QUANTIZE_POWER_OF_TWO: i32 = 2;

/// [rows, S] bytes, strided.
pub const MOE_SCALES_ROW_MAJOR: i32 = 0;
/// [ceil(S / 4), aligned rows] words.
pub const MOE_SCALES_COLUMN_MAJOR: i32 = 1;
/// The same, four E8M0 bytes of a row in one word.
pub const MOE_SCALES_PACKED_E8M0: i32 = 2;

/// Expert ids in arrivals are global.
pub const MOE_IDS_GLOBAL: i32 = 0;
/// Expert ids in arrivals are those of the receiving rank, -1 for others.
pub const MOE_IDS_LOCAL: i32 = 1;

/// Counts first, then rows straight into place.
pub const MOE_MODE_THROUGHPUT: i32 = 0;
/// The first rows travel with the counts, when `expected_tokens` says that they are few. The bytes are the same.
pub const MOE_MODE_LOW_LATENCY: i32 = 1;

/// Rows travel back as the experts wrote them.
pub const MOE_WIRE_AS_IS: i32 = 0;
/// Rows travel back as e4m3 without scales.
pub const MOE_WIRE_FP8_DIRECT: i32 = 1;
/// Rows travel back as e4m3 with an f32 scale per 128 elements.
pub const MOE_WIRE_FP8_BLOCK: i32 = 2;

/// Expert layouts: each rank sums a token's rows in f32, and rounds once.
pub const MOE_COMBINE_AT_RANK: i32 = 0;
/// The same; the sum travels as f32.
pub const MOE_COMBINE_AT_RANK_F32: i32 = 1;
/// Every expert row travels; the result does not depend on the number of ranks.
pub const MOE_COMBINE_AT_SOURCE: i32 = 2;

/// What all ranks must agree on. `moe_ep_config_init` sets the defaults; then change what is needed. All ranks use the same values, but for `timeout_ms` and
/// the multiprocessors.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MoeEpConfig {
    /// sizeof(MoeEpConfig): later versions may add members at the end.
    pub size: usize,
    /// Elements of a row; its bytes are a multiple of 16.
    pub hidden: usize,
    /// Global experts.
    pub num_experts: usize,
    /// Routes of a token, 1 to 32.
    pub k: usize,
    /// Most tokens of a rank in one call, 1 to 524288.
    pub max_tokens: usize,
    /// Rows of the receive buffer; 0 is the worst case (the default).
    pub max_rows: usize,
    /// MOE_LAYOUT_BY_EXPERT with MOE_OVERFLOW_DROP: rows kept per segment; 0 is the worst case (the default).
    pub max_rows_per_expert: usize,
    /// MOE_LAYOUT_BY_EXPERT: rows to a multiple of which a segment is padded, at least 1. MOE_LAYOUT_BY_EXPERT_FIXED: rows of each expert.
    pub layout_rows: usize,
    /// Opaque scale bytes per token that travel with its row. 0 by default.
    pub scale_bytes: usize,
    /// Tokens per rank that a call usually has; chooses the low-latency form. `max_tokens` by default.
    pub expected_tokens: usize,
    /// Banks: 1 (the default), or 2 to have two arrivals at once.
    pub in_flight: usize,
    /// Owner of each expert, [num_experts], or null (the default): expert e is on rank floor(e * ranks / num_experts). Read during the call only.
    pub expert_map: *const u32,
    /// Bound of every wait in milliseconds, multiplied by the environment's MOE_TIMEOUT_SCALE. 30000 by default.
    pub timeout_ms: u64,
    /// Element type of x, one of MOE_F32 .. MOE_BYTES.
    pub dtype: i32,
    /// Element type of y and of combine's output: MOE_F32, MOE_F16 or MOE_BF16. By default that of x, or MOE_BF16 when x has none of the three.
    pub combine_dtype: i32,
    /// One of MOE_LAYOUT_*.
    pub layout: i32,
    /// One of MOE_OVERFLOW_*.
    pub overflow: i32,
    /// One of MOE_QUANTIZE_*.
    pub quantize: i32,
    /// One of MOE_SCALES_*.
    pub scale_layout: i32,
    /// One of MOE_IDS_*.
    pub id_space: i32,
    /// One of MOE_MODE_*.
    pub mode: i32,
    /// One of MOE_WIRE_*.
    pub wire: i32,
    /// One of MOE_COMBINE_*.
    pub reduce: i32,
    /// Not 0: expert layouts multiply each row by its route's weight. 0 by default: the experts have applied the weights.
    pub weighted: i32,
    /// Not 0: room to fold weights per row back to [T, K]. 0 by default.
    pub fold_weights: i32,
    /// On a GPU: most multiprocessors that a dispatch occupies; 0 for no limit (the default). Need not be equal on all ranks.
    pub dispatch_sms: u32,
    /// The same of a combine.
    pub combine_sms: u32,
}

// SAFETY: integers and a pointer; zeros are a value of each.
unsafe impl Growing for MoeEpConfig {
    const NAME: &'static str = "MoeEpConfig";
}

/// Bytes that an object of a configuration needs on each rank, known before anything is allocated.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MoeEpPlan {
    /// sizeof(MoeEpPlan): later versions may add members at the end.
    pub size: usize,
    /// Memory of a rank that all ranks map.
    pub symmetric_bytes: usize,
    /// On a GPU: memory of a rank alone. 0 on the CPU.
    pub private_bytes: usize,
    /// On a GPU: one routing. 0 on the CPU: ask `moe_routing_bytes`.
    pub routing_bytes: usize,
    /// Rows of the receive buffer.
    pub max_rows: usize,
    /// Bytes of a received row.
    pub row_bytes: usize,
    /// Scale bytes of a received row.
    pub scale_bytes: usize,
    /// Most local experts of a rank.
    pub max_local_experts: usize,
}

// SAFETY: integers.
unsafe impl Growing for MoeEpPlan {
    const NAME: &'static str = "MoeEpPlan";
}

fn one_of<T: Copy>(what: &str, number: i32, values: &[T]) -> Result<T> {
    let found = usize::try_from(number).ok().and_then(|n| values.get(n).copied());
    found.ok_or_else(|| Error::invalid(OP, what, number, format!("0 to {}", values.len() - 1)))
}

/// # Safety
/// As the header requires: what the struct points to is there during the call.
unsafe fn config_of(config: *const MoeEpConfig) -> Result<Config> {
    // SAFETY: the caller's promise.
    let c = unsafe { read(config) }?;
    let or_worst = |n: usize| (n != 0).then_some(n);
    let expert_map = match (c.expert_map.is_null(), c.expert_map.is_aligned()) {
        (true, _) => None,
        (_, false) => return Err(Error::invalid(OP, "expert_map", format!("{:p}", c.expert_map), "aligned to 4 bytes")),
        (_, true) if c.num_experts > isize::MAX as usize / size_of::<u32>() => {
            return Err(Error::invalid(OP, "num_experts", c.num_experts, "as many as expert_map has"));
        }
        // SAFETY: not null and aligned; the header requires `num_experts` entries.
        _ => Some(unsafe { std::slice::from_raw_parts(c.expert_map, c.num_experts) }.iter().map(|r| Rank(*r)).collect()),
    };
    let layouts =
        [Layout::ByToken, Layout::ByExpert { segment_align: c.layout_rows }, Layout::ByExpertFixed { rows_per_expert: c.layout_rows }];
    Ok(Config {
        expert_map,
        layout: one_of("layout", c.layout, &layouts)?,
        max_rows: or_worst(c.max_rows),
        max_rows_per_expert: or_worst(c.max_rows_per_expert),
        overflow: one_of("overflow", c.overflow, &[Overflow::Error, Overflow::Drop])?,
        scale_bytes: c.scale_bytes,
        quantize: one_of("quantize", c.quantize, &[None, Some(Quantize::F32), Some(Quantize::PowerOfTwo)])?,
        scale_layout: one_of("scale_layout", c.scale_layout, &[ScaleLayout::RowMajor, ScaleLayout::ColumnMajor, ScaleLayout::PackedE8M0])?,
        id_space: one_of("id_space", c.id_space, &[IdSpace::Global, IdSpace::Local])?,
        mode: one_of("mode", c.mode, &[Mode::Throughput, Mode::LowLatency])?,
        expected_tokens: c.expected_tokens,
        in_flight: c.in_flight,
        combine_dtype: dtype("combine_dtype", c.combine_dtype)?,
        wire: one_of("wire", c.wire, &[Wire::AsIs, Wire::Fp8Direct, Wire::Fp8Block])?,
        reduce: one_of("reduce", c.reduce, &[Reduce::AtRank, Reduce::AtRankF32, Reduce::AtSource])?,
        weighted: c.weighted != 0,
        fold_weights: c.fold_weights != 0,
        timeout: Duration::from_millis(c.timeout_ms),
        ..Config::new(c.hidden, dtype("dtype", c.dtype)?, c.num_experts, c.k, c.max_tokens)
    })
}

/// # Safety
/// As [`config_of`].
unsafe fn tuning_of(config: *const MoeEpConfig) -> Result<Tuning> {
    // SAFETY: the caller's promise.
    let config = unsafe { read(config) }?;
    let phase = |sms: u32| PhaseTuning { geometry: None, sms: (sms > 0).then_some(sms) };
    Ok(Tuning { dispatch: phase(config.dispatch_sms), combine: phase(config.combine_sms), ..Tuning::default() })
}

/// Sets a configuration to its defaults: MOE_LAYOUT_BY_TOKEN, worst-case capacity, no scales, throughput mode, one bank, plain sum. `size` is
/// sizeof(MoeEpConfig); `dtype` is that of x.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_ep_config_init(
    config: *mut MoeEpConfig,
    size: usize,
    hidden: usize,
    element_type: i32,
    num_experts: usize,
    k: usize,
    max_tokens: usize,
) -> i32 {
    guard(|| {
        let element = dtype("dtype", element_type)?;
        let defaults = Config::new(hidden, element, num_experts, k, max_tokens);
        let default = MoeEpConfig {
            size,
            hidden,
            num_experts,
            k,
            max_tokens,
            max_rows: 0,
            max_rows_per_expert: 0,
            layout_rows: 1,
            scale_bytes: 0,
            expected_tokens: defaults.expected_tokens,
            in_flight: defaults.in_flight,
            expert_map: std::ptr::null(),
            timeout_ms: defaults.timeout.as_millis() as u64,
            dtype: element_type,
            combine_dtype: if defaults.combine_dtype == element { element_type } else { super::MOE_BF16 },
            layout: MOE_LAYOUT_BY_TOKEN,
            overflow: MOE_OVERFLOW_ERROR,
            quantize: MOE_QUANTIZE_NONE,
            scale_layout: MOE_SCALES_ROW_MAJOR,
            id_space: MOE_IDS_GLOBAL,
            mode: MOE_MODE_THROUGHPUT,
            wire: MOE_WIRE_AS_IS,
            reduce: MOE_COMBINE_AT_RANK,
            weighted: 0,
            fold_weights: 0,
            dispatch_sms: 0,
            combine_sms: 0,
        };
        // SAFETY: the header requires `size` bytes there.
        unsafe { write(config, size, &default) }
    })
}

/// What an object of this configuration needs in a world of `world_size` ranks, on GPUs when `on_gpu` is not 0. `size` is sizeof(MoeEpPlan). Allocates
/// nothing; also the way to check a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_ep_plan(config: *const MoeEpConfig, world_size: usize, on_gpu: i32, plan: *mut MoeEpPlan, size: usize) -> i32 {
    guard(|| {
        // SAFETY: the header's rules for configurations.
        let config = unsafe { config_of(config) }?;
        let p = config.plan(world_size)?;
        let (symmetric_bytes, private_bytes, routing_bytes) = match on_gpu {
            0 => (p.regions.total_bytes, 0, 0),
            _ => {
                let device = config.device_plan(world_size)?;
                (device.symmetric_bytes, device.private_bytes, device.routing_bytes)
            }
        };
        let out = MoeEpPlan {
            size,
            symmetric_bytes,
            private_bytes,
            routing_bytes,
            max_rows: p.max_rows,
            row_bytes: p.row_bytes,
            scale_bytes: p.scale_bytes,
            max_local_experts: p.max_local,
        };
        // SAFETY: the header requires `size` bytes there.
        unsafe { write(plan, size, &out) }
    })
}

/// The memberships of a world whose ranks are threads of this process: rank r works on backends[r], and worlds[r] is then its membership, to be used by a
/// thread of its own. All CPUs or all GPUs; a GPU may be there several times, each time with another stream; one CPU backend for all ranks is fine.
/// `size` is the number of ranks, 1 to 64, and of entries of both arrays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_world_threads(backends: *const *const MoeBackend, worlds: *mut *mut MoeWorld, size: usize) -> i32 {
    guard(|| {
        if backends.is_null() || worlds.is_null() || !(1..=crate::ep::MAX_RANKS).contains(&size) {
            let got = format!("{size} ranks with backends at {backends:p} and worlds at {worlds:p}");
            return Err(Error::invalid(OP, "size", got, format!("1 to {} ranks and two arrays of as many", crate::ep::MAX_RANKS)));
        }
        // SAFETY: not null; the header requires `size` entries, each a live backend or null.
        let backends = unsafe { std::slice::from_raw_parts(backends.cast::<Option<&MoeBackend>>(), size) };
        let backends = backends.iter().map(|b| get(*b).cloned()).collect::<Result<Vec<Backend>>>()?;
        if let Some(other) = backends.iter().find(|b| b.name() != backends[0].name()) {
            return Err(Error::invalid(OP, "backends", format!("{} and {}", backends[0].name(), other.name()), "of one kind"));
        }
        // Ranks on CPUs get a share each.
        let made = match &backends[0] {
            Backend::Cpu(_) => World::threads(&backends[0], size)?,
            Backend::Cuda(_) => World::threads_on(&backends)?,
        };
        for (r, world) in made.into_iter().enumerate() {
            // SAFETY: the header requires `size` entries.
            unsafe { worlds.add(r).write(wrapped(world)) };
        }
        Ok(())
    })
}

/// Joins the world of processes of this machine that the environment describes, as torchrun and `moe run --processes` set it: RANK, WORLD_SIZE, LOCAL_RANK,
/// MASTER_ADDR, MASTER_PORT. `group` tells several worlds of one job apart. Collective: returns when all ranks have joined, or fails on all. Linux only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_world_join(backend: Option<&MoeBackend>, group: *const c_char, world: Option<&mut *mut MoeWorld>) -> i32 {
    guard(|| {
        let backend = get(backend)?;
        let world = required("world", world)?;
        // SAFETY: the header requires a text that ends with a zero.
        let group = unsafe { text("group", group) }?;
        *world = wrapped(join(backend, group)?);
        Ok(())
    })
}

#[cfg(target_os = "linux")]
fn join(backend: &Backend, group: &str) -> Result<World> {
    World::join(backend, &crate::ep::Rendezvous::from_env(group)?)
}

#[cfg(not(target_os = "linux"))]
fn join(_: &Backend, group: &str) -> Result<World> {
    Err(Error::Unsupported { op: OP, what: format!("joining {group}"), why: "worlds of processes need Linux".into() })
}

/// This rank, 0 to the number of ranks - 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_world_rank(world: Option<&MoeWorld>, rank: Option<&mut u32>) -> i32 {
    guard(|| get(world).and_then(|w| required("rank", rank).map(|rank| *rank = w.rank().0)))
}

/// The number of ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_world_size(world: Option<&MoeWorld>, size: Option<&mut u32>) -> i32 {
    guard(|| get(world).and_then(|w| required("size", size).map(|size| *size = w.size() as u32)))
}

/// Waits until every rank is here. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_world_barrier(world: Option<&MoeWorld>) -> i32 {
    guard(|| get(world)?.barrier())
}

/// Destroys a membership. The rank leaves the world when its objects are destroyed too; a peer that then waits for it fails at once. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_world_destroy(world: Option<Box<MoeWorld>>) -> i32 {
    guard(|| drop_handle(world))
}

/// Makes an object: allocates, maps the memory of all ranks, and on GPUs compiles and loads every kernel that its calls need. Collective: every rank calls it with
/// an equal configuration; it fails on all ranks or on none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_ep_create(world: Option<&MoeWorld>, config: *const MoeEpConfig, ep: Option<&mut *mut MoeEp>) -> i32 {
    guard(|| {
        let world = get(world)?;
        let to = required("ep", ep)?;
        // SAFETY: the header's rules for configurations.
        let (config, tuning) = unsafe { (config_of(config)?, tuning_of(config)?) };
        let place = world.backend().place();
        give(Some(to), "ep", EpValue { ep: ExpertParallel::with_tuning(world, config, tuning)?, place })
    })
}

/// Destroys an object. Its arrivals, routings and halves of calls may be destroyed before or after. On a GPU it waits for the object's stream. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_ep_destroy(ep: Option<Box<MoeEp>>) -> i32 {
    guard(|| drop_handle(ep))
}

/// Waits for all that the object has queued, and returns what its calls met that only the GPU knew: MOE_CAPACITY of the last refused call, MOE_MISMATCH, MOE_TIMEOUT,
/// MOE_POISONED. On the CPU there is nothing to wait for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_ep_synchronize(ep: Option<&MoeEp>) -> i32 {
    guard(|| get(ep)?.ep.synchronize())
}

/// Of a GPU rank: calls from now on are queued in `stream`, after what the stream until now holds. The stream is one of the same device and lives as long as the
/// object.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_ep_set_stream(ep: Option<&mut MoeEp>, stream: *mut c_void) -> i32 {
    guard(|| {
        let value = get_mut(ep)?;
        let Place::Device(_) = value.place else {
            return Err(Error::Unsupported { op: OP, what: "a stream".into(), why: "the ranks of this world work on CPUs".into() });
        };
        let device = value.ep.shared.cuda().map(|end| end.stream().device().clone());
        let device = device.ok_or_else(|| Error::invalid(OP, "ep", "without a GPU", "one of a GPU rank"))?;
        // SAFETY: the header requires a stream that outlives the object; the driver checks that it is of this device.
        let stream = unsafe { Stream::external(&device, stream) }?;
        value.ep.set_stream(&stream)
    })
}

/// The number of experts of this rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_ep_num_local_experts(ep: Option<&MoeEp>, num: Option<&mut usize>) -> i32 {
    guard(|| get(ep).and_then(|value| required("num", num).map(|num| *num = value.ep.num_local_experts())))
}
