// Memory of a program that stays from one launch to the next, and a barrier of all blocks of a launch. Needs platform.cuh.
//
// The barrier is for launches whose blocks all run at the same time (cooperative ones).

// A variable of the program, zero at first.
#if PLATFORM_AMD
#define DEVICE_MEMORY static __attribute__((device))
#else
#define DEVICE_MEMORY __device__
#endif

// A word that other blocks change: one of its values, unordered.
DEVICE u32 load_changing(const u32* at) {
#if PLATFORM_AMD
    return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
#endif
}

// Adds to the arrivals; what this thread wrote or saw before is visible to whoever waits for them.
DEVICE void arrive(u32* arrivals, u32 weight) {
#if PLATFORM_AMD
    __hip_atomic_fetch_add(arrivals, weight, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
#else
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(arrivals), "r"(weight) : "memory");
#endif
}

// Until the arrivals, which may pass 2^32, are `target` at least.
DEVICE void wait_for_arrivals(const u32* arrivals, u32 target) {
    u32 value;
    do {
#if PLATFORM_AMD
        value = __hip_atomic_load(arrivals, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
#else
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(arrivals) : "memory");
#endif
    } while ((i32)(value - target) < 0);
}
