// Computes   every row of this rank's tokens, with its record, into its slot at each destination; says that they are complete; waits until those for
//            this rank are (oracle::dispatch, ByToken; the expert layouts' transit records and first rows).
// Layout     x rows of ROW_BYTES, x_stride bytes apart, 16-byte aligned; sent, records, routing: as route.cu wrote them; every rank's bank: regions
//            x [max_rows, ROW_BYTES] and records [max_rows, RECORD_BYTES] at their offsets, the same on all ranks.
// Work       a warp takes a part of a row: PARTS parts of each token, UNROLL vectors of 16 bytes a lane at a time; read once, written to each
//            destination. Any grid: only the block that stores last signals and waits.
// Shared     nothing but the flag of the last block.
// Sync       done: every block fences and counts itself (4); the last one fences, then one thread per peer stores (5) and waits (6); then it fences.
//            Pairs with the same lines of every peer.
// Requires   slots below max_rows or the row is left out; route.cu of this epoch has ended (waited for): its acquire covers the credit.

constexpr u32 NUM_WARPS = THREADS / WARP;
constexpr u32 ROUTE_BYTES = (8 + 8 * K + 15) / 16 * 16;
constexpr u32 ROUTE_VECTORS = ROUTE_BYTES / 16;
constexpr u32 ROW_VECTORS = ROW_BYTES / 16;
constexpr u32 PART_VECTORS = (ROW_VECTORS + PARTS - 1) / PARTS;
constexpr u32 STEP = UNROLL * WARP;
constexpr bool DIVIDES = ROW_VECTORS % (PARTS * STEP) == 0; // no vector beyond the part: no tests
static_assert(ROW_BYTES % 16 == 0, "Rows are copied in vectors of 16 bytes.");

struct PayloadParameters {
    Rank me;
    const char* x;
    u64 x_stride;
    const RoutingHead* routing;
    const u32* sent;
    const char* records;
    const BankHead* arrival;
    const u32* counts;
    u64 x_region;       // offsets in every rank's memory, of the bank of this call
    u64 record_region;
    u32 max_rows;
    u32 waits; // 0: the waiting half is another launch
};

DEVICE Vec16 load_row(const char* at) {
    return STREAM ? load16_streaming(at) : load16(at);
}

DEVICE void store_row(char* at, Vec16 v) {
    STREAM ? store16_streaming(at, v) : store16(at, v);
}

KERNEL(THREADS) payload(PARAMETERS(PayloadParameters) p) {
    SHARED u32 is_last;
    const Rank& me = p.me;
    const u32 thread = thread_idx(), lane = thread % WARP;
    const u32 blocks = grid_blocks();
    wait_for_dependencies();
    const u64 epoch = me.state->bank_epoch[me.bank];
    if (epoch == 0) return; // refused on all ranks
    const u32 num_items = p.routing->num_tokens * PARTS;
    u32 item = (block_idx_x() * THREADS + thread) / WARP;
    for (; item < num_items; item += blocks * NUM_WARPS) {
        const u32 token = item / PARTS, part = item % PARTS;
        const char* from = p.x + token * p.x_stride;
        const u32 begin = part * PART_VECTORS;
        const u32 part_end = begin + PART_VECTORS < ROW_VECTORS ? begin + PART_VECTORS : ROW_VECTORS;
        Vec16 v[UNROLL];
        if (WITH_ROWS) {
#pragma unroll
            for (u32 u = 0; u < UNROLL; u++) {
                const u32 at = begin + u * WARP + lane;
                if (DIVIDES || at < part_end) v[u] = load_row(from + 16ull * at);
            }
        }
        // Lane d has destination d: its slot and the start of its memory.
        u32 slot = NONE;
        u64 memory = 0;
        if (lane < NUM_DESTINATIONS) {
            const u32 entry = p.sent[(u64)token * NUM_DESTINATIONS + lane];
            if (entry != NONE) {
                slot = p.routing->arrival_base[entry >> RANK_SHIFT] + (entry & POSITION_MASK);
                memory = me.peers[entry >> RANK_SHIFT];
                if (slot >= p.max_rows) slot = NONE; // dropped
            }
        }
        const u64 row_at = memory + p.x_region + (u64)slot * ROW_BYTES;
        const u32 kept = (u32)lanes_where(slot != NONE);
        if (WITH_ROWS) {
            for (u32 at = begin + lane;;) {
                for (u32 rest = kept; rest != 0; rest &= rest - 1) {
                    char* to = (char*)from_lane64(row_at, lowest_bit(rest));
#pragma unroll
                    for (u32 u = 0; u < UNROLL; u++) {
                        if (DIVIDES || at + u * WARP < part_end) store_row(to + 16ull * (at + u * WARP), v[u]);
                    }
                }
                at += STEP;
                if (at - lane >= part_end) break;
#pragma unroll
                for (u32 u = 0; u < UNROLL; u++) {
                    if (DIVIDES || at + u * WARP < part_end) v[u] = load_row(from + 16ull * (at + u * WARP));
                }
            }
        }
        if (WITH_RECORDS && part == 0) {
            const u64 record_at = memory + p.record_region + (u64)slot * RECORD_BYTES;
            const char* record = p.records + (u64)token * ROUTE_BYTES;
            // A lane for each (destination, vector).
#pragma unroll
            for (u32 i = 0; i < NUM_DESTINATIONS * ROUTE_VECTORS; i += WARP) {
                const u32 destination = (i + lane) / ROUTE_VECTORS, vector = (i + lane) % ROUTE_VECTORS;
                char* to = (char*)from_lane64(record_at, destination % WARP);
                if (destination < NUM_DESTINATIONS && kept >> destination & 1) store_row(to + 16 * vector, load16(record + 16 * vector));
            }
        }
    }
    if (!WITH_SIGNALS) return;
    // sync done: release; every block's rows, then the last block's words
    block_barrier();
    if (thread == 0) {
        fence_system();
        is_last = add_relaxed_device(&me.state->arrived, 1) == blocks - 1;
        if (is_last) {
            me.state->arrived = 0;
            fence_system();
        }
    }
    block_barrier();
    if (!is_last) return;
    for (u32 peer = thread; peer < WORLD; peer += THREADS) store_relaxed_system(word_at(me, peer, DONE, me.rank), epoch);
    if (p.waits == 0) return;
    // (6)
    for (u32 peer = thread; peer < WORLD; peer += THREADS) {
        if (p.counts[peer * NUM_WORDS + me.rank] != 0) wait_for<false>(me, OP_DISPATCH, PHASE_ROWS, peer, word_at(me, me.rank, DONE, peer), epoch);
    }
    // sync done: acquire, pairs with the release above on every peer
    if (thread < WORLD) fence_system();
}
