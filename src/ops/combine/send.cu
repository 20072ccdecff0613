// Computes   nothing: the first half of a combine, says that this rank's rows may be read (9). The second half is combine.cu, which says it again.
// Layout     words: layout.cuh.
// Work       one block, a thread per peer.
// Shared     nothing.
// Sync       ready: the posting threads fence, then store; pairs with the acquiring polls of combine.cu on every peer.
// Requires   the rows were complete when the kernel before this one ended.

struct SendParameters {
    Rank me;
};

KERNEL_UNROUNDED(THREADS) send(PARAMETERS(SendParameters) p) {
    const Rank& me = p.me;
    const u32 peer = thread_idx();
    wait_for_dependencies();
    if (peer >= WORLD) return;
    // sync ready: release, before this thread's first load
    release_system();
    const u64 epoch = me.state->bank_epoch[me.bank];
    if (epoch != 0) store_relaxed_system(word_at(me, peer, READY, me.bank * WORLD + me.rank), epoch);
}
