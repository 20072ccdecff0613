// Bulk copies between global and shared memory (sm_90 and later; nothing elsewhere: a kernel chooses them by a constant and has another way). Needs
// platform.cuh. Addresses and sizes are multiples of 16. One thread issues; copies of one warp may be issued by several of its lanes.

// The address of shared memory as the instructions want it.
DEVICE u32 shared_address(const void* at) {
#if PLATFORM_HOPPER
    return (u32)__cvta_generic_to_shared(at);
#else
    return 0;
#endif
}

// A barrier that `count` arrivals and the bytes announced with them complete.
DEVICE void barrier_init(u64* barrier, u32 count) {
#if PLATFORM_HOPPER
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Global to shared; the barrier's phase completes when all bytes are there. One arrival.
DEVICE void bulk_load(void* to, const void* from, u32 num_bytes, u64* barrier) {
#if PLATFORM_HOPPER
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)), "l"(from), "r"(num_bytes),
                 "r"(shared_address(barrier))
                 : "memory");
#endif
}

// Until the phase of this parity is complete; its bytes are visible then.
DEVICE void barrier_wait(u64* barrier, u32 parity) {
#if PLATFORM_HOPPER
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "AGAIN_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN_%=;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
#endif
}

// Shared to global.
DEVICE void bulk_store(void* to, const void* from, u32 num_bytes) {
#if PLATFORM_HOPPER
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(num_bytes) : "memory");
#endif
}

// Closes this thread's group of stores.
DEVICE void bulk_commit() {
#if PLATFORM_HOPPER
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// All but the last N groups of this thread have read their source.
template <int N> DEVICE void bulk_wait_read() {
#if PLATFORM_HOPPER
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
#endif
}

// All stores of this thread are complete, and visible to it.
DEVICE void bulk_wait() {
#if PLATFORM_HOPPER
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

DEVICE char* dynamic_shared() {
#if PLATFORM_AMD
    return nullptr;
#else
    extern __shared__ __align__(128) char dynamic_bytes[];
    return dynamic_bytes;
#endif
}
