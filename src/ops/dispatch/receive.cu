// Computes   nothing: the second half of a dispatch or replay, waits until every row for this rank is complete (6).
// Layout     counts: as route.cu wrote them. Words: layout.cuh.
// Work       one block, a thread per peer.
// Shared     nothing.
// Sync       done: polls, acquiring; pairs with the blocks of payload.cu on every peer.
// Requires   payload.cu of this bank with `waits` 0.

struct ReceiveParameters {
    const u32* counts;
    Rank me;
};
static_assert(sizeof(ReceiveParameters) == 8 + sizeof(Rank), "The host fills in the same struct.");

KERNEL_UNROUNDED(THREADS) receive(PARAMETERS(ReceiveParameters) p) {
    const Rank& me = p.me;
    const u32 peer = thread_idx();
    wait_for_dependencies();
    const u64 epoch = me.state->bank_epoch[me.bank];
    if (epoch == 0 || peer >= WORLD) return; // refused on all ranks
    bool failed = false;
    // sync done: acquire, pairs with the blocks of payload.cu on every peer
    if (p.counts[peer * NUM_WORDS + me.rank] != 0) wait_for<Words::DONE>(me, OP_DISPATCH, PHASE_ROWS, peer, word_at(me, me.rank, DONE, peer), epoch, failed);
    if (failed) report(me);
}
