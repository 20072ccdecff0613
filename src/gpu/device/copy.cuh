// Streaming access to memory: for what is read once, or written and not read soon. After platform.cuh.
//
// 16 bytes at a 16-byte boundary in global memory. First to leave the caches, so that what others need stays.

DEVICE Vec16 load_streaming(const Vec16* at) {
#if PLATFORM_AMD
    typedef u32 Native __attribute__((ext_vector_type(4)));
    return __builtin_bit_cast(Vec16, __builtin_nontemporal_load((const Native*)at));
#else
    uint4 v = __ldcs((const uint4*)at);
    return Vec16{{v.x, v.y, v.z, v.w}};
#endif
}

DEVICE void store_streaming(Vec16* at, Vec16 v) {
#if PLATFORM_AMD
    typedef u32 Native __attribute__((ext_vector_type(4)));
    __builtin_nontemporal_store(__builtin_bit_cast(Native, v), (Native*)at);
#else
    __stcs((uint4*)at, make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
#endif
}

// For casts: accesses of a chosen width, bytes of words in another order, values of other lanes.

// An entry point with `threads` threads in a block, of which an NVIDIA multiprocessor holds `blocks`.
#if PLATFORM_AMD
#define KERNEL_FITTING(threads, blocks) KERNEL(threads)
#else
#define KERNEL_FITTING(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#endif

struct alignas(8) Vec8 {
    u32 word[2];
};

// What nobody writes while the kernel runs and what is read once: past the first-level cache (measured: H200, a cast of bf16 reaches 3.57 TB/s with
// this and 3.44 with `load_streaming`).
DEVICE Vec16 load_uncached(const void* at) {
#if PLATFORM_AMD
    typedef u32 Native __attribute__((ext_vector_type(4)));
    return __builtin_bit_cast(Vec16, __builtin_nontemporal_load((const Native*)at));
#else
    Vec16 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(at));
    return v;
#endif
}

// 8 bytes at an 8-byte boundary.
DEVICE void store_streaming(Vec8* at, Vec8 v) {
#if PLATFORM_AMD
    typedef u32 Native __attribute__((ext_vector_type(2)));
    __builtin_nontemporal_store(__builtin_bit_cast(Native, v), (Native*)at);
#else
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(v.word[0]), "r"(v.word[1]) : "memory");
#endif
}

// Bytes A, B, C, D (lowest first) of the 8 bytes `low`, `high`.
template <u32 A, u32 B, u32 C, u32 D> DEVICE u32 bytes_of(u32 low, u32 high) {
#if PLATFORM_AMD
    return __builtin_amdgcn_perm(high, low, A | B << 8 | C << 16 | D << 24);
#else
    return __byte_perm(low, high, A | B << 4 | C << 8 | D << 12);
#endif
}

// The 4 x 4 bytes of four words, transposed: word i of the result has byte i of each.
DEVICE void transpose_bytes(u32 a, u32 b, u32 c, u32 d, u32& first, u32& second, u32& third, u32& fourth) {
    const u32 ab_low = bytes_of<0, 4, 1, 5>(a, b), cd_low = bytes_of<0, 4, 1, 5>(c, d);
    const u32 ab_high = bytes_of<2, 6, 3, 7>(a, b), cd_high = bytes_of<2, 6, 3, 7>(c, d);
    first = bytes_of<0, 1, 4, 5>(ab_low, cd_low);
    second = bytes_of<2, 3, 6, 7>(ab_low, cd_low);
    third = bytes_of<0, 1, 4, 5>(ab_high, cd_high);
    fourth = bytes_of<2, 3, 6, 7>(ab_high, cd_high);
}

// Memory in pieces of a width that is known at run time. BYTES is a multiple of 16; a piece is 1, 2, 4, 8 or 16 bytes, at a boundary of as many.

template <class T> DEVICE T load_piece(const u8* at) {
    return *(const T*)at;
}

// The pieces that lie within the first `valid` bytes; the others are 0.
template <u32 WORDS> DEVICE void load_pieces(u32 (&words)[WORDS], const u8* at, u32 valid, u32 piece) {
    static_assert(WORDS % 4 == 0, "Whole vectors of 16 bytes.");
#pragma unroll
    for (u32 i = 0; i < WORDS; i++) {
        words[i] = 0;
    }
    if (piece == 16) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 4) {
            if (i * 4 < valid) {
                const Vec16 v = load_uncached(at + i * 4);
                words[i] = v.word[0];
                words[i + 1] = v.word[1];
                words[i + 2] = v.word[2];
                words[i + 3] = v.word[3];
            }
        }
    } else if (piece == 8) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 2) {
            if (i * 4 < valid) {
                const Vec8 v = load_piece<Vec8>(at + i * 4);
                words[i] = v.word[0];
                words[i + 1] = v.word[1];
            }
        }
    } else if (piece == 4) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            if (i * 4 < valid) {
                words[i] = load_piece<u32>(at + i * 4);
            }
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            if (i * 4 < valid) {
                words[i] = load_piece<u16>(at + i * 4);
            }
            if (i * 4 + 2 < valid) {
                words[i] |= (u32)load_piece<u16>(at + i * 4 + 2) << 16;
            }
        }
    }
}

// The pieces that lie within the first `valid` bytes.
template <u32 WORDS> DEVICE void store_pieces(u8* at, const u32 (&words)[WORDS], u32 valid, u32 piece) {
    static_assert(WORDS % 2 == 0, "Whole vectors of 8 bytes.");
    if (WORDS % 4 == 0 && piece == 16) {
#pragma unroll
        for (u32 i = 0; i + 3 < WORDS; i += 4) {
            if (i * 4 < valid) {
                store_streaming((Vec16*)(at + i * 4), Vec16{words[i], words[i + 1], words[i + 2], words[i + 3]});
            }
        }
    } else if (piece >= 8) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 2) {
            if (i * 4 < valid) {
                store_streaming((Vec8*)(at + i * 4), Vec8{words[i], words[i + 1]});
            }
        }
    } else if (piece == 4) {
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            if (i * 4 < valid) {
                *(u32*)(at + i * 4) = words[i];
            }
        }
    } else if (piece == 2) {
#pragma unroll
        for (u32 i = 0; i < WORDS * 2; i++) {
            if (i * 2 < valid) {
                *(u16*)(at + i * 2) = (u16)(words[i / 2] >> i % 2 * 16);
            }
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < WORDS * 4; i++) {
            if (i < valid) {
                at[i] = (u8)(words[i / 4] >> i % 4 * 8);
            }
        }
    }
}

// Values of other lanes, in groups of 32 lanes for waves of 64 too. Lanes that take part are in one branch.

// The sum of `value` over this lane and those before it in its group.
DEVICE u32 sum_up_to(u32 value, u32 lane) {
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
#if PLATFORM_AMD
        const u32 other = (u32)__builtin_amdgcn_ds_bpermute((int)((thread_idx() - distance) * 4), (int)value);
#else
        const u32 other = __shfl_up_sync(0xFFFFFFFFu, value, distance);
#endif
        value += lane >= distance ? other : 0;
    }
    return value;
}

// `value` of lane `from` of the group.
DEVICE u32 value_of(u32 value, u32 from) {
#if PLATFORM_AMD
    return (u32)__builtin_amdgcn_ds_bpermute((int)((thread_idx() / 32 * 32 + from) * 4), (int)value);
#else
    return __shfl_sync(0xFFFFFFFFu, value, from);
#endif
}

// The sum over the group.
DEVICE u32 sum_of_group(u32 value) {
#if !PLATFORM_AMD
    return __reduce_add_sync(0xFFFFFFFFu, value);
#else
#pragma unroll
    for (u32 mask = 1; mask < 32; mask *= 2) {
        value += (u32)__builtin_amdgcn_ds_bpermute((int)((thread_idx() ^ mask) * 4), (int)value);
    }
    return value;
#endif
}

// The greatest of the group.
DEVICE u32 greatest_of_group(u32 value) {
#if !PLATFORM_AMD
    return __reduce_max_sync(0xFFFFFFFFu, value);
#else
#pragma unroll
    for (u32 mask = 1; mask < 32; mask *= 2) {
        const u32 other = (u32)__builtin_amdgcn_ds_bpermute((int)((thread_idx() ^ mask) * 4), (int)value);
        value = other > value ? other : value;
    }
    return value;
#endif
}

// The words written to shared memory by lanes of this warp are seen by its other lanes.
DEVICE void warp_barrier() {
#if PLATFORM_AMD
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
#else
    __syncwarp();
#endif
}

// Raises a word of global memory, which other blocks raise too; orders nothing.
DEVICE void raise(i32* at, i32 value) {
#if PLATFORM_AMD
    __hip_atomic_fetch_max(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    atomicMax(at, value);
#endif
}
