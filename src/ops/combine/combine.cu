// Computes   out[t] = round(sum of token t's rows + add_to[t]), in f32; the rows of the ranks that it went to, ascending, or with EACH_ROUTE of its
//            experts, ascending (weighted: w * v, then fma); oracle::combine. With FOLDS also the weights of its routes, from their rows.
// Layout     every rank's rows at `rows_region`, WIRE_ROW_BYTES each; sent, records, rows, places, routing: as route.cu wrote them; out, add_to:
//            [T, HIDDEN], 16-byte rows.
// Work       a warp takes a part of a token, UNROLL vectors of the result a lane, from up to GROUP rows at a time. WITH_SIGNALS every block waits, so the
//            grid runs at once: the registry of the device sees to it. Without, send.cu has waited, and any grid will do.
// Shared     the epoch.
// Sync       WITH_SIGNALS ready: the last threads of block 0 release at entry, then store to each peer (9): the rows were complete when the kernel before this one
//            ended; every block polls, acquiring (10). Pairs with the same lines of every peer.
// Requires   the arrival of bank `me.bank` was filled and not combined since.

constexpr u32 NUM_WARPS = THREADS / WARP;
constexpr u32 VALUES = Vector<Value>::SIZE;               // of the result in a lane's vector
constexpr u32 OUT_VECTORS = Y_ROW_BYTES / 16;
constexpr u32 PART_VECTORS = (OUT_VECTORS + PARTS - 1) / PARTS;
constexpr u32 STEP = UNROLL * WARP;
constexpr bool DIVIDES = OUT_VECTORS % (PARTS * STEP) == 0;
constexpr u32 PIECE_WORDS = VALUES * sizeof(Wire) / 4; // of a row on the wire for one vector of the result
constexpr u32 MOST_TERMS = EACH_ROUTE ? K : NUM_DESTINATIONS;
constexpr u32 GROUP = MOST_TERMS < MAX_GROUP ? MOST_TERMS : MAX_GROUP; // rows whose loads are in flight together
constexpr u32 ROUTE_BYTES = (8 + 8 * K + 15) / 16 * 16;

struct CombineParameters {
    const RoutingHead* routing;
    const u32* sent;
    const u32* counts;
    char* out;
    u64 out_stride;     // bytes
    const char* add_to; // HAS_ADD
    u64 add_stride;     // bytes
    u64 rows_region;    // of the bank
    u64 fold_region;    // of the bank; f32 [rows, ROW_K]
    float* folded;      // FOLDS: [T, K]
    u64 folded_stride;  // elements
    const char* records;
    const u32* rows;     // expert layouts
    const Place* places; // expert layouts
    u32 max_rows;
    u32 max_tokens;
    Rank me;
};
static_assert(sizeof(CombineParameters) == 120 + sizeof(Rank), "The host fills in the same struct.");

struct Wired {
    u32 word[PIECE_WORDS];
    u32 scale[1]; // BLOCK_SCALES
};

DEVICE void load_wired(Wired& w, const char* row, u32 at) {
    const char* from = row + (u64)PIECE_WORDS * 4 * at;
    if constexpr (PIECE_WORDS % 4 == 0) {
#pragma unroll
        for (u32 i = 0; 4 * i < PIECE_WORDS; i++) {
            const Vec16 v = load16_once(from + 16 * i);
#pragma unroll
            for (u32 j = 0; j < 4; j++) w.word[4 * i + j] = v.word[j];
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < PIECE_WORDS; i++) w.word[i] = ((const u32*)from)[i];
    }
    if constexpr (BLOCK_SCALES) w.scale[0] = ((const u32*)(row + WIRE_SCALES))[at * VALUES / SCALE_BLOCK];
}

DEVICE void widen_wired(const Wired& w, float (&values)[VALUES]) {
    widen_words<Wire, VALUES>(w.word, values);
#pragma unroll
    for (u32 i = 0; BLOCK_SCALES && i < VALUES; i++) values[i] = values[i] * float_of(w.scale[0]);
}

// What lane i keeps of term i.
struct Term {
    u64 row;
    u32 weight;
};

DEVICE u64 wire_row(const CombineParameters& p, u64 memory, u32 slot) {
    return memory + p.rows_region + (u64)slot * WIRE_ROW_BYTES;
}

// The slot of lane r's route, NONE if it has none, and the memory of the rank that has it.
DEVICE u32 route_slot(const CombineParameters& p, u32 token, u32 lane, u32& expert, u32& owner, u32& weight) {
    expert = owner = NONE;
    weight = 0;
    if (lane >= K) return NONE;
    const u32* record = (const u32*)(p.records + (u64)token * ROUTE_BYTES);
    expert = record[2 + lane];
    weight = record[2 + K + lane];
    if (expert == NONE) return NONE;
    owner = owner_of(p.me, expert);
    const Place place = p.places[expert];
    const u32 position = p.rows[(u64)token * K + lane];
    return position < place.room ? place.slot + position : NONE;
}

// The terms of a token in the order in which they are added; returns how many.
DEVICE u32 make_terms(const CombineParameters& p, const LaneRanks& ranks, u32 token, u32 lane, u32 entry, Term& term) {
    term = {0, 0};
    if constexpr (!BY_EXPERT) {
        const Destination to = destination_of(p.me, p.routing, ranks, entry);
        const bool is_kept = to.arrival < p.max_rows; // else dropped, or none
        if (!MAY_DROP) {
            term.row = wire_row(p, to.memory, to.arrival);
            return num_bits(lanes_where(is_kept));
        }
        // Dropped rows leave no gaps: term i is the i-th that is kept.
        u32 rest = (u32)lanes_where(is_kept), num = 0;
        const u64 row = wire_row(p, to.memory, to.arrival);
        for (; rest != 0; rest &= rest - 1, num++) {
            const u64 value = from_lane64(row, lowest_bit(rest));
            if (lane == num) term.row = value;
        }
        return num;
    } else {
        u32 expert, owner, weight;
        const u32 slot = route_slot(p, token, lane, expert, owner, weight);
        // With EACH_ROUTE every kept route is a term; otherwise the first kept one of each rank, where its sum is.
        u32 key = slot == NONE ? NONE : EACH_ROUTE ? expert : owner;
        if (!EACH_ROUTE) {
            for (u32 r = 0; r < K; r++) {
                const u32 other = from_lane(key, r);
                if (r < lane && other == key) key = NONE;
            }
        }
        const u64 row = slot == NONE ? 0 : wire_row(p, p.me.peers[owner], slot);
        u32 position = 0;
        for (u32 r = 0; r < K; r++) position += from_lane(key, r) < key;
        const u32 num = num_bits(lanes_where(key != NONE));
        for (u32 i = 0; i < num; i++) {
            const u32 from = lowest_bit((u32)lanes_where(key != NONE && position == i));
            const u64 value = from_lane64(row, from);
            const u32 w = from_lane(weight, from);
            if (lane == i) term = {value, w};
        }
        return num;
    }
}

// The weights of a token's routes, from the rows that carry them.
DEVICE void fold(const CombineParameters& p, const LaneRanks& ranks, u32 token, u32 lane, u32 entry) {
    u32 slot = NONE;
    u64 memory = 0;
    if constexpr (BY_EXPERT != 0) {
        u32 expert, owner, weight;
        slot = route_slot(p, token, lane, expert, owner, weight);
        memory = slot == NONE ? 0 : p.me.peers[owner];
    } else {
        const Destination to = destination_of(p.me, p.routing, ranks, entry);
        const u32 expert = lane < K ? ((const u32*)(p.records + (u64)token * ROUTE_BYTES))[2 + lane] : NONE;
        const u32 owner = expert == NONE ? NONE : owner_of(p.me, expert);
        for (u32 d = 0; d < NUM_DESTINATIONS; d++) {
            const u32 rank = from_lane(to.rank, d), arrival = from_lane(to.arrival, d);
            const u64 at = from_lane64(to.memory, d);
            if (owner != NONE && rank == owner && arrival < p.max_rows) {
                slot = arrival;
                memory = at;
            }
        }
    }
    if (lane >= K) return;
    const float* from = (const float*)(memory + p.fold_region);
    p.folded[token * p.folded_stride + lane] = slot == NONE ? 0.0f : from[(u64)slot * ROW_K + (BY_EXPERT ? 0 : lane)];
}

DEVICE void store_result(char* at, Vec16 v) {
    STREAM ? store16_once(at, v) : store16(at, v);
}

KERNEL_UNROUNDED(THREADS) combine(PARAMETERS(CombineParameters) p) {
    SHARED u64 shared_epoch;
    const Rank& me = p.me;
    const u32 thread = thread_idx(), lane = thread % WARP;
    const u32 stride = grid_blocks() * NUM_WARPS;
    u32 item = (block_idx_x() * THREADS + thread) / WARP;
    wait_for_dependencies();
    // What does not depend on each other is asked for together; the posting threads fence meanwhile.
    u64 epoch = WITH_SIGNALS ? 0 : me.state->bank_epoch[me.bank];
    const u32 num_items = p.routing->num_tokens * PARTS;
    const LaneRanks ranks = load_lane_ranks(me, p.routing, lane);
    u32 entry = lane < NUM_DESTINATIONS && item / PARTS < p.max_tokens ? p.sent[(u64)(item / PARTS) * NUM_DESTINATIONS + lane] : NONE;
    bool has_failed = false, failed = false;
    if (WITH_SIGNALS) {
        // The last threads post, and fence while the others load; the first poll.
        const u32 talker = THREADS - 1 - thread;
        const bool talks = block_idx_x() == 0 && talker < WORLD;
        // sync ready: release, pairs with the acquire below of every peer
        if (talks) release_peers(me.is_one_device != 0);
        u32 expected = 0;
        if (thread < WORLD) {
            expected = p.counts[me.rank * NUM_WORDS + thread];
            if (thread == 0) shared_epoch = me.state->bank_epoch[me.bank];
        }
        block_barrier();
        epoch = shared_epoch;
        if (talks && epoch != 0) store_relaxed_system(word_at(me, talker, READY, me.bank * WORLD + me.rank), epoch);
        // sync ready: acquire
        if (expected != 0 && epoch != 0) has_failed = wait_for<Words::READY>(me, OP_COMBINE, PHASE_READY, thread, word_at(me, me.rank, READY, me.bank * WORLD + thread), epoch, failed) == 0;
        if (block_any(has_failed)) item = NONE; // reads nothing
    }
    // Nothing here waits for a peer any more, so a dependent may take the place.
    launch_dependents();
    if (epoch == 0) return; // refused on all ranks: nobody waits
    while (item < num_items) {
        const u32 token = item / PARTS, part = item % PARTS;
        Term term;
        const u32 num_terms = make_terms(p, ranks, token, lane, entry, term);
        if (FOLDS && part == 0) fold(p, ranks, token, lane, entry);
        item += stride;
        entry = lane < NUM_DESTINATIONS && item < num_items ? p.sent[(u64)(item / PARTS) * NUM_DESTINATIONS + lane] : NONE;
        const u32 begin = part * PART_VECTORS;
        const u32 end = begin + PART_VECTORS < OUT_VECTORS ? begin + PART_VECTORS : OUT_VECTORS;
        char* out = p.out + token * p.out_stride;
        const char* add_to = p.add_to + token * p.add_stride;
        for (u32 at = begin + lane; at - lane < end; at += STEP) {
            float sum[UNROLL][VALUES];
            for (u32 first = 0; first < num_terms; first += GROUP) {
                // As many loads in flight as the group has rows; then added in order.
                Wired v[GROUP][UNROLL];
#pragma unroll
                for (u32 g = 0; g < GROUP; g++) {
                    if (first + g >= num_terms) break;
                    const char* row = (const char*)from_lane64(term.row, first + g);
#pragma unroll
                    for (u32 u = 0; u < UNROLL; u++) {
                        if (DIVIDES || at + u * WARP < end) load_wired(v[g][u], row, at + u * WARP);
                    }
                }
#pragma unroll
                for (u32 g = 0; g < GROUP; g++) {
                    if (first + g >= num_terms) break;
                    const float weight = WEIGHTED && EACH_ROUTE ? float_of(from_lane(term.weight, first + g)) : 1.0f;
                    const bool is_first = g == 0 && first == 0;
#pragma unroll
                    for (u32 u = 0; u < UNROLL; u++) {
                        float values[VALUES];
                        widen_wired(v[g][u], values);
#pragma unroll
                        for (u32 i = 0; i < VALUES; i++) {
                            if (WEIGHTED && EACH_ROUTE) {
                                sum[u][i] = is_first ? weight * values[i] : fma_rn(weight, values[i], sum[u][i]);
                            } else {
                                sum[u][i] = is_first ? values[i] : sum[u][i] + values[i];
                            }
                        }
                    }
                }
            }
#pragma unroll
            for (u32 u = 0; u < UNROLL; u++) {
                const u32 to = at + u * WARP;
                if (!DIVIDES && to >= end) continue;
                Vec16 result = Vec16{};
                if (HAS_ADD) {
                    // add_to has elements of Addend: those of the result, or f32.
                    float addend[VALUES];
                    constexpr u32 SIZE = Vector<Addend>::SIZE;
#pragma unroll
                    for (u32 i = 0; i < VALUES / SIZE; i++) {
                        const Vec16 v = load16(add_to + 16ull * (to * (VALUES / SIZE) + i));
                        if (SIZE == VALUES) result = v;
                        Vector<Addend>::widen_all(v, addend + i * SIZE);
                    }
#pragma unroll
                    for (u32 i = 0; i < VALUES; i++) sum[u][i] = num_terms == 0 ? addend[i] : sum[u][i] + addend[i];
                    if (num_terms != 0 || SIZE != VALUES) result = Vector<Value>::narrow_all(sum[u]); // alone, add_to keeps its bits
                } else if (num_terms != 0) {
                    result = Vector<Value>::narrow_all(sum[u]);
                }
                store_result(out + 16ull * to, result);
            }
        }
    }
    if (failed) report(me);
}
