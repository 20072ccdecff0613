/* moe-kernels: the data path of Mixture-of-Experts layers. Made from src/capi by a test: change it there.
 *
 * Rules for all functions
 *
 * Errors     Every function that can fail returns MOE_OK (0) or another MOE_* status; moe_last_error() has the message of the calling thread. Unless
 *            the text of a function says otherwise, nothing was written and nothing was consumed when it fails.
 * Handles    MoeBackend, MoeWorld, MoeEp, MoeRouting, MoeArrival, MoeDispatchSent, MoeCombineSent belong to the library; the caller owns what a function
 *            stores through a pointer to a handle, and destroys it once with the function of its kind. Set the pointer to NULL first. Destroyed handles
 *            may not be used. A handle is used by one thread at a time; different handles, of one world too, by different threads at once.
 * Pointers   May not be null unless the text says so. Structs and arrays are read during the call only. No two outputs of a call overlap, and no output
 *            overlaps an input.
 * Tensors    Are memory of the caller. The library never frees or keeps it. See MoeTensor.
 * Structs    With a `size` member are made by zeroing, setting `size`, and setting members; later versions of the library take the older, shorter ones.
 * Units      Shapes and strides are in elements; sizes named bytes in bytes; times in the unit of their name. T is tokens of a rank, K routes of a token.
 * Collective A call that all ranks of a world make, in the same order. It waits for peers, at most the configuration's bound.
 * GPU        Calls on a GPU are queued in a stream and return. They allocate nothing and can be captured in a graph; exceptions are said.
 * Bytes      Results have the same bytes on every backend, whatever the mode, geometry or run.
 */

#ifndef MOE_KERNELS_H
#define MOE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

// Nothing is wrong.
#define MOE_OK 0

// An argument is not acceptable; the message names it, what it was and what would have been accepted. Nothing was written.
#define MOE_INVALID 1

// Meaningful, but this build, backend or device cannot do it.
#define MOE_UNSUPPORTED 2

// A run-time library (the GPU's driver or compiler) was not found.
#define MOE_LIBRARY 3

// A function of the GPU's driver failed.
#define MOE_GPU 4

// A kernel could not be compiled.
#define MOE_COMPILE 5

// More memory is needed than is free.
#define MOE_MEMORY 6

// More tokens or rows than buffers hold. Every rank gets this, no rank wrote payload, the world stays usable.
#define MOE_CAPACITY 7

// Two ranks differ in configuration or made different calls.
#define MOE_MISMATCH 8

// A collective setup failed on one rank; every rank gets this.
#define MOE_SETUP 9

// The object, or the bank that the call would take, is in use.
#define MOE_BUSY 10

// A peer did not come within the bound. The world is poisoned until it is rebuilt.
#define MOE_TIMEOUT 11

// Another rank failed first; every rank reports the same first cause until the world is rebuilt.
#define MOE_POISONED 12

// A system call failed.
#define MOE_IO 13

// A file does not have the format that it should have.
#define MOE_FORMAT 14

// A defect of the library. What the call had been given is in no defined state.
#define MOE_PANIC 15

// Valid rows, u32 [1]; MOE_LAYOUT_BY_EXPERT: padding included.
#define MOE_ARRIVAL_NUM_ROWS 0

// Rows of each local expert, u32 [local experts].
#define MOE_ARRIVAL_NUM_ROWS_PER_EXPERT 1

// Expert layouts: first slot of each segment and, last, the end, u32 [local experts + 1]; otherwise empty.
#define MOE_ARRIVAL_SEGMENT_START 2

// The rows, [max_rows, hidden], or [local experts, layout_rows, hidden].
#define MOE_ARRIVAL_X 3

// Source rank and token of each row, i32 [max_rows, 2], strided; -1 and -1 for padding.
#define MOE_ARRIVAL_SOURCE 4

// Expert ids of each row, i32 [max_rows, row_k], strided; -1 where masked. row_k is K by token, otherwise 1.
#define MOE_ARRIVAL_TOPK_IDX 5

// Router weights of each row, f32 [max_rows, row_k], strided; 0 where masked.
#define MOE_ARRIVAL_TOPK_WEIGHTS 6

// Scales of each row, as the configuration arranges them.
#define MOE_ARRIVAL_SCALES 7

// Where experts may write their rows, [max_rows, hidden] of the combine type: the only view that the caller may write.
#define MOE_ARRIVAL_EXPERT_OUTPUT 8

// `scale` is given; absent it is 1. Outputs of any type.
#define MOE_SCALING_GIVEN 0

// The scale follows from the matrix itself: the largest number of the output's type / max(amax, epsilon). Outputs of FP8.
#define MOE_SCALING_CURRENT 1

// The offsets were good.
#define MOE_CAST_GOOD 0

// The offsets do not start with 0, decrease, or end behind x.
#define MOE_CAST_BAD_OFFSETS 1

// An output is too short for the matrices with their padding.
#define MOE_CAST_SHORT_OUTPUTS 2

// One row per (token, rank), ordered by (source rank, token).
#define MOE_LAYOUT_BY_TOKEN 0

// One row per (token, local expert), grouped by expert, segments padded to multiples of `layout_rows`.
#define MOE_LAYOUT_BY_EXPERT 1

// [local experts, layout_rows, hidden] and counts.
#define MOE_LAYOUT_BY_EXPERT_FIXED 2

// More rows than fit: MOE_CAPACITY on every rank, nothing written.
#define MOE_OVERFLOW_ERROR 0

// More rows than fit: the last are dropped, counted, and add nothing in combine.
#define MOE_OVERFLOW_DROP 1

// Rows travel as they are.
#define MOE_QUANTIZE_NONE 0

// e4m3 with one f32 scale per 128 elements.
#define MOE_QUANTIZE_F32 1

// e4m3 with one E8M0 scale per 128 elements.
#define MOE_QUANTIZE_POWER_OF_TWO 2

// [rows, S] bytes, strided.
#define MOE_SCALES_ROW_MAJOR 0

// [ceil(S / 4), aligned rows] words.
#define MOE_SCALES_COLUMN_MAJOR 1

// The same, four E8M0 bytes of a row in one word.
#define MOE_SCALES_PACKED_E8M0 2

// Expert ids in arrivals are global.
#define MOE_IDS_GLOBAL 0

// Expert ids in arrivals are those of the receiving rank, -1 for others.
#define MOE_IDS_LOCAL 1

// Counts first, then rows straight into place.
#define MOE_MODE_THROUGHPUT 0

// The first rows travel with the counts, when `expected_tokens` says that they are few. The bytes are the same.
#define MOE_MODE_LOW_LATENCY 1

// Rows travel back as the experts wrote them.
#define MOE_WIRE_AS_IS 0

// Rows travel back as e4m3 without scales.
#define MOE_WIRE_FP8_DIRECT 1

// Rows travel back as e4m3 with an f32 scale per 128 elements.
#define MOE_WIRE_FP8_BLOCK 2

// Expert layouts: each rank sums a token's rows in f32, and rounds once.
#define MOE_COMBINE_AT_RANK 0

// The same; the sum travels as f32.
#define MOE_COMBINE_AT_RANK_F32 1

// Every expert row travels; the result does not depend on the number of ranks.
#define MOE_COMBINE_AT_SOURCE 2

// 1 / (1 + exp(-logit)).
#define MOE_ACTIVATION_SIGMOID 0

// The logit itself.
#define MOE_ACTIVATION_LINEAR 1

// f32 until the store: one rounding.
#define MOE_ROUNDING_FUSED 0

// After each step, as a framework that runs each as an operation of its own in the type of the activations.
#define MOE_ROUNDING_FRAMEWORK 1

// IEEE binary32.
#define MOE_F32 0

// IEEE binary16.
#define MOE_F16 1

// bfloat16: the upper half of binary32.
#define MOE_BF16 2

// OCP FP8 E4M3: largest 448, no infinity.
#define MOE_E4M3 3

// OCP FP8 E5M2: largest 57344.
#define MOE_E5M2 4

// FNUZ E4M3: largest 240, one NaN.
#define MOE_E4M3FNUZ 5

// FNUZ E5M2: largest 57344, one NaN.
#define MOE_E5M2FNUZ 6

// OCP E8M0 scale: 2^(bits - 127).
#define MOE_E8M0 7

// Bytes that are moved and never read as numbers.
#define MOE_BYTES 8

// 32-bit signed integer.
#define MOE_I32 9

// 64-bit signed integer.
#define MOE_I64 10

// 32-bit unsigned integer.
#define MOE_U32 11

// Most dimensions of a tensor.
#define MOE_MAX_DIMS 4

// The rows that a rank received: the lease of a bank. Destroyed by combine, or by `moe_arrival_destroy`.
typedef struct MoeArrival MoeArrival;

// Where operations run: the CPU, or a GPU with the stream in which they are queued. Any number of threads may use one at a time.
typedef struct MoeBackend MoeBackend;

// A combine between its two halves.
typedef struct MoeCombineSent MoeCombineSent;

// A dispatch between its two halves.
typedef struct MoeDispatchSent MoeDispatchSent;

// One rank's end of the buffers through which tokens travel to experts and back. Used by one thread at a time.
typedef struct MoeEp MoeEp;

// Where the tokens of a call went: kept for combine and for replays, and filled by the next dispatch that is given it.
typedef struct MoeRouting MoeRouting;

// One rank's membership of a world of ranks. Used by one thread at a time; every rank makes its collective calls in the same order.
typedef struct MoeWorld MoeWorld;

// A tensor in memory of the caller: host memory for calls on the CPU, memory of the backend's GPU for calls on it. This struct never changes.
//
// The memory must stay valid until the call returns; on a GPU until the stream has done what the call queued.
typedef struct MoeTensor {
  // First element. Aligned to the element size; rows that travel between ranks to 16. May be null when the tensor is empty.
  void *data;
  // One of MOE_F32 .. MOE_U32.
  int32_t dtype;
  // Dimensions that are used, at most MOE_MAX_DIMS.
  int32_t num_dims;
  // Extents, in elements.
  size_t shape[MOE_MAX_DIMS];
  // Distances between neighbours, in elements; the last one that is used is 1. All of them 0: contiguous, row after row.
  size_t strides[MOE_MAX_DIMS];
} MoeTensor;

// What one rank sends.
typedef struct MoeDispatchInput {
  // sizeof(MoeDispatchInput): later versions may add members at the end, for which 0 is the default.
  size_t size;
  // [T, hidden] of the configuration's type; rows are 16-byte aligned and multiples of 16 bytes apart.
  const struct MoeTensor *x;
  // i32 or i64 [T, K]: global expert ids. Negative and out-of-range ids are masked; of equal ids in a row the first counts.
  const struct MoeTensor *topk_idx;
  // f32 [T, K], or null: weights of 1.
  const struct MoeTensor *topk_weights;
  // Bytes [T, scale_bytes] when the configuration has them, otherwise null.
  const struct MoeTensor *scales;
  // The number of tokens as u32 [1] in memory of the GPU, read by the kernels, or null. A captured graph then serves changing numbers.
  const struct MoeTensor *device_num_tokens;
  // The number of tokens, at most the rows of x; negative: all rows. Not looked at when `device_num_tokens` is given.
  int64_t num_tokens;
} MoeDispatchInput;

// What a dispatch reports beside the arrival. All members may be null.
typedef struct MoeDispatchOutputs {
  // sizeof(MoeDispatchOutputs): later versions may add members at the end, for which 0 is the default.
  size_t size;
  // Running statistics, i64 [local experts] in the memory of the backend: the rows of each local expert are added.
  const struct MoeTensor *expert_statistics;
  // Receives the rows of each local expert, u32 [local experts] in host memory. On a GPU in the order of the stream, and the memory is page-locked, as that of
  // cuMemHostAlloc.
  const struct MoeTensor *counts_host;
} MoeDispatchOutputs;

// What one rank brings back.
typedef struct MoeCombineInput {
  // sizeof(MoeCombineInput): later versions may add members at the end, for which 0 is the default.
  size_t size;
  // The experts' rows [rows, hidden] of the combine type, or null: they are in MOE_ARRIVAL_EXPERT_OUTPUT, and nothing is copied.
  const struct MoeTensor *y;
  // With fold_weights: f32 [rows, row_k], a value per route of each received row. Otherwise null.
  const struct MoeTensor *row_weights;
} MoeCombineInput;

// What one rank gets.
typedef struct MoeCombineOutput {
  // sizeof(MoeCombineOutput): later versions may add members at the end, for which 0 is the default.
  size_t size;
  // [T, hidden] of the combine type, written; rows from T on are untouched.
  const struct MoeTensor *out;
  // [T, hidden] of the combine type or f32, added last, or null.
  const struct MoeTensor *add_to;
  // With fold_weights: f32 [T, K], written; 0 where a route was masked or dropped. Otherwise null.
  const struct MoeTensor *topk_weights;
} MoeCombineOutput;

// What all matrices of a cast have in common. `moe_cast_options_init` sets the defaults.
typedef struct MoeCastOptions {
  // sizeof(MoeCastOptions): later versions may add members at the end.
  size_t size;
  // Rows of each output are a multiple of this: 1 (the default), 16, 32 or 128.
  size_t pad_rows;
  // MOE_SCALING_GIVEN (the default) or MOE_SCALING_CURRENT.
  int32_t scaling;
  // MOE_SCALING_CURRENT: not 0 for powers of two only, rounded down. 0 by default.
  int32_t power_of_two;
  // MOE_SCALING_CURRENT: the least magnitude that counts. 0 by default.
  float epsilon;
  // Not 0: sets every amax to 0 first. 0 by default.
  int32_t reset_amax;
  // f32, i32 or u32 [1]: when it is not zero as the operation runs, nothing is written. May be null.
  const struct MoeTensor *noop;
} MoeCastOptions;

// The tensors of one matrix, or of all matrices of a group: then [n] below is the number of matrices. All but x may be null, but not both of row and column.
typedef struct MoeCastOperands {
  // sizeof(MoeCastOperands): later versions may add members at the end, for which 0 is the default.
  size_t size;
  // [R, C] of f32, f16 or bf16, any row stride. Of a group: the rows of all matrices, [capacity, C].
  const struct MoeTensor *x;
  // f32 [n], for MOE_SCALING_GIVEN.
  const struct MoeTensor *scale;
  // [P, C], written: round(scale * x); P is R rounded up to `pad_rows`. Of a group: [capacity, C], matrix after matrix.
  const struct MoeTensor *row;
  // [C, P], written: the same, transposed. Of a group: [capacity * C], matrix i as a contiguous [C, P_i] behind those before it.
  const struct MoeTensor *column;
  // f32 [n], raised to the greatest |x| of each matrix.
  const struct MoeTensor *amax;
  // f32 [n], written: 1 / scale.
  const struct MoeTensor *scale_inv;
  // Of a group: u32 [1], written: a sum of MOE_CAST_*, what a GPU finds when it reads the offsets.
  const struct MoeTensor *status;
} MoeCastOperands;

// What all ranks must agree on. `moe_ep_config_init` sets the defaults; then change what is needed. All ranks use the same values, but for `timeout_ms` and
// the multiprocessors.
typedef struct MoeEpConfig {
  // sizeof(MoeEpConfig): later versions may add members at the end.
  size_t size;
  // Elements of a row; its bytes are a multiple of 16.
  size_t hidden;
  // Global experts.
  size_t num_experts;
  // Routes of a token, 1 to 32.
  size_t k;
  // Most tokens of a rank in one call, 1 to 524288.
  size_t max_tokens;
  // Rows of the receive buffer; 0 is the worst case (the default).
  size_t max_rows;
  // MOE_LAYOUT_BY_EXPERT with MOE_OVERFLOW_DROP: rows kept per segment; 0 is the worst case (the default).
  size_t max_rows_per_expert;
  // MOE_LAYOUT_BY_EXPERT: rows to a multiple of which a segment is padded, at least 1. MOE_LAYOUT_BY_EXPERT_FIXED: rows of each expert.
  size_t layout_rows;
  // Opaque scale bytes per token that travel with its row. 0 by default.
  size_t scale_bytes;
  // Tokens per rank that a call usually has; chooses the low-latency form. `max_tokens` by default.
  size_t expected_tokens;
  // Banks: 1 (the default), or 2 to have two arrivals at once.
  size_t in_flight;
  // Owner of each expert, [num_experts], or null (the default): expert e is on rank floor(e * ranks / num_experts). Read during the call only.
  const uint32_t *expert_map;
  // Bound of every wait in milliseconds, multiplied by the environment's MOE_TIMEOUT_SCALE. 30000 by default.
  uint64_t timeout_ms;
  // Element type of x, one of MOE_F32 .. MOE_BYTES.
  int32_t dtype;
  // Element type of y and of combine's output: MOE_F32, MOE_F16 or MOE_BF16. By default that of x, or MOE_BF16 when x has none of the three.
  int32_t combine_dtype;
  // One of MOE_LAYOUT_*.
  int32_t layout;
  // One of MOE_OVERFLOW_*.
  int32_t overflow;
  // One of MOE_QUANTIZE_*.
  int32_t quantize;
  // One of MOE_SCALES_*.
  int32_t scale_layout;
  // One of MOE_IDS_*.
  int32_t id_space;
  // One of MOE_MODE_*.
  int32_t mode;
  // One of MOE_WIRE_*.
  int32_t wire;
  // One of MOE_COMBINE_*.
  int32_t reduce;
  // Not 0: expert layouts multiply each row by its route's weight. 0 by default: the experts have applied the weights.
  int32_t weighted;
  // Not 0: room to fold weights per row back to [T, K]. 0 by default.
  int32_t fold_weights;
  // On a GPU: most multiprocessors that a dispatch occupies; 0 for no limit (the default). Need not be equal on all ranks.
  uint32_t dispatch_sms;
  // The same of a combine.
  uint32_t combine_sms;
} MoeEpConfig;

// Bytes that an object of a configuration needs on each rank, known before anything is allocated.
typedef struct MoeEpPlan {
  // sizeof(MoeEpPlan): later versions may add members at the end.
  size_t size;
  // Memory of a rank that all ranks map.
  size_t symmetric_bytes;
  // On a GPU: memory of a rank alone. 0 on the CPU.
  size_t private_bytes;
  // On a GPU: one routing. 0 on the CPU: ask `moe_routing_bytes`.
  size_t routing_bytes;
  // Rows of the receive buffer.
  size_t max_rows;
  // Bytes of a received row.
  size_t row_bytes;
  // Scale bytes of a received row.
  size_t scale_bytes;
  // Most local experts of a rank.
  size_t max_local_experts;
} MoeEpPlan;

// What may vary in a gate beside its tensors. `moe_gate_options_init` sets the defaults.
typedef struct MoeGateOptions {
  // sizeof(MoeGateOptions): later versions may add members at the end.
  size_t size;
  // MOE_ACTIVATION_SIGMOID (the default) or MOE_ACTIVATION_LINEAR.
  int32_t activation;
  // MOE_ROUNDING_FUSED (the default) or MOE_ROUNDING_FRAMEWORK.
  int32_t rounding;
  // Multiplies the gate after the activation; finite. 1 by default.
  float scale;
  // Not 0: nothing queued before the call writes `w`. Read only by programmatic launches on a GPU. 0 by default.
  int32_t weights_are_constant;
  // Added to each dot product: [1], the type of x or f32. May be null.
  const struct MoeTensor *bias;
  // Added to each token's logit: [T] or [T, 1], the type of x or f32. May be null.
  const struct MoeTensor *addend;
} MoeGateOptions;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The message of the last call on this thread that did not return `MOE_OK`; empty before the first. It stays until the next such call of the thread.
const char *moe_last_error(void);

// The version of the library: major * 65536 + minor * 256 + patch.
uint32_t moe_version(void);

// The CPU, with the best instructions of this machine and all of its cores. `*backend` is destroyed with `moe_backend_destroy`.
int32_t moe_backend_cpu(struct MoeBackend **backend);

// A GPU and a stream of the caller on it. `device` is the ordinal of the CUDA driver. `stream` is a CUstream or cudaStream_t of the device's primary
// context, or null for its default stream; it must live until the backend and all that was made with it are destroyed. Operations return when their work is
// queued there; nothing waits for the GPU unless its text says so.
int32_t moe_backend_cuda(uint32_t device,
                         void *stream,
                         struct MoeBackend **backend);

// Of a GPU: whether kernels of calls and worlds made with the backend from now on are launched programmatically: a kernel may then start while the one before it
// in the stream still ends, and waits for it before it reads what may change. Not 0 for yes; a new backend does not.
int32_t moe_backend_set_programmatic(struct MoeBackend *backend,
                                     int32_t programmatic);

// Destroys a backend. Worlds and objects that were made with it stay as they are. Null is ignored.
int32_t moe_backend_destroy(struct MoeBackend *backend);

// Bytes of one routing of this object.
int32_t moe_routing_bytes(const struct MoeEp *ep, size_t *bytes);

// Makes a routing for calls of this object.
int32_t moe_routing_create(const struct MoeEp *ep, struct MoeRouting **routing);

// As `moe_routing_create`, in memory of the caller on the object's GPU: `moe_routing_bytes` of it, aligned to 256, the routing's alone until it is destroyed and the
// object's stream has done what was queued.
int32_t moe_routing_create_in(const struct MoeEp *ep,
                              void *memory,
                              size_t bytes,
                              struct MoeRouting **routing);

// Tokens of the call that filled the routing.
int32_t moe_routing_num_tokens(const struct MoeRouting *routing, size_t *num);

// Rows of this rank's tokens that receivers dropped. On a GPU it waits for the object's stream.
int32_t moe_routing_num_dropped(const struct MoeEp *ep, const struct MoeRouting *routing, size_t *num);

// Destroys a routing. On a GPU it waits for the object's stream. Null is ignored.
int32_t moe_routing_destroy(struct MoeRouting *routing);

// Sends this rank's tokens to the ranks of their experts and receives those of all ranks, in the order (source rank, token). Collective.
//
// On the CPU the rows are there when it returns. On a GPU it returns when its kernels are queued; what only they find out (MOE_CAPACITY, MOE_MISMATCH, MOE_TIMEOUT,
// MOE_POISONED) the next call on the object returns, or `moe_ep_synchronize`.
// `*arrival` holds a bank of the object until combine takes it or it is destroyed; a dispatch that finds its bank held returns MOE_BUSY.
// `outputs` may be null.
int32_t moe_dispatch(struct MoeEp *ep,
                     struct MoeRouting *routing,
                     const struct MoeDispatchInput *input,
                     const struct MoeDispatchOutputs *outputs,
                     struct MoeArrival **arrival);

// The first half of `moe_dispatch`: counts and rows leave, nothing waits for rows. Collective.
int32_t moe_dispatch_send(struct MoeEp *ep,
                          struct MoeRouting *routing,
                          const struct MoeDispatchInput *input,
                          struct MoeDispatchSent **sent);

// The second half of `moe_dispatch`. `*sent` is gone and null afterwards, unless the call refused its arguments. `outputs` may be null.
int32_t moe_dispatch_receive(struct MoeEp *ep,
                             struct MoeRouting *routing,
                             struct MoeDispatchSent **sent,
                             const struct MoeDispatchOutputs *outputs,
                             struct MoeArrival **arrival);

// The same routing with new rows: x [T, hidden], and scales when the configuration has them, otherwise null. Collective; otherwise as `moe_dispatch`.
int32_t moe_replay(struct MoeEp *ep,
                   const struct MoeRouting *routing,
                   const struct MoeTensor *x,
                   const struct MoeTensor *scales,
                   struct MoeArrival **arrival);

// The first half of `moe_replay`: counts and rows leave, nothing waits for rows. Collective.
int32_t moe_replay_send(struct MoeEp *ep,
                        const struct MoeRouting *routing,
                        const struct MoeTensor *x,
                        const struct MoeTensor *scales,
                        struct MoeDispatchSent **sent);

// The second half of `moe_replay`. `*sent` is gone and null afterwards, unless the call refused its arguments.
int32_t moe_replay_receive(struct MoeEp *ep, const struct MoeRouting *routing, struct MoeDispatchSent **sent, struct MoeArrival **arrival);

// MOE_LAYOUT_BY_TOKEN, for GEMMs that gather: `gather_idx` (i32 [n], written) gets the rows of each local expert, ascending, each segment padded with -1 to a
// multiple of `align`; `segment_start` (u32 [local experts + 1], written) where they begin and, last, the end. What is behind the end stays.
//
// n is at least the end; on a GPU, whose host does not know the counts: max_rows * min(K, local experts) + local experts * (align - 1).
int32_t moe_arrival_gather_idx(const struct MoeArrival *arrival,
                               size_t align,
                               const struct MoeTensor *gather_idx,
                               const struct MoeTensor *segment_start);

// Unpacks what the views of an arrival show strided: source i32 [rows, 2], topk_idx i32 [rows, row_k], topk_weights f32 [rows, row_k], written. `rows` is at
// least the number of valid rows; on a GPU max_rows. What is behind the valid rows stays.
int32_t moe_arrival_contiguous_metadata(const struct MoeArrival *arrival,
                                        const struct MoeTensor *source,
                                        const struct MoeTensor *topk_idx,
                                        const struct MoeTensor *topk_weights);

// A view of an arrival, one of MOE_ARRIVAL_*, in the memory of the backend. It is valid until the arrival is gone; on a GPU what it shows is there when the stream has
// come to it. MOE_UNSUPPORTED for scales of a configuration without them.
int32_t moe_arrival_view(struct MoeArrival *arrival,
                         int32_t which,
                         struct MoeTensor *view);

// The number of valid rows, as a number. On a GPU it waits for the object's stream, and returns what the calls so far met.
int32_t moe_arrival_num_rows(const struct MoeEp *ep, const struct MoeArrival *arrival, size_t *num);

// Gives an arrival's bank back without a combine. Null is ignored.
int32_t moe_arrival_destroy(struct MoeArrival *arrival);

// Gives up a dispatch between its halves; its rows are lost. Null is ignored.
int32_t moe_dispatch_sent_destroy(struct MoeDispatchSent *sent);

// Gives up a combine between its halves. Null is ignored.
int32_t moe_combine_sent_destroy(struct MoeCombineSent *sent);

// Brings the experts' rows back and sums them: out[t] = round(sum over ranks, ascending, of y + add_to[t]), in f32. Collective.
//
// `*arrival` is gone and null afterwards, unless the call refused its arguments (MOE_INVALID): then nothing was sent and it can be used again.
int32_t moe_combine(struct MoeEp *ep,
                    const struct MoeRouting *routing,
                    struct MoeArrival **arrival,
                    const struct MoeCombineInput *input,
                    const struct MoeCombineOutput *output);

// The first half of `moe_combine`: this rank's rows are complete and may be read. `*arrival` as there.
int32_t moe_combine_send(struct MoeEp *ep,
                         const struct MoeRouting *routing,
                         struct MoeArrival **arrival,
                         const struct MoeCombineInput *input,
                         struct MoeCombineSent **sent);

// The second half of `moe_combine`. `*sent` is gone and null afterwards, unless the call refused its arguments.
int32_t moe_combine_receive(struct MoeEp *ep,
                            const struct MoeRouting *routing,
                            struct MoeCombineSent **sent,
                            const struct MoeCombineOutput *output);

// Sets the defaults. `size` is sizeof(MoeCastOptions).
int32_t moe_cast_options_init(struct MoeCastOptions *options, size_t size);

// Casts every matrix of a list: each is read once and written row-major, transposed or both. All have the same types and the same outputs; shapes may
// differ. `matrices` is an array of `num` structs of one size. `options` may be null. The host allocates a description of the list.
int32_t moe_cast(const struct MoeBackend *backend,
                 const struct MoeCastOperands *matrices,
                 size_t num,
                 const struct MoeCastOptions *options);

// Casts the matrices of one buffer of rows: matrix i is the rows offsets[i] to offsets[i + 1] of x.
//
// `offsets`: i32 or i64 [n + 1], read when the operation runs: starts with 0, never decreases, ends within x. `options` may be null. On a GPU offsets that are not
// so are told by `status`, and nothing else is written; on the CPU they are MOE_INVALID.
int32_t moe_cast_grouped(const struct MoeBackend *backend,
                         const struct MoeCastOperands *operands,
                         const struct MoeTensor *offsets,
                         const struct MoeCastOptions *options);

// Sets a configuration to its defaults: MOE_LAYOUT_BY_TOKEN, worst-case capacity, no scales, throughput mode, one bank, plain sum. `size` is
// sizeof(MoeEpConfig); `dtype` is that of x.
int32_t moe_ep_config_init(struct MoeEpConfig *config,
                           size_t size,
                           size_t hidden,
                           int32_t element_type,
                           size_t num_experts,
                           size_t k,
                           size_t max_tokens);

// What an object of this configuration needs in a world of `world_size` ranks, on GPUs when `on_gpu` is not 0. `size` is sizeof(MoeEpPlan). Allocates
// nothing; also the way to check a configuration.
int32_t moe_ep_plan(const struct MoeEpConfig *config,
                    size_t world_size,
                    int32_t on_gpu,
                    struct MoeEpPlan *plan,
                    size_t size);

// The memberships of a world whose ranks are threads of this process: rank r works on backends[r], and worlds[r] is then its membership, to be used by a
// thread of its own. All CPUs or all GPUs; a GPU may be there several times, each time with another stream; one CPU backend for all ranks is fine.
// `size` is the number of ranks, 1 to 64, and of entries of both arrays.
int32_t moe_world_threads(const struct MoeBackend *const *backends,
                          struct MoeWorld **worlds,
                          size_t size);

// Joins the world of processes of this machine that the environment describes, as torchrun and `moe run --processes` set it: RANK, WORLD_SIZE, LOCAL_RANK,
// MASTER_ADDR, MASTER_PORT. `group` tells several worlds of one job apart. Collective: returns when all ranks have joined, or fails on all. Linux only.
int32_t moe_world_join(const struct MoeBackend *backend,
                       const char *group,
                       struct MoeWorld **world);

// This rank, 0 to the number of ranks - 1.
int32_t moe_world_rank(const struct MoeWorld *world, uint32_t *rank);

// The number of ranks.
int32_t moe_world_size(const struct MoeWorld *world, uint32_t *size);

// Waits until every rank is here. Collective.
int32_t moe_world_barrier(const struct MoeWorld *world);

// Destroys a membership. The rank leaves the world when its objects are destroyed too; a peer that then waits for it fails at once. Null is ignored.
int32_t moe_world_destroy(struct MoeWorld *world);

// Makes an object: allocates, maps the memory of all ranks, and on GPUs compiles and loads every kernel that its calls need. Collective: every rank calls it with
// an equal configuration; it fails on all ranks or on none.
int32_t moe_ep_create(const struct MoeWorld *world,
                      const struct MoeEpConfig *config,
                      struct MoeEp **ep);

// Destroys an object. Its arrivals, routings and halves of calls may be destroyed before or after. On a GPU it waits for the object's stream. Null is ignored.
int32_t moe_ep_destroy(struct MoeEp *ep);

// Waits for all that the object has queued, and returns what its calls met that only the GPU knew: MOE_CAPACITY of the last refused call, MOE_MISMATCH, MOE_TIMEOUT,
// MOE_POISONED. On the CPU there is nothing to wait for.
int32_t moe_ep_synchronize(const struct MoeEp *ep);

// Of a GPU rank: calls from now on are queued in `stream`, after what the stream until now holds. The stream is one of the same device and lives as long as the
// object.
int32_t moe_ep_set_stream(struct MoeEp *ep,
                          void *stream);

// The number of experts of this rank.
int32_t moe_ep_num_local_experts(const struct MoeEp *ep, size_t *num);

// Sets the defaults. `size` is sizeof(MoeGateOptions).
int32_t moe_gate_options_init(struct MoeGateOptions *options, size_t size);

// out[t] = activation(x[t] . w), a number for each token.
//
// x: [T, K] of f32, f16 or bf16; w: [K] of the type of x or f32; out: [T] or [T, 1] of the type of x or f32. T and K may be 0. A row of x may lie inside
// a larger matrix. `options` may be null. The sum has one order on every backend, so the bytes are the same everywhere.
int32_t moe_gate(const struct MoeBackend *backend,
                 const struct MoeTensor *x,
                 const struct MoeTensor *w,
                 const struct MoeGateOptions *options,
                 const struct MoeTensor *out);

// out[t, n] = g[t] * s[t, n], where g is what `moe_gate` computes.
//
// s: [T, N] of the type of x or f32; out: as s.
int32_t moe_gate_mul(const struct MoeBackend *backend,
                     const struct MoeTensor *x,
                     const struct MoeTensor *w,
                     const struct MoeTensor *s,
                     const struct MoeGateOptions *options,
                     const struct MoeTensor *out);

// out[t, n] = round(out[t, n] + g[t] * s[t, n]), in f32: adds the weighed shared expert to the routed sum. Tensors as for `moe_gate_mul`.
int32_t moe_gate_mul_add(const struct MoeBackend *backend,
                         const struct MoeTensor *x,
                         const struct MoeTensor *w,
                         const struct MoeTensor *s,
                         const struct MoeGateOptions *options,
                         const struct MoeTensor *out);

// Writes the shared expert behind the routed top-k of each token: topk_idx[t, K] = shared_expert, topk_weights[t, K] = gate * scale.
//
// topk_idx: i32 or i64 [T, K + 1]; topk_weights: f32 [T, K + 1]. Their first K columns stay.
int32_t moe_gate_append_topk(const struct MoeBackend *backend,
                             const struct MoeTensor *x,
                             const struct MoeTensor *w,
                             uint32_t shared_expert,
                             const struct MoeGateOptions *options,
                             const struct MoeTensor *topk_idx,
                             const struct MoeTensor *topk_weights);

// out = sigmoid(g) * s, element by element: for a gate of which the logits exist.
//
// s: [T, N]; g: [T, 1] or [T, N]; out: as s. `rounding`: MOE_ROUNDING_FUSED or MOE_ROUNDING_FRAMEWORK.
int32_t moe_sigmoid_mul(const struct MoeBackend *backend,
                        const struct MoeTensor *s,
                        const struct MoeTensor *g,
                        int32_t rounding,
                        const struct MoeTensor *out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MOE_KERNELS_H */
