// Computes   nothing but time: NUM_ROUNDS times a word goes to the other GPU and one comes back.
// Layout     own: the word that this GPU polls, in its own memory; other: that of the other GPU; result: a word of this GPU, 0 before. At 8-byte boundaries.
// Work       one thread on each of two GPUs: one begins, the other answers. Round 0 only lets both arrive.
// Shared     None.
// Sync       turn: each word has one writer, which stores epochs that only grow; polls compare with >=, so no value of an earlier call counts. A wait
//            longer than timeout_ns ends the kernel, and the result stays 0.
// Requires   the other GPU's kernel with the same epoch, in flight at the same time; epochs above those of all earlier calls.

struct Parameters {
    u64* own;
    u64* other;
    u64* result; // nanoseconds of rounds 1 to NUM_ROUNDS
    u64 epoch;   // of round 0
    u64 timeout_ns;
    u64 begins; // 1: this one stores first
};
static_assert(sizeof(Parameters) == 48, "The host's struct has six words of 64 bits.");

DEVICE void send(u64* word, u64 epoch) {
    // sync turn: release, pairs with the acquire of the other GPU's poll
    release_system();
    store_relaxed_system(word, epoch);
}

DEVICE bool has_come(const u64* word, u64 epoch, u64 timeout_ns) {
    u64 start = 0;
    for (u32 polls = 0;; polls++) {
        // sync turn: acquire, pairs with the release of the other GPU
        if (load_acquire_system(word) >= epoch) return true;
        if (polls % 32 != 31) continue; // arbitrary: the clock is not read between a word and its answer
        if (start == 0) start = time_ns();
        if (time_ns() - start > timeout_ns) return false;
    }
}

KERNEL(THREADS) measure_link_signal(PARAMETERS(Parameters) p) {
    wait_for_dependencies();
    if (thread_idx() != 0) return;
    u64 start = 0;
    for (u64 round = 0; round <= NUM_ROUNDS; round++) {
        if (p.begins) send(p.other, p.epoch + round);
        if (!has_come(p.own, p.epoch + round, p.timeout_ns)) return;
        if (!p.begins) send(p.other, p.epoch + round);
        if (round == 0) start = time_ns();
    }
    const u64 time = time_ns() - start;
    *p.result = time > 0 ? time : 1;
}
