// Computes   out[t] = round(sum over the ranks that token t went to, ascending, of their rows + add_to[t]), in f32 (oracle::combine).
// Layout     every rank's rows at `rows_region`, ROW_BYTES of Wire each; sent, routing: as route.cu wrote them; out, add_to: [T, HIDDEN], 16-byte rows.
// Work       a warp takes a part of a token, UNROLL vectors of 16 bytes a lane, from up to GROUP ranks at a time. Every block waits, so the grid runs
//            at once (cooperative), or is small enough to.
// Shared     nothing.
// Sync       ready: block 0 fences at entry, then stores to each peer (9): the rows were complete when the kernel before this one ended; every block
//            polls and fences (10). Pairs with the same lines of every peer.
// Requires   the arrival of bank `me.bank` was filled and not combined since.

constexpr u32 NUM_WARPS = THREADS / WARP;
constexpr u32 ROW_VECTORS = ROW_BYTES / 16;
constexpr u32 PART_VECTORS = (ROW_VECTORS + PARTS - 1) / PARTS;
constexpr u32 STEP = UNROLL * WARP;
constexpr bool DIVIDES = ROW_VECTORS % (PARTS * STEP) == 0;
constexpr u32 GROUP = NUM_DESTINATIONS < MAX_GROUP ? NUM_DESTINATIONS : MAX_GROUP; // rows whose loads are in flight together
constexpr u32 VALUES = 16 / sizeof(Value);

struct CombineParameters {
    Rank me;
    const RoutingHead* routing;
    const u32* sent;
    const u32* counts;
    char* out;
    u64 out_stride; // bytes
    const char* add_to; // null: none
    u64 add_stride;
    u64 rows_region; // of the bank
    u32 max_rows;
    u32 spare;
};

DEVICE void widen_vector(Vec16 v, float (&out)[VALUES]) {
#pragma unroll
    for (u32 i = 0; i < VALUES; i++) {
        if constexpr (sizeof(Value) == 4) {
            out[i] = float_of(v.word[i]);
        } else {
            out[i] = widen(Value{(u16)(v.word[i / 2] >> i % 2 * 16)});
        }
    }
}

DEVICE Vec16 narrow_vector(const float (&values)[VALUES]) {
    Vec16 v;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        if constexpr (sizeof(Value) == 4) {
            v.word[i] = bits_of(values[i]);
        } else {
            v.word[i] = narrow_pair<Value>(values[2 * i], values[2 * i + 1]);
        }
    }
    return v;
}

KERNEL(THREADS) combine(PARAMETERS(CombineParameters) p) {
    const Rank& me = p.me;
    const u32 thread = thread_idx(), lane = thread % WARP;
    const u32 blocks = grid_blocks();
    wait_for_dependencies();
    u64 epoch = 0;
    if (WITH_SIGNALS) {
        // sync ready: release, pairs with the acquire below of every peer
        const bool posts = block_idx_x() == 0 && thread < WORLD;
        if (posts) fence_system();
        epoch = me.state->bank_epoch[me.bank];
        if (epoch == 0) return; // refused on all ranks: nobody waits
        if (posts) store_relaxed_system(word_at(me, thread, READY, me.bank * WORLD + me.rank), epoch);
    }
    const u32 num_items = p.routing->num_tokens * PARTS;
    bool has_failed = false;
    if (WITH_SIGNALS) {
        if (thread < WORLD && p.counts[me.rank * NUM_WORDS + thread] != 0) {
            has_failed = wait_for<false>(me, OP_COMBINE, PHASE_READY, thread, word_at(me, me.rank, READY, me.bank * WORLD + thread), epoch) == 0;
        }
        // sync ready: acquire
        if (thread < WORLD) fence_system();
        if (block_any(has_failed)) return;
    }
    for (u32 item = (block_idx_x() * THREADS + thread) / WARP; item < num_items; item += blocks * NUM_WARPS) {
        const u32 token = item / PARTS, part = item % PARTS;
        u32 slot = NONE;
        u64 memory = 0;
        if (lane < NUM_DESTINATIONS) {
            const u32 entry = p.sent[(u64)token * NUM_DESTINATIONS + lane];
            if (entry != NONE) {
                slot = p.routing->arrival_base[entry >> RANK_SHIFT] + (entry & POSITION_MASK);
                memory = me.peers[entry >> RANK_SHIFT];
                if (slot >= p.max_rows) slot = NONE;
            }
        }
        const u64 row_at = memory + p.rows_region + (u64)slot * ROW_BYTES;
        const u32 kept = (u32)lanes_where(slot != NONE);
        const u32 begin = part * PART_VECTORS;
        const u32 part_end = begin + PART_VECTORS < ROW_VECTORS ? begin + PART_VECTORS : ROW_VECTORS;
        for (u32 start = begin; start < part_end; start += STEP) {
            const u32 at = start + lane;
            float sum[UNROLL][VALUES];
            u32 rest = kept;
            bool is_first = true;
            while (rest != 0) {
                // As many loads in flight as the group has rows; then added in order.
                Vec16 v[GROUP][UNROLL];
                const u32 group = rest;
#pragma unroll
                for (u32 g = 0; g < GROUP; g++) {
                    if (rest == 0) break;
                    const char* from = (const char*)from_lane64(row_at, lowest_bit(rest));
                    rest &= rest - 1;
#pragma unroll
                    for (u32 u = 0; u < UNROLL; u++) {
                        if (DIVIDES || at + u * WARP < part_end) v[g][u] = load16_once(from + 16ull * (at + u * WARP));
                    }
                }
                u32 left = group;
#pragma unroll
                for (u32 g = 0; g < GROUP; g++) {
                    if (left == 0) break;
                    left &= left - 1;
#pragma unroll
                    for (u32 u = 0; u < UNROLL; u++) {
                        float values[VALUES];
                        widen_vector(v[g][u], values);
#pragma unroll
                        for (u32 i = 0; i < VALUES; i++) sum[u][i] = g == 0 && is_first ? values[i] : sum[u][i] + values[i];
                    }
                }
                is_first = false;
            }
            char* out = p.out + token * p.out_stride;
#pragma unroll
            for (u32 u = 0; u < UNROLL; u++) {
                if (!DIVIDES && at + u * WARP >= part_end) continue;
                Vec16 result;
                if (kept == 0) {
                    result = HAS_ADD ? load16(p.add_to + token * p.add_stride + 16ull * (at + u * WARP)) : Vec16{};
                } else {
                    if (HAS_ADD) {
                        float addend[VALUES];
                        widen_vector(load16(p.add_to + token * p.add_stride + 16ull * (at + u * WARP)), addend);
#pragma unroll
                        for (u32 i = 0; i < VALUES; i++) sum[u][i] = sum[u][i] + addend[i];
                    }
                    result = narrow_vector(sum[u]);
                }
                STREAM ? store16_streaming(out + 16ull * (at + u * WARP), result) : store16(out + 16ull * (at + u * WARP), result);
            }
        }
    }
}
