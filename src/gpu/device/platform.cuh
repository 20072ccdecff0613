// The dialect: everything that NVIDIA (NVRTC, nvcc) and AMD (clang HIP without headers) spell differently, under one name. Raw asm stands only here.
//
// Needs no header. One source serves sm_80 and later, gfx942, gfx950, gfx11 and gfx12. A function whose instruction an architecture lacks does
// nothing there (said beside it), so a kernel needs no #if of its own.

#if defined(__HIP__) || defined(__AMDGCN__)
#define PLATFORM_AMD 1
#define PLATFORM_HOPPER 0
#elif defined(__CUDA_ARCH__)
#define PLATFORM_AMD 0
#define PLATFORM_HOPPER (__CUDA_ARCH__ >= 900)
#else // the host pass of nvcc, which only parses
#define PLATFORM_AMD 0
#define PLATFORM_HOPPER 0
#endif

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// The types of elements, by their names in Rust. `float.cuh` and `fp8.cuh` convert them. All stand here: a program's constants, which follow this file, name them.
using f32 = float;
struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};
struct e4m3 {
    static constexpr u32 MANTISSA = 3, BIAS = 7, NAN_BITS = 0x7F; // spec: OCP FP8 E4M3
    static constexpr bool FNUZ = false;
    static constexpr float LARGEST_VALUE = 448.0f;
    u8 bits;
};
struct e5m2 {
    static constexpr u32 MANTISSA = 2, BIAS = 15, NAN_BITS = 0x7F; // spec: OCP FP8 E5M2
    static constexpr bool FNUZ = false;
    static constexpr float LARGEST_VALUE = 57344.0f;
    u8 bits;
};
struct e4m3fnuz {
    static constexpr u32 MANTISSA = 3, BIAS = 8, NAN_BITS = 0x80; // spec: FNUZ E4M3
    static constexpr bool FNUZ = true;
    static constexpr float LARGEST_VALUE = 240.0f;
    u8 bits;
};
struct e5m2fnuz {
    static constexpr u32 MANTISSA = 2, BIAS = 16, NAN_BITS = 0x80; // spec: FNUZ E5M2
    static constexpr bool FNUZ = true;
    static constexpr float LARGEST_VALUE = 57344.0f;
    u8 bits;
};

#if PLATFORM_AMD
#define DEVICE inline __attribute__((device, always_inline))
#define SHARED __attribute__((shared))
// An entry point with at most `threads` threads in a block.
#define KERNEL(threads) extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, threads))) void
// The same; on NVIDIA without rounding registers to what one more block would need, for which the compiler spills a few bytes.
#define KERNEL_UNROUNDED(threads) KERNEL(threads)
#define PARAMETERS(type) const type
#else
#define DEVICE __device__ __forceinline__
#define SHARED __shared__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define KERNEL_UNROUNDED(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define PARAMETERS(type) const __grid_constant__ type
#endif

// Loops whose steps each make a mask of lanes: so many steps at once. AMD keeps masks in scalar registers, a hundred of them, and a loop that may have
// any number of steps is not to be unrolled there either.
#if PLATFORM_AMD
#define MASK_LOOP _Pragma("unroll 1")
#else
#define MASK_LOOP
#endif
constexpr u32 MASKS_AT_ONCE = PLATFORM_AMD ? 1 : 8;

// Place in the grid.

DEVICE u32 thread_idx() {
#if PLATFORM_AMD
    return __builtin_amdgcn_workitem_id_x();
#else
    return threadIdx.x;
#endif
}

DEVICE u32 block_idx_x() {
#if PLATFORM_AMD
    return __builtin_amdgcn_workgroup_id_x();
#else
    return blockIdx.x;
#endif
}

DEVICE u32 block_idx_y() {
#if PLATFORM_AMD
    return __builtin_amdgcn_workgroup_id_y();
#else
    return blockIdx.y;
#endif
}

// Among the threads of a block.

// All threads of the block are here, and see what any of them wrote to shared memory.
DEVICE void block_barrier() {
#if PLATFORM_AMD
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
#else
    __syncthreads();
#endif
}

// Adds to a word of shared memory, to which other threads add too.
DEVICE void add_shared(u32* at, u32 value) {
#if PLATFORM_AMD
    __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
#else
    atomicAdd(at, value);
#endif
}

// The value of the lane whose number differs by MASK (1, 2, 4, 8 or 16), so within aligned groups of 32 lanes for waves of 64 too. All lanes take part.
template <int MASK> DEVICE float shuffle_xor(float value) {
    static_assert(MASK > 0 && MASK < 32, "A mask above 31 would leave the group of 32 lanes.");
#if PLATFORM_AMD
    // spec (AMD ISA, ds_swizzle_b32, bit mode): lane = ((lane & 31) | 0) ^ MASK
    return __builtin_bit_cast(float, __builtin_amdgcn_ds_swizzle(__builtin_bit_cast(int, value), MASK << 10 | 31));
#else
    return __shfl_xor_sync(0xFFFFFFFFu, value, MASK);
#endif
}

// Bits.

DEVICE u32 bits_of(float value) {
#if PLATFORM_AMD
    return __builtin_bit_cast(u32, value);
#else
    return __float_as_uint(value);
#endif
}

DEVICE float float_of(u32 bits) {
#if PLATFORM_AMD
    return __builtin_bit_cast(float, bits);
#else
    return __uint_as_float(bits);
#endif
}

// One rounding.
DEVICE float fma_rn(float a, float b, float c) {
#if PLATFORM_AMD
    return __builtin_fmaf(a, b, c);
#else
    return __fmaf_rn(a, b, c);
#endif
}

// A function that is seldom called: on NVIDIA out of the way of the instructions around it, which are fetched in order.
#if PLATFORM_AMD
#define RARE DEVICE
#else
#define RARE __device__ __noinline__
#endif

// 1 / x to nearest even, for NaN and 1 <= x < 2^126.
DEVICE float reciprocal_of_normal(float x) {
#if PLATFORM_AMD
    return 1.0f / x;
#else
    // These are the instructions that the compiler makes of 1 / x for that range, without its test of the range and the branch after it (measured: 0.05
    // us of one token's gate on an H200). Every x of the range was compared with 1 / x on an H200: no difference.
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return __fmaf_rn(y, -__fmaf_rn(x, y, -1.0f), y);
#endif
}

// Conversions that are one instruction on NVIDIA: to nearest even; NaN becomes the quiet one. `float.cuh` has the names to use.

#if !PLATFORM_AMD
DEVICE u16 narrow_bf16_bits(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE u32 narrow_bf16x2_bits(float low, float high) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

DEVICE u16 narrow_f16_bits(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE u32 narrow_f16x2_bits(float low, float high) {
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

DEVICE float widen_f16_bits(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
#endif

struct alignas(16) Vec16 {
    u32 word[4];
};

// The address is made here, and not where it is used.
template <class T> DEVICE void settle(T*& address) {
#if PLATFORM_AMD
    asm volatile("" : "+v"(address));
#else
    asm volatile("" : "+l"(address));
#endif
}

// Global memory: 16 bytes at a 16-byte boundary, or one element at its own. An address that `settle` has seen is not known to be in global memory any
// more, so these say it.

#if PLATFORM_AMD
#define GLOBAL(type) __attribute__((address_space(1))) type
typedef u32 NativeVec16 __attribute__((ext_vector_type(4)));
#endif


// Loads that leave `to` alone when nothing is there: without a branch.

// What many blocks read: stays in every cache. Nobody writes it while the kernel runs.
DEVICE void load_constant(Vec16& to, const void* at, bool is_there) {
#if PLATFORM_AMD
    if (is_there) to = __builtin_bit_cast(Vec16, *(const GLOBAL(NativeVec16)*)at);
#else
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(to.word[0]), "+r"(to.word[1]), "+r"(to.word[2]), "+r"(to.word[3])
                 : "l"(at), "r"((u32)is_there));
#endif
}

// What several blocks read, and an earlier kernel may have written.
DEVICE void load(Vec16& to, const void* at, bool is_there) {
#if PLATFORM_AMD
    if (is_there) to = __builtin_bit_cast(Vec16, *(const GLOBAL(NativeVec16)*)at);
#else
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(to.word[0]), "+r"(to.word[1]), "+r"(to.word[2]), "+r"(to.word[3])
                 : "l"(at), "r"((u32)is_there)
                 : "memory");
#endif
}

// What is read once: past the first-level cache.
DEVICE void load_once(Vec16& to, const void* at, bool is_there) {
#if PLATFORM_AMD
    if (is_there) to = __builtin_bit_cast(Vec16, __builtin_nontemporal_load((const GLOBAL(NativeVec16)*)at));
#else
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(to.word[0]), "+r"(to.word[1]), "+r"(to.word[2]), "+r"(to.word[3])
                 : "l"(at), "r"((u32)is_there)
                 : "memory");
#endif
}

DEVICE void store(void* at, Vec16 v) {
#if PLATFORM_AMD
    *(GLOBAL(NativeVec16)*)at = __builtin_bit_cast(NativeVec16, v);
#else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]) : "memory");
#endif
}

// Asks for the line of the second-level cache that holds this address. Nobody waits for it, it reads nothing and orders nothing: whoever writes there may do
// so before or after. Nothing on AMD.
DEVICE void prefetch(const void* at) {
#if !PLATFORM_AMD
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
#endif
}

DEVICE u16 load_u16(const void* at) {
#if PLATFORM_AMD
    return *(const GLOBAL(u16)*)at;
#else
    u16 value;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(value) : "l"(at) : "memory");
    return value;
#endif
}

DEVICE u32 load_u32(const void* at) {
#if PLATFORM_AMD
    return *(const GLOBAL(u32)*)at;
#else
    u32 value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
#endif
}

DEVICE void store_u16(void* at, u16 value) {
#if PLATFORM_AMD
    *(GLOBAL(u16)*)at = value;
#else
    asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(value) : "memory");
#endif
}

DEVICE void store_u32(void* at, u32 value) {
#if PLATFORM_AMD
    *(GLOBAL(u32)*)at = value;
#else
    asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
#endif
}

DEVICE void store_u64(void* at, u64 value) {
#if PLATFORM_AMD
    *(GLOBAL(u64)*)at = value;
#else
    asm volatile("st.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
#endif
}

// Programmatic dependent launch (sm_90 and later; nothing elsewhere, and returns at once in a launch without the attribute).

// The kernels that this one depends on have ended, and what they wrote is visible.
DEVICE void wait_for_dependencies() {
#if PLATFORM_HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets kernels that depend on this one start, up to their own wait.
DEVICE void launch_dependents() {
#if PLATFORM_HOPPER
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Clusters of blocks (sm_90 and later; elsewhere a cluster is one block).

DEVICE u32 cluster_rank() {
#if PLATFORM_HOPPER
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}

// This thread has come so far; orders nothing.
DEVICE void cluster_arrive_relaxed() {
#if PLATFORM_HOPPER
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Publishes this thread's writes to the threads that wait.
DEVICE void cluster_arrive_release() {
#if PLATFORM_HOPPER
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// Every thread of the cluster has arrived or ended.
DEVICE void cluster_wait_acquire() {
#if PLATFORM_HOPPER
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores to the same shared variable of block `rank` of the cluster, which must have started.
DEVICE void store_to_cluster(float* shared_variable, u32 rank, float value) {
#if PLATFORM_HOPPER
    u32 own = (u32)__cvta_generic_to_shared(shared_variable), remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#else
    *shared_variable = value;
#endif
}
