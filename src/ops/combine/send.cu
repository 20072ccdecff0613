// Computes   nothing: says that this rank's rows may be read (9), the first half of a combine. With WAITS also the wait of the second half: that of the ranks
//            to which this rank's tokens went have said so (10); then combine.cu reads without a wait, in a grid of any size.
// Layout     counts: as route.cu wrote them. Words: layout.cuh.
// Work       one block, a thread per peer.
// Shared     nothing.
// Sync       ready: the posting threads fence, then store; pairs with the acquiring polls of this kernel and of combine.cu on every peer. With WAITS
//            polls, acquiring: what the kernel behind this one reads is ordered by the end of this one.
// Requires   the rows were complete when the kernel before this one ended.

struct SendParameters {
    const u32* counts; // WAITS
    Rank me;
};
static_assert(sizeof(SendParameters) == 8 + sizeof(Rank), "The host fills in the same struct.");

KERNEL_UNROUNDED(THREADS) send(PARAMETERS(SendParameters) p) {
    const Rank& me = p.me;
    const u32 peer = thread_idx();
    const bool talks = peer < WORLD;
    wait_for_dependencies();
    // sync ready: release, before this thread's first load
    if (talks) release_peers(me.is_one_device != 0);
    const u64 epoch = me.state->bank_epoch[me.bank];
    const u32 expected = WAITS && talks ? p.counts[me.rank * NUM_WORDS + peer] : 0;
    if (epoch == 0) return; // refused on all ranks
    if (talks) store_relaxed_system(word_at(me, peer, READY, me.bank * WORLD + me.rank), epoch);
    if (!WAITS) return;
    bool failed = false;
    // sync ready: acquire
    const bool has_failed = expected != 0 && wait_for<Words::READY>(me, OP_COMBINE, PHASE_READY, peer, word_at(me, me.rank, READY, me.bank * WORLD + peer), epoch, failed) == 0;
    if (has_failed) me.state->bank_epoch[me.bank] = 0; // combine.cu reads nothing
    // Only when all have: the first thread that lets dependents start does so for the block, and they would take the places of what the others wait for.
    block_barrier();
    launch_dependents();
    if (failed) report(me);
}
