// Between blocks, kernels and devices: words that others poll, the fences that order them, 16-byte packets that carry their own flag, a clock.
// Needs platform.cuh.
//
// Words are read and written relaxed. Order comes from fences alone: the writer fences, then stores; the reader's polls succeed, then it fences.
// A fence covers what its thread wrote or saw before it, so also what other threads of its block did before a barrier.

// Everything before this is visible to whoever reads, on any device, a word stored after it.
DEVICE void release_system() {
#if PLATFORM_AMD
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
#elif PLATFORM_HOPPER
    asm volatile("fence.release.sys;" ::: "memory");
#else
    asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}

// Everything before this is visible to whoever, on this device, reads a word changed after it, and what they saw before to those to whom they release
// it: on any device.
DEVICE void release_device() {
#if PLATFORM_AMD
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
#elif PLATFORM_HOPPER
    asm volatile("fence.release.gpu;" ::: "memory");
#else
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// What was released before a word that was read before this is visible, and is released by the next release.
DEVICE void acquire_release_system() {
#if PLATFORM_AMD
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
#else
    asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}

// The same for those on this device.
DEVICE void acquire_release_device() {
#if PLATFORM_AMD
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent");
#else
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// A release to ranks, of any device or all of this one and of one process: then its scope reaches them (measured, H200: the system's takes longer the more ranks
// release at once).
DEVICE void release_peers(bool is_one_device) {
    if (is_one_device) {
        release_device();
    } else {
        release_system();
    }
}

// The same, and passes on what blocks of this device have released.
DEVICE void acquire_release_peers(bool is_one_device) {
    if (is_one_device) {
        acquire_release_device();
    } else {
        acquire_release_system();
    }
}

DEVICE u64 load_relaxed_system(const u64* at) {
#if PLATFORM_AMD
    return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#else
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
#endif
}

// What was written before the store of the word that this reads is visible to this thread, and to those that it then meets at a barrier.
DEVICE u64 load_acquire_system(const u64* at) {
#if PLATFORM_AMD
    return __hip_atomic_load(at, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
#else
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
#endif
}

DEVICE void store_relaxed_system(u64* at, u64 value) {
#if PLATFORM_AMD
    __hip_atomic_store(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#else
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
#endif
}

DEVICE u64 load_relaxed_device(const u64* at) {
#if PLATFORM_AMD
    return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
#endif
}

DEVICE void store_relaxed_device(u64* at, u64 value) {
#if PLATFORM_AMD
    __hip_atomic_store(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
#endif
}

// Returns the value before. Within one device.
DEVICE u32 add_relaxed_device(u32* at, u32 value) {
#if PLATFORM_AMD
    return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    u32 before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(value) : "memory");
    return before;
#endif
}

// Within one block, in shared memory.
DEVICE void set_bits_shared(u32* at, u32 bits) {
#if PLATFORM_AMD
    __hip_atomic_fetch_or(at, bits, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
#else
    atomicOr(at, bits);
#endif
}

// Nothing comes back, so nobody waits for it. Within one device.
DEVICE void count_relaxed_device(u64* at, u64 value) {
#if PLATFORM_AMD
    __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
#endif
}

// Sets `at` to `value` if it is 0; returns the value before. Within one device.
DEVICE u32 claim_relaxed_device(u32* at, u32 value) {
#if PLATFORM_AMD
    u32 expected = 0;
    __hip_atomic_compare_exchange_strong(at, &expected, value, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    return expected;
#else
    u32 before;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, %2;" : "=r"(before) : "l"(at), "r"(value) : "memory");
    return before;
#endif
}

// Two words of 64 bits, each read and written whole, not both together. Each carries 32 bits and the flag that says that they are there.
struct Packet {
    u64 word[2];
};

DEVICE Packet load_packet(const void* at) {
    Packet p;
#if PLATFORM_AMD
    p.word[0] = __hip_atomic_load((const u64*)at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    p.word[1] = __hip_atomic_load((const u64*)at + 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#else
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(p.word[0]), "=l"(p.word[1]) : "l"(at) : "memory");
#endif
    return p;
}

DEVICE void store_packet(void* at, Packet p) {
#if PLATFORM_AMD
    __hip_atomic_store((u64*)at, p.word[0], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    __hip_atomic_store((u64*)at + 1, p.word[1], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#else
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(p.word[0]), "l"(p.word[1]) : "memory");
#endif
}

// A clock that runs the same for the whole device, in nanoseconds.
DEVICE u64 time_ns() {
#if PLATFORM_AMD
    return __builtin_readsteadycounter() * 10; // spec (AMD ISA, s_memrealtime): 100 MHz
#else
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
#endif
}
