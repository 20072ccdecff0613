//! Routings, arrivals, dispatch and combine.

use std::ffi::c_void;

use super::ep::EpValue;
use super::handle::{Handle, OP, Tagged, drop_handle, get, get_mut, give, handle, required, take, wrapped};
use super::tensor::{Growing, MoeTensor, Place, optional, optional_output, output, read, views};
use super::{MoeEp, guard};
use crate::error::{Error, Rejected, Result};
use crate::ops::{combine, dispatch};
use crate::tensor::{DeviceAddress, TensorView};

/// Where the tokens of a call went: kept for combine and for replays, and filled by the next dispatch that is given it.
pub struct MoeRouting(Tagged<dispatch::Routing>);

handle!(MoeRouting, dispatch::Routing, 4);

/// The rows that a rank received: the lease of a bank. Destroyed by combine, or by `moe_arrival_destroy`.
pub struct MoeArrival(Tagged<dispatch::Arrival>);

handle!(MoeArrival, dispatch::Arrival, 5);

/// A dispatch between its two halves.
pub struct MoeDispatchSent(Tagged<dispatch::Sent>);

handle!(MoeDispatchSent, dispatch::Sent, 6);

/// A combine between its two halves.
pub struct MoeCombineSent(Tagged<combine::Sent>);

handle!(MoeCombineSent, combine::Sent, 7);

/// What one rank sends.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MoeDispatchInput {
    /// sizeof(MoeDispatchInput): later versions may add members at the end, for which 0 is the default.
    pub size: usize,
    /// [T, hidden] of the configuration's type; rows are 16-byte aligned and multiples of 16 bytes apart.
    pub x: *const MoeTensor,
    /// i32 or i64 [T, K]: global expert ids. Negative and out-of-range ids are masked; of equal ids in a row the first counts.
    pub topk_idx: *const MoeTensor,
    /// f32 [T, K], or null: weights of 1.
    pub topk_weights: *const MoeTensor,
    /// Bytes [T, scale_bytes] when the configuration has them, otherwise null.
    pub scales: *const MoeTensor,
    /// The number of tokens as u32 [1] in memory of the GPU, read by the kernels, or null. A captured graph then serves changing numbers.
    pub device_num_tokens: *const MoeTensor,
    /// The number of tokens, at most the rows of x; negative: all rows. Not looked at when `device_num_tokens` is given.
    pub num_tokens: i64,
}

// SAFETY: integers and pointers; zeros are a value of each.
unsafe impl Growing for MoeDispatchInput {
    const NAME: &'static str = "MoeDispatchInput";
}

/// What a dispatch reports beside the arrival. All members may be null.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MoeDispatchOutputs {
    /// sizeof(MoeDispatchOutputs): later versions may add members at the end, for which 0 is the default.
    pub size: usize,
    /// Running statistics, i64 [local experts] in the memory of the backend: the rows of each local expert are added.
    pub expert_statistics: *const MoeTensor,
    /// Receives the rows of each local expert, u32 [local experts] in host memory. On a GPU in the order of the stream, and the memory is page-locked, as that of
    /// cuMemHostAlloc.
    pub counts_host: *const MoeTensor,
}

// SAFETY: an integer and pointers; zeros are a value of each.
unsafe impl Growing for MoeDispatchOutputs {
    const NAME: &'static str = "MoeDispatchOutputs";
}

/// What one rank brings back.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MoeCombineInput {
    /// sizeof(MoeCombineInput): later versions may add members at the end, for which 0 is the default.
    pub size: usize,
    /// The experts' rows [rows, hidden] of the combine type, or null: they are in MOE_ARRIVAL_EXPERT_OUTPUT, and nothing is copied.
    pub y: *const MoeTensor,
    /// With fold_weights: f32 [rows, row_k], a value per route of each received row. Otherwise null.
    pub row_weights: *const MoeTensor,
}

// SAFETY: an integer and pointers; zeros are a value of each.
unsafe impl Growing for MoeCombineInput {
    const NAME: &'static str = "MoeCombineInput";
}

/// What one rank gets.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MoeCombineOutput {
    /// sizeof(MoeCombineOutput): later versions may add members at the end, for which 0 is the default.
    pub size: usize,
    /// [T, hidden] of the combine type, written; rows from T on are untouched.
    pub out: *const MoeTensor,
    /// [T, hidden] of the combine type or f32, added last, or null.
    pub add_to: *const MoeTensor,
    /// With fold_weights: f32 [T, K], written; 0 where a route was masked or dropped. Otherwise null.
    pub topk_weights: *const MoeTensor,
}

// SAFETY: an integer and pointers; zeros are a value of each.
unsafe impl Growing for MoeCombineOutput {
    const NAME: &'static str = "MoeCombineOutput";
}

/// Valid rows, u32 [1]; MOE_LAYOUT_BY_EXPERT: padding included.
pub const MOE_ARRIVAL_NUM_ROWS: i32 = 0;
/// Rows of each local expert, u32 [local experts].
pub const MOE_ARRIVAL_NUM_ROWS_PER_EXPERT: i32 = 1;
/// Expert layouts: first slot of each segment and, last, the end, u32 [local experts + 1]; otherwise empty.
pub const MOE_ARRIVAL_SEGMENT_START: i32 = 2;
/// The rows, [max_rows, hidden], or [local experts, layout_rows, hidden].
pub const MOE_ARRIVAL_X: i32 = 3;
/// Source rank and token of each row, i32 [max_rows, 2], strided; -1 and -1 for padding.
pub const MOE_ARRIVAL_SOURCE: i32 = 4;
/// Expert ids of each row, i32 [max_rows, row_k], strided; -1 where masked. row_k is K by token, otherwise 1.
pub const MOE_ARRIVAL_TOPK_IDX: i32 = 5;
/// Router weights of each row, f32 [max_rows, row_k], strided; 0 where masked.
pub const MOE_ARRIVAL_TOPK_WEIGHTS: i32 = 6;
/// Scales of each row, as the configuration arranges them.
pub const MOE_ARRIVAL_SCALES: i32 = 7;
/// Where experts may write their rows, [max_rows, hidden] of the combine type: the only view that the caller may write.
pub const MOE_ARRIVAL_EXPERT_OUTPUT: i32 = 8;

/// Bytes of one routing of this object.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_routing_bytes(ep: Option<&MoeEp>, bytes: Option<&mut usize>) -> i32 {
    guard(|| get(ep).and_then(|value| required("bytes", bytes).map(|bytes| *bytes = dispatch::Routing::bytes(&value.ep))))
}

/// Makes a routing for calls of this object.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_routing_create(ep: Option<&MoeEp>, routing: Option<&mut *mut MoeRouting>) -> i32 {
    guard(|| {
        let (value, to) = (get(ep)?, required("routing", routing)?);
        give(Some(to), "routing", dispatch::Routing::new(&value.ep)?)
    })
}

/// As `moe_routing_create`, in memory of the caller on the object's GPU: `moe_routing_bytes` of it, aligned to 256, the routing's alone until it is destroyed and the
/// object's stream has done what was queued.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_routing_create_in(
    ep: Option<&MoeEp>,
    memory: *mut c_void,
    bytes: usize,
    routing: Option<&mut *mut MoeRouting>,
) -> i32 {
    guard(|| {
        let (value, to) = (get(ep)?, required("routing", routing)?);
        let need = dispatch::Routing::bytes(&value.ep);
        if memory.is_null() || bytes < need {
            return Err(Error::invalid(OP, "memory", format!("{bytes} bytes at {memory:p}"), format!("{need} bytes")));
        }
        let device = if let Place::Device(device) = value.place { device } else { 0 };
        let address = DeviceAddress { device, address: memory.addr() as u64 };
        // SAFETY: as many bytes as are needed, which the header requires to be the routing's alone.
        give(Some(to), "routing", unsafe { dispatch::Routing::in_memory(&value.ep, address) }?)
    })
}

/// Tokens of the call that filled the routing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_routing_num_tokens(routing: Option<&MoeRouting>, num: Option<&mut usize>) -> i32 {
    guard(|| get(routing).and_then(|routing| required("num", num).map(|num| *num = routing.num_tokens())))
}

/// Rows of this rank's tokens that receivers dropped. On a GPU it waits for the object's stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_routing_num_dropped(ep: Option<&MoeEp>, routing: Option<&MoeRouting>, num: Option<&mut usize>) -> i32 {
    guard(|| {
        *required("num", num)? = get(routing)?.num_dropped(&get(ep)?.ep)?;
        Ok(())
    })
}

/// Destroys a routing. On a GPU it waits for the object's stream. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_routing_destroy(routing: Option<Box<MoeRouting>>) -> i32 {
    guard(|| drop_handle(routing))
}

/// # Safety
/// As the header requires of the input and of the tensors that it names.
unsafe fn input_of<'a>(value: &EpValue, input: *const MoeDispatchInput) -> Result<dispatch::Input<'a>> {
    let place = value.place;
    // SAFETY: the caller's promise.
    let input = unsafe { read(input) }?;
    // SAFETY: null or a tensor: the caller's promise.
    let [x, topk_idx] = unsafe { views(place, [("x", input.x.as_ref()), ("topk_idx", input.topk_idx.as_ref())]) }?;
    // SAFETY: as above.
    let topk_weights = unsafe { optional(place, "topk_weights", input.topk_weights.as_ref()) }?;
    // SAFETY: as above.
    let scales = unsafe { optional(place, "scales", input.scales.as_ref()) }?;
    // SAFETY: as above.
    let on_device = unsafe { optional(place, "device_num_tokens", input.device_num_tokens.as_ref()) }?;
    let num_tokens = match (on_device, usize::try_from(input.num_tokens)) {
        (Some(num), _) => dispatch::NumTokens::Device(num),
        (None, Ok(num)) => dispatch::NumTokens::Host(num),
        (None, Err(_)) => dispatch::NumTokens::All,
    };
    Ok(dispatch::Input { x, topk_idx, topk_weights, scales, num_tokens })
}

/// # Safety
/// As the header requires of the outputs and of the tensors that they name.
unsafe fn outputs_of<'a>(value: &EpValue, outputs: *const MoeDispatchOutputs) -> Result<dispatch::Outputs<'a>> {
    if outputs.is_null() {
        return Ok(dispatch::Outputs::default());
    }
    // SAFETY: not null; the caller's promise.
    let outputs = unsafe { read(outputs) }?;
    Ok(dispatch::Outputs {
        // SAFETY: null or a tensor: the caller's promise.
        expert_statistics: unsafe { optional_output(value.place, "expert_statistics", outputs.expert_statistics.as_ref()) }?,
        // SAFETY: as above.
        counts_host: unsafe { optional_output(Place::Host, "counts_host", outputs.counts_host.as_ref()) }?,
    })
}

/// Sends this rank's tokens to the ranks of their experts and receives those of all ranks, in the order (source rank, token). Collective.
///
/// On the CPU the rows are there when it returns. On a GPU it returns when its kernels are queued; what only they find out (MOE_CAPACITY, MOE_MISMATCH, MOE_TIMEOUT,
/// MOE_POISONED) the next call on the object returns, or `moe_ep_synchronize`.
/// `*arrival` holds a bank of the object until combine takes it or it is destroyed; a dispatch that finds its bank held returns MOE_BUSY.
/// `outputs` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_dispatch(
    ep: Option<&mut MoeEp>,
    routing: Option<&mut MoeRouting>,
    input: *const MoeDispatchInput,
    outputs: *const MoeDispatchOutputs,
    arrival: Option<&mut *mut MoeArrival>,
) -> i32 {
    guard(|| {
        let (value, routing, to) = (get_mut(ep)?, get_mut(routing)?, required("arrival", arrival)?);
        // SAFETY: the header's rules for inputs.
        let input = unsafe { input_of(value, input) }?;
        // SAFETY: the header's rules for outputs.
        let outputs = unsafe { outputs_of(value, outputs) }?;
        give(Some(to), "arrival", value.ep.dispatch(routing, &input, outputs)?)
    })
}

/// The first half of `moe_dispatch`: counts and rows leave, nothing waits for rows. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_dispatch_send(
    ep: Option<&mut MoeEp>,
    routing: Option<&mut MoeRouting>,
    input: *const MoeDispatchInput,
    sent: Option<&mut *mut MoeDispatchSent>,
) -> i32 {
    guard(|| {
        let (value, routing, to) = (get_mut(ep)?, get_mut(routing)?, required("sent", sent)?);
        // SAFETY: the header's rules for inputs.
        let input = unsafe { input_of(value, input) }?;
        give(Some(to), "sent", value.ep.dispatch_send(routing, &input)?)
    })
}

/// The second half of `moe_dispatch`. `*sent` is gone and null afterwards, unless the call refused its arguments. `outputs` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_dispatch_receive(
    ep: Option<&mut MoeEp>,
    routing: Option<&mut MoeRouting>,
    sent: Option<&mut *mut MoeDispatchSent>,
    outputs: *const MoeDispatchOutputs,
    arrival: Option<&mut *mut MoeArrival>,
) -> i32 {
    guard(|| {
        let (value, routing, to) = (get_mut(ep)?, get_mut(routing)?, required("arrival", arrival)?);
        // SAFETY: the header's rules for outputs.
        let outputs = unsafe { outputs_of(value, outputs) }?;
        // SAFETY: the header requires a live handle or null there.
        let received = unsafe { consume(sent, |sent| value.ep.dispatch_receive(routing, sent, outputs)) }?;
        give(Some(to), "arrival", received)
    })
}

/// The same routing with new rows: x [T, hidden], and scales when the configuration has them, otherwise null. Collective; otherwise as `moe_dispatch`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_replay(
    ep: Option<&mut MoeEp>,
    routing: Option<&MoeRouting>,
    x: Option<&MoeTensor>,
    scales: Option<&MoeTensor>,
    arrival: Option<&mut *mut MoeArrival>,
) -> i32 {
    guard(|| {
        let (value, routing, to) = (get_mut(ep)?, get(routing)?, required("arrival", arrival)?);
        // SAFETY: the header's rules for tensors.
        let [x] = unsafe { views(value.place, [("x", x)]) }?;
        // SAFETY: as above.
        let scales = unsafe { optional(value.place, "scales", scales) }?;
        give(Some(to), "arrival", value.ep.replay(routing, &dispatch::Payload { x, scales })?)
    })
}

/// The first half of `moe_replay`: counts and rows leave, nothing waits for rows. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_replay_send(
    ep: Option<&mut MoeEp>,
    routing: Option<&MoeRouting>,
    x: Option<&MoeTensor>,
    scales: Option<&MoeTensor>,
    sent: Option<&mut *mut MoeDispatchSent>,
) -> i32 {
    guard(|| {
        let (value, routing, to) = (get_mut(ep)?, get(routing)?, required("sent", sent)?);
        // SAFETY: the header's rules for tensors.
        let [x] = unsafe { views(value.place, [("x", x)]) }?;
        // SAFETY: as above.
        let scales = unsafe { optional(value.place, "scales", scales) }?;
        give(Some(to), "sent", value.ep.replay_send(routing, &dispatch::Payload { x, scales })?)
    })
}

/// The second half of `moe_replay`. `*sent` is gone and null afterwards, unless the call refused its arguments.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_replay_receive(
    ep: Option<&mut MoeEp>,
    routing: Option<&MoeRouting>,
    sent: Option<&mut *mut MoeDispatchSent>,
    arrival: Option<&mut *mut MoeArrival>,
) -> i32 {
    guard(|| {
        let (value, routing, to) = (get_mut(ep)?, get(routing)?, required("arrival", arrival)?);
        // SAFETY: the header requires a live handle or null there.
        let received = unsafe { consume(sent, |sent| value.ep.replay_receive(routing, sent)) }?;
        give(Some(to), "arrival", received)
    })
}

/// MOE_LAYOUT_BY_TOKEN, for GEMMs that gather: `gather_idx` (i32 [n], written) gets the rows of each local expert, ascending, each segment padded with -1 to a
/// multiple of `align`; `segment_start` (u32 [local experts + 1], written) where they begin and, last, the end. What is behind the end stays.
///
/// n is at least the end; on a GPU, whose host does not know the counts: max_rows * min(K, local experts) + local experts * (align - 1).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_arrival_gather_idx(
    arrival: Option<&MoeArrival>,
    align: usize,
    gather_idx: Option<&MoeTensor>,
    segment_start: Option<&MoeTensor>,
) -> i32 {
    guard(|| {
        let arrival = get(arrival)?;
        let place = place_of(arrival);
        // SAFETY: the header's rules for tensors.
        let gather_idx = unsafe { output(place, "gather_idx", gather_idx) }?;
        // SAFETY: as above.
        let segment_start = unsafe { output(place, "segment_start", segment_start) }?;
        arrival.gather_idx(align, gather_idx, segment_start)
    })
}

/// Unpacks what the views of an arrival show strided: source i32 [rows, 2], topk_idx i32 [rows, row_k], topk_weights f32 [rows, row_k], written. `rows` is at
/// least the number of valid rows; on a GPU max_rows. What is behind the valid rows stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_arrival_contiguous_metadata(
    arrival: Option<&MoeArrival>,
    source: Option<&MoeTensor>,
    topk_idx: Option<&MoeTensor>,
    topk_weights: Option<&MoeTensor>,
) -> i32 {
    guard(|| {
        let arrival = get(arrival)?;
        let place = place_of(arrival);
        // SAFETY: the header's rules for tensors.
        let source = unsafe { output(place, "source", source) }?;
        // SAFETY: as above.
        let topk_idx = unsafe { output(place, "topk_idx", topk_idx) }?;
        // SAFETY: as above.
        let topk_weights = unsafe { output(place, "topk_weights", topk_weights) }?;
        arrival.contiguous_metadata(source, topk_idx, topk_weights)
    })
}

/// Where the tensors of an arrival are.
fn place_of(arrival: &dispatch::Arrival) -> Place {
    arrival.num_rows().device().map_or(Place::Host, |at| Place::Device(at.device))
}

/// A view of an arrival, one of MOE_ARRIVAL_*, in the memory of the backend. It is valid until the arrival is gone; on a GPU what it shows is there when the stream has
/// come to it. MOE_UNSUPPORTED for scales of a configuration without them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_arrival_view(arrival: Option<&mut MoeArrival>, which: i32, view: Option<&mut MoeTensor>) -> i32 {
    guard(|| {
        let (arrival, to) = (get_mut(arrival)?, required("view", view)?);
        if which == MOE_ARRIVAL_EXPERT_OUTPUT {
            let mut output = arrival.expert_output();
            let layout = *output.layout();
            let data = match output.device() {
                Some(address) => std::ptr::without_provenance_mut(address.address as usize),
                None => output.host_mut(OP, "view")?.as_mut_ptr().cast(),
            };
            *to = MoeTensor::of(data, &layout);
            return Ok(());
        }
        let view: TensorView<'_> = match which {
            MOE_ARRIVAL_NUM_ROWS => arrival.num_rows(),
            MOE_ARRIVAL_NUM_ROWS_PER_EXPERT => arrival.num_rows_per_expert()?,
            MOE_ARRIVAL_SEGMENT_START => arrival.segment_start(),
            MOE_ARRIVAL_X => arrival.x(),
            MOE_ARRIVAL_SOURCE => arrival.source(),
            MOE_ARRIVAL_TOPK_IDX => arrival.topk_idx(),
            MOE_ARRIVAL_TOPK_WEIGHTS => arrival.topk_weights(),
            MOE_ARRIVAL_SCALES => arrival.scales().ok_or_else(|| Error::Unsupported {
                op: OP,
                what: "MOE_ARRIVAL_SCALES".into(),
                why: "rows of this configuration have no scales".into(),
            })?,
            other => return Err(Error::invalid(OP, "which", other, format!("0 to {MOE_ARRIVAL_EXPERT_OUTPUT}"))),
        };
        *to = MoeTensor::of_view(&view)?;
        Ok(())
    })
}

/// The number of valid rows, as a number. On a GPU it waits for the object's stream, and returns what the calls so far met.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_arrival_num_rows(ep: Option<&MoeEp>, arrival: Option<&MoeArrival>, num: Option<&mut usize>) -> i32 {
    guard(|| {
        let (value, arrival, num) = (get(ep)?, get(arrival)?, required("num", num)?);
        value.ep.synchronize()?;
        let view = arrival.num_rows();
        let bytes = match value.ep.shared.cuda() {
            Some(end) => end.stream().read(&view)?,
            None => view.host(OP, "num_rows")?.to_vec(),
        };
        *num = bytemuck::pod_read_unaligned::<u32>(&bytes) as usize;
        Ok(())
    })
}

/// Gives an arrival's bank back without a combine. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_arrival_destroy(arrival: Option<Box<MoeArrival>>) -> i32 {
    guard(|| drop_handle(arrival))
}

/// Gives up a dispatch between its halves; its rows are lost. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_dispatch_sent_destroy(sent: Option<Box<MoeDispatchSent>>) -> i32 {
    guard(|| drop_handle(sent))
}

/// Gives up a combine between its halves. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_combine_sent_destroy(sent: Option<Box<MoeCombineSent>>) -> i32 {
    guard(|| drop_handle(sent))
}

/// # Safety
/// As the header requires of the input and of the tensors that it names.
unsafe fn combine_input<'a>(place: Place, input: *const MoeCombineInput) -> Result<combine::Input<'a>> {
    // SAFETY: the caller's promise.
    let input = unsafe { read(input) }?;
    // SAFETY: null or a tensor: the caller's promise.
    let y = unsafe { optional(place, "y", input.y.as_ref()) }?;
    // SAFETY: as above.
    let row_weights = unsafe { optional(place, "row_weights", input.row_weights.as_ref()) }?;
    Ok(combine::Input { y: y.map_or(combine::ExpertRows::InPlace, combine::ExpertRows::Staged), row_weights })
}

/// # Safety
/// As the header requires of the output and of the tensors that it names.
unsafe fn combine_output<'a>(place: Place, to: *const MoeCombineOutput) -> Result<combine::Output<'a>> {
    // SAFETY: the caller's promise.
    let to = unsafe { read(to) }?;
    // SAFETY: null or a tensor: the caller's promise.
    let out = unsafe { output(place, "out", to.out.as_ref()) }?;
    // SAFETY: as above.
    let add_to = unsafe { optional(place, "add_to", to.add_to.as_ref()) }?;
    // SAFETY: as above.
    let topk_weights = unsafe { optional_output(place, "topk_weights", to.topk_weights.as_ref()) }?;
    Ok(combine::Output { out, add_to, topk_weights })
}

/// Brings the experts' rows back and sums them: out[t] = round(sum over ranks, ascending, of y + add_to[t]), in f32. Collective.
///
/// `*arrival` is gone and null afterwards, unless the call refused its arguments (MOE_INVALID): then nothing was sent and it can be used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_combine(
    ep: Option<&mut MoeEp>,
    routing: Option<&MoeRouting>,
    arrival: Option<&mut *mut MoeArrival>,
    input: *const MoeCombineInput,
    output: *const MoeCombineOutput,
) -> i32 {
    guard(|| {
        let (value, routing) = (get_mut(ep)?, get(routing)?);
        // SAFETY: the header's rules for inputs.
        let input = unsafe { combine_input(value.place, input) }?;
        // SAFETY: the header's rules for outputs.
        let output = unsafe { combine_output(value.place, output) }?;
        // SAFETY: the header requires a live handle or null there.
        unsafe { consume(arrival, |arrival| value.ep.combine(routing, arrival, &input, output)) }
    })
}

/// The first half of `moe_combine`: this rank's rows are complete and may be read. `*arrival` as there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_combine_send(
    ep: Option<&mut MoeEp>,
    routing: Option<&MoeRouting>,
    arrival: Option<&mut *mut MoeArrival>,
    input: *const MoeCombineInput,
    sent: Option<&mut *mut MoeCombineSent>,
) -> i32 {
    guard(|| {
        let (value, routing, to) = (get_mut(ep)?, get(routing)?, required("sent", sent)?);
        // SAFETY: the header's rules for inputs.
        let input = unsafe { combine_input(value.place, input) }?;
        // SAFETY: the header requires a live handle or null there.
        let made = unsafe { consume(arrival, |arrival| value.ep.combine_send(routing, arrival, &input)) }?;
        give(Some(to), "sent", made)
    })
}

/// The second half of `moe_combine`. `*sent` is gone and null afterwards, unless the call refused its arguments.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn moe_combine_receive(
    ep: Option<&mut MoeEp>,
    routing: Option<&MoeRouting>,
    sent: Option<&mut *mut MoeCombineSent>,
    output: *const MoeCombineOutput,
) -> i32 {
    guard(|| {
        let (value, routing) = (get_mut(ep)?, get(routing)?);
        // SAFETY: the header's rules for outputs.
        let output = unsafe { combine_output(value.place, output) }?;
        // SAFETY: the header requires a live handle or null there.
        unsafe { consume(sent, |sent| value.ep.combine_receive(routing, sent, output)) }
    })
}

/// Gives what a handle holds to `call`, and what it returns back to the handle.
///
/// # Safety
/// `*handle` is null or a live handle that this library made.
unsafe fn consume<H: Handle, R>(handle: Option<&mut *mut H>, call: impl FnOnce(H::Value) -> Result<R, Rejected<H::Value>>) -> Result<R> {
    let handle = required(H::NAME, handle)?;
    if handle.is_null() {
        return Err(Error::invalid(OP, H::NAME, "null", "a handle"));
    }
    // SAFETY: not null; the caller's promise.
    let value = take(unsafe { Box::from_raw(*handle) })?;
    *handle = std::ptr::null_mut();
    call(value).map_err(|rejected| {
        if let Some(value) = rejected.returned {
            *handle = wrapped(value);
        }
        rejected.error
    })
}
