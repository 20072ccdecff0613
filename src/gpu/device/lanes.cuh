// Among the lanes of a warp, 32 or 64 of them. Needs platform.cuh.

#if PLATFORM_AMD && defined(__GFX9__)
constexpr u32 WARP = 64;
#else
constexpr u32 WARP = 32;
#endif

DEVICE u32 threads_of_block() {
#if PLATFORM_AMD
    return __builtin_amdgcn_workgroup_size_x();
#else
    return blockDim.x;
#endif
}

DEVICE u32 grid_blocks() {
#if PLATFORM_AMD
    return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
#else
    return gridDim.x;
#endif
}

// One bit for each lane, set where the condition holds. All lanes take part.
DEVICE u64 lanes_where(bool condition) {
#if PLATFORM_AMD && defined(__GFX9__)
    return __builtin_amdgcn_ballot_w64(condition);
#elif PLATFORM_AMD
    return __builtin_amdgcn_ballot_w32(condition);
#else
    return __ballot_sync(0xFFFFFFFFu, condition);
#endif
}

DEVICE u32 num_bits(u64 mask) {
#if PLATFORM_AMD
    return (u32)__builtin_popcountll(mask);
#else
    return (u32)__popcll(mask);
#endif
}

// The number of the lowest bit of a mask that is not 0.
DEVICE u32 lowest_bit(u32 mask) {
#if PLATFORM_AMD
    return (u32)__builtin_ctz(mask);
#else
    return (u32)__ffs((int)mask) - 1;
#endif
}

// The value of lane `lane`. All lanes take part.
DEVICE u32 from_lane(u32 value, u32 lane) {
#if PLATFORM_AMD
    return (u32)__builtin_amdgcn_ds_bpermute((int)(lane * 4), (int)value);
#else
    return __shfl_sync(0xFFFFFFFFu, value, (int)lane);
#endif
}

DEVICE u64 from_lane64(u64 value, u32 lane) {
    return (u64)from_lane((u32)(value >> 32), lane) << 32 | from_lane((u32)value, lane);
}

// What the lanes wrote to shared memory is visible to each other.
DEVICE void warp_barrier() {
#if PLATFORM_AMD
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
#else
    __syncwarp();
#endif
}

// `condition` of any thread of the block. All threads take part.
DEVICE bool block_any(bool condition) {
#if PLATFORM_AMD
    SHARED static u32 any;
    if (thread_idx() == 0) any = 0;
    block_barrier();
    if (condition) any = 1;
    block_barrier();
    const bool result = any != 0;
    block_barrier();
    return result;
#else
    return __syncthreads_or(condition);
#endif
}
