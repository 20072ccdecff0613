// Computes   Nothing, for a while: what stands in for work of others.
// Layout     None.
// Work       One thread watches the clock; any grid.
// Shared     None.
// Sync       Starts after the kernels that it depends on have ended.
// Requires   A time that somebody waits for.

struct Parameters {
    u64 nanoseconds;
};

KERNEL(THREADS) measure_delay(PARAMETERS(Parameters) p) {
    wait_for_dependencies();
    if (thread_idx() != 0) return;
    const u64 start = time_ns();
    while (time_ns() - start < p.nanoseconds) {
    }
}
