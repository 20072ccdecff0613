// Computes   nothing: says that every row of this rank is complete (5), when payload.cu left that to it, and waits until every row for this rank is (6): the
//            second half of a dispatch or replay, or the end of one of many rows.
// Layout     counts: as route.cu wrote them. Words: layout.cuh.
// Work       one block, a thread per peer.
// Shared     nothing.
// Sync       done: with `posts` the posting threads release, then store: rows were complete when the kernel before this one ended. Polls, acquiring; pairs with the
//            same lines and with the blocks of payload.cu on every peer.
// Requires   payload.cu of this bank, with RECEIVE_FOLLOWS or, before a receiving half, with `waits` 0.

struct ReceiveParameters {
    const u32* counts;
    u32 posts;    // 1: payload.cu has not said that the rows are complete
    u32 waits;    // 0: the waiting half is another launch
    u32 triggers; // 1: dependents may start before the rows of the peers are here (as of payload.cu)
    u32 spare;
    Rank me;
};
static_assert(sizeof(ReceiveParameters) == 24 + sizeof(Rank), "The host fills in the same struct.");

KERNEL_UNROUNDED(THREADS) receive(PARAMETERS(ReceiveParameters) p) {
    const Rank& me = p.me;
    const u32 peer = thread_idx();
    const bool talks = peer < WORLD;
    wait_for_dependencies();
    // sync done: release, before this thread's first load
    if (p.posts != 0 && talks) release_peers(me.is_one_device != 0);
    const u64 epoch = me.state->bank_epoch[me.bank];
    const u32 expected = p.waits != 0 && talks ? p.counts[peer * NUM_WORDS + me.rank] : 0; // arrivals from this peer
    if (epoch == 0) return; // refused on all ranks
    if (p.posts != 0 && talks) store_relaxed_system(word_at(me, peer, DONE, me.rank), epoch << EPOCH_SHIFT);
    if (p.triggers != 0) {
        // Only when all have posted: the first thread that lets dependents start does so for the block.
        block_barrier();
        launch_dependents();
    }
    bool failed = false;
    // sync done: acquire, pairs with the releases above and in payload.cu on every peer
    if (expected != 0) wait_for<Words::DONE>(me, OP_DISPATCH, PHASE_ROWS, peer, word_at(me, me.rank, DONE, peer), epoch, failed);
    if (failed) report(me);
}
