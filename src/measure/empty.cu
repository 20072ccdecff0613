// Computes   Nothing: the floor of every launch.
// Layout     None.
// Work       None; any grid.
// Shared     None.
// Sync       Starts after the kernels that it depends on have ended, as every kernel here does.
// Requires   Nothing.
//
// Constants: THREADS, WORDS (of 8 bytes, of the parameters).

struct Parameters {
    u64 unused[WORDS];
};

KERNEL(THREADS) measure_empty(PARAMETERS(Parameters) p) {
    (void)p;
    wait_for_dependencies();
}
