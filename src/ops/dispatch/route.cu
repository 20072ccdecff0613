// Computes   which ranks each token goes to and at which position, and this rank's counts; exchanges counts with all ranks; from the whole count
//            matrix the first slot of this rank at every receiver (oracle::dispatch). Replay: the exchange alone.
// Layout     topk_idx [T, K] of Index, topk_weights f32 [T, K] or null; routing: head, sent [T, NUM_DESTINATIONS] ascending rank then NONE, records
//            [T, ROUTE_BYTES] as they travel, counts [WORLD, NUM_WORDS]; bank: BankHead. Words: layout.cuh.
// Work       a grid of 1 to MAX_BLOCKS blocks that run at once, each a run of tokens, a thread per token; block 0 talks to the peers. The others warm rows of x; with
//            SMALL they do nothing else and need not run at once.
// Shared     totals by warp and by block, the count matrix: struct Shared.
// Sync       counts: the posting threads of block 0 release at entry (nothing that this kernel does is released by these words, only what came before
//            it), then store; pairs with the acquiring polls of every peer (2, 3). blocks: words tagged with the epoch, released by nothing.
// Requires   T <= max_tokens or the refusal path; SMALL: one block routes, T <= TILE (half the code, all of it in use: 0.5 us); THREADS a multiple of WARP; the kernel before this one in the stream has ended (waited for).

constexpr u32 MAX_BLOCKS = 16; // measured (H200, 2 ranks, 4096 tokens, neither rows nor records): 11.0 us with 8 blocks, 9.0 with 16

struct RouteParameters {
    Call call;
    u64* block_words; // [MAX_BLOCKS, NUM_WORDS]
    const char* x;    // of the payload behind this kernel
    u64 x_stride;
    u32 x_row_bytes;
    u32 warm_rows; // the first so many rows are asked into the second-level cache
    Rank me;
};
static_assert(sizeof(RouteParameters) == 176 + sizeof(Rank), "The host fills in the same struct.");

static_assert(THREADS >= 2 * WARP, "The second warp has work of its own.");
constexpr u32 TILE = MOST_TILE < THREADS ? MOST_TILE : THREADS; // tokens routed at a time

struct Shared {
    u32 warp_totals[NUM_WARPS][WORLD];
    u32 block_totals[MAX_BLOCKS][WORLD];
    u32 matrix[WORLD][WORLD];
    Decision decision;
    u64 epoch;
    u32 aborted;
    u32 problem;
    // Expert layouts.
    ExpertTile<TILE> experts;
    u32 expert_totals[EXPERTS]; // of this block; in block 0 then of this rank
    u32 expert_rows[EXPERTS];   // of all ranks
};

DEVICE void store_totals(Shared& s, u32 warp, u32 lane, u32 low, u32 high) {
    if (lane < WORLD) s.warp_totals[warp][lane] = low;
    if (WORLD > WARP && lane + WARP < WORLD) s.warp_totals[warp][lane + WARP] = high;
}

constexpr u32 WARPS_AT_ONCE = PLATFORM_AMD ? 1 : NUM_WARPS; // as MASKS_AT_ONCE
constexpr u32 BLOCKS_AT_ONCE = PLATFORM_AMD ? 1 : MAX_BLOCKS;

DEVICE u32 total_below(const Shared& s, u32 warp, u32 rank) {
    u32 sum = 0;
#pragma unroll WARPS_AT_ONCE
    for (u32 w = 0; w < NUM_WARPS; w++) sum += w < warp ? s.warp_totals[w][rank] : 0;
    return sum;
}

// With many tokens what is kept is stored whole sectors at a time: the lists delay the peers' words (measured, H200, 4096 tokens: neither rows nor records
// 9.2 to 8.7 us at 2 ranks, the whole dispatch 774 to 772 at 8; with few tokens no faster). A token's destinations are collected in registers, a warp's records in
// shared memory. Of many destinations or routes there is no room.
constexpr bool LISTS_WHOLE = !SMALL && NUM_DESTINATIONS <= 8 && (NUM_DESTINATIONS & (NUM_DESTINATIONS - 1)) == 0; // 8: arbitrary
constexpr u32 ROUTE_VECTORS = ROUTE_BYTES / 16;
constexpr u32 STAGED_BYTES = 40960; // derived: with `Shared` of 8 ranks below 48 KB of static shared memory
constexpr bool RECORDS_WHOLE = !SMALL && !BY_EXPERT && WORLD <= 16 && THREADS * ROUTE_BYTES <= STAGED_BYTES;
struct alignas(LISTS_WHOLE ? (NUM_DESTINATIONS < 4 ? 4 * NUM_DESTINATIONS : 16) : 4) List {
    u32 entry[NUM_DESTINATIONS];
};

DEVICE void append(List& list, u32 num, u32 entry) {
#pragma unroll
    for (u32 i = 0; i < NUM_DESTINATIONS; i++) list.entry[i] = i == num ? entry : list.entry[i];
}

// Memory is idle while words travel, so the first rows of the payload are read then: part `part` of `parts`, first rows first. Nothing is written, and a row that
// nobody wants costs its reading.
constexpr u32 LINE_BYTES = 128; // spec: a line of the second-level cache

DEVICE void warm(const RouteParameters& p, u32 part, u32 parts) {
    const u32 lines = (p.x_row_bytes + LINE_BYTES - 1) / LINE_BYTES;
    for (u32 i = part * THREADS + thread_idx(); i < p.warm_rows * lines; i += parts * THREADS) prefetch(p.x + i / lines * p.x_stride + i % lines * LINE_BYTES);
}

KERNEL_UNROUNDED(THREADS) route(PARAMETERS(RouteParameters) p) {
    SHARED Shared s;
    SHARED Vec16 staged[RECORDS_WHOLE ? THREADS * ROUTE_VECTORS : 1];
    const Rank& me = p.me;
    const Call& call = p.call;
    const u32 thread = thread_idx(), lane = thread % WARP, warp = thread / WARP;
    const u32 block = SMALL ? 0 : block_idx_x(), blocks = SMALL ? 1 : grid_blocks();
    // The last threads talk to the peers: few tokens leave them free, and the fence overlaps what the others load.
    const u32 talker = THREADS - 1 - thread;
    wait_for_dependencies();
    if (SMALL && !REPLAY && block_idx_x() != 0) {
        warm(p, block_idx_x() - 1, grid_blocks() - 1);
        return;
    }
    // Dependents start when every block has said so or ended: the first one says it for the grid.
    if (block != 0) launch_dependents();
    // sync counts: release, before this thread's first load; pairs with the acquire below on every peer
    if (block == 0 && talker < WORLD * NUM_WORDS) release_peers(me.is_one_device != 0);
    // Asked for here, used when the tokens are counted.
    const u64 last_epoch = thread == WARP ? me.state->epoch : 0;
    const bool was_aborted = thread == WARP && is_aborted(me);
    u32 num_tokens = REPLAY ? call.routing->num_tokens : call.device_tokens ? *call.device_tokens : call.num_tokens;
    const bool is_oversize = num_tokens > call.most_tokens;
    const u32 asked = num_tokens;
    if (is_oversize) num_tokens = 0;

    const u32 chunk = blocks == 1 ? num_tokens : (num_tokens + blocks - 1) / blocks;
    const u32 first = chunk * block < num_tokens ? chunk * block : num_tokens;
    const u32 end = first + chunk < num_tokens ? first + chunk : num_tokens;
    const u32 num_tiles = SMALL ? 1 : (end - first + TILE - 1) / TILE;
    Routes routes = {};
    u64 mask = 0;
    for (u32 e = thread; BY_EXPERT && e < EXPERTS; e += THREADS) {
        s.expert_totals[e] = 0;
        s.expert_rows[e] = 0;
        s.experts.running[e] = 0;
    }
    if (BY_EXPERT) block_barrier();
    if (!REPLAY) {
        u32 low = 0, high = 0;
        for (u32 tile = 0; tile < num_tiles; tile++) {
            const u32 token = first + tile * TILE + thread;
            const bool has_token = thread < TILE && token < end;
            mask = has_token ? destinations(me, call, token, routes) : 0;
            count_lanes(mask, lane, low, high);
            if (BY_EXPERT && has_token) {
#pragma unroll
                for (u32 r = 0; r < K; r++) {
                    if (routes.ids[r] >= 0) add_shared(&s.expert_totals[routes.ids[r]], 1);
                }
            }
        }
        store_totals(s, warp, lane, low, high);
    }
    if (thread == WARP) {
        s.epoch = last_epoch + 1;
        s.aborted = was_aborted;
        s.problem = was_aborted ? FAILED : 0;
    }
    block_barrier();
    const u64 epoch = s.epoch;
    const bool aborted = s.aborted;
    u32 problem = 0;
    bool failed = false;
    // Totals of every block, as far as this block needs them.
    if (!REPLAY && blocks > 1) {
        if (thread < WORLD) store_relaxed_device(p.block_words + block * NUM_WORDS + thread, epoch << EPOCH_SHIFT | total_below(s, NUM_WARPS, thread));
        const u32 needed = block == 0 ? blocks : block;
#pragma unroll 1
        for (u32 i = thread; i < needed * WORLD; i += THREADS) {
            const u32 b = i / WORLD, r = i % WORLD;
            // sync blocks: polls of words that carry what they say
            const u64 word = wait_for<Words::COUNT>(me, OP, PHASE_BLOCKS, me.rank, p.block_words + b * NUM_WORDS + r, epoch, failed);
            if (word == 0) problem |= FAILED;
            s.block_totals[b][r] = (u32)(word & ((1 << EPOCH_SHIFT) - 1));
        }
        if (BY_EXPERT) {
            for (u32 e = thread; e < EXPERTS; e += THREADS) store_relaxed_device(p.block_words + block * NUM_WORDS + WORLD + e, epoch << EPOCH_SHIFT | s.expert_totals[e]);
            block_barrier();
            // Rows of lower blocks; block 0 instead adds up the whole rank.
            for (u32 i = thread + (block == 0 ? EXPERTS : 0); i < needed * EXPERTS; i += THREADS) {
                const u32 b = i / EXPERTS, e = i % EXPERTS;
                // sync blocks: as above
                const u64 word = wait_for<Words::COUNT>(me, OP, PHASE_BLOCKS, me.rank, p.block_words + b * NUM_WORDS + WORLD + e, epoch, failed);
                if (word == 0) problem |= FAILED;
                add_shared(block == 0 ? &s.expert_totals[e] : &s.experts.running[e], (u32)(word & ((1 << EPOCH_SHIFT) - 1)));
            }
        }
        block_barrier();
        if (block != 0) warm(p, block - 1, blocks - 1);
    }
    const auto own_count = [&](u32 r) {
        if (REPLAY) return call.counts[me.rank * NUM_WORDS + r];
        if (r >= WORLD) return s.expert_totals[r - WORLD < EXPERTS ? r - WORLD : 0];
        if (blocks == 1) return total_below(s, NUM_WARPS, r);
        u32 sum = 0;
#pragma unroll BLOCKS_AT_ONCE
        for (u32 b = 0; b < MAX_BLOCKS; b++) sum += b < blocks ? s.block_totals[b][r] : 0;
        return sum;
    };

    // (2) This rank's words, which are its credit for the bank that they name.
    if (block == 0 && !aborted) {
#pragma unroll 1
        for (u32 i = talker; i < WORLD * NUM_WORDS; i += THREADS) {
            const u32 peer = i / NUM_WORDS, r = i % NUM_WORDS;
            store_relaxed_system(word_at(me, peer, COUNTS, count_index(epoch, me.rank, r)), count_word(me, epoch, r, own_count(r), is_oversize, asked));
        }
    }

    // Where each token goes, while the words travel. A warp without tokens polls at once.
    const bool has_tokens = BY_EXPERT || num_tiles > 1 || first + warp * WARP < end;
    if (!REPLAY && has_tokens) {
        u32 base_low = 0, base_high = 0; // of rank lane, lane + WARP
        if (blocks > 1) {
            for (u32 b = 0; b != block; b++) {
                if (lane < WORLD) base_low += s.block_totals[b][lane];
                if (WORLD > WARP && lane + WARP < WORLD) base_high += s.block_totals[b][lane + WARP];
            }
        }
        for (u32 tile = 0; tile < num_tiles; tile++) {
            const u32 token = first + tile * TILE + thread;
            const bool has_token = thread < TILE && token < end;
            if (num_tiles > 1) {
                block_barrier();
                u32 low = 0, high = 0;
                mask = has_token ? destinations(me, call, token, routes) : 0;
                count_lanes(mask, lane, low, high);
                store_totals(s, warp, lane, low, high);
                block_barrier();
            }
            const u32 before_low = base_low + (lane < WORLD ? total_below(s, warp, lane) : 0);
            const u32 before_high = WORLD > WARP && lane + WARP < WORLD ? base_high + total_below(s, warp, lane + WARP) : 0;
            u32 num = 0;
            List list;
#pragma unroll
            for (u32 i = 0; i < NUM_DESTINATIONS; i++) list.entry[i] = NONE;
            u32* to = call.sent + (u64)token * NUM_DESTINATIONS;
#pragma unroll MASKS_AT_ONCE
            for (u32 r = 0; r < WORLD; r++) {
                const bool goes = mask >> r & 1;
                const u64 lanes = lanes_where(goes);
                const u32 base = from_lane(r < WARP ? before_low : before_high, r % WARP);
                const u32 entry = r << RANK_SHIFT | (base + num_bits(lanes & ((1ull << lane) - 1)));
                if (LISTS_WHOLE) {
                    append(list, goes ? num : NONE, entry);
                } else if (goes) {
                    to[num] = entry;
                }
                num += goes;
            }
            u32 positions[K];
            if (BY_EXPERT) place_experts(s.experts, routes.ids, has_token, positions);
            if (has_token) {
                if (LISTS_WHOLE) {
                    *(List*)to = list;
                } else {
                    for (; num < NUM_DESTINATIONS; num++) to[num] = NONE;
                }
                write_record(me, token, routes, RECORDS_WHOLE ? (char*)(staged + thread * ROUTE_VECTORS) : call.records + (u64)token * ROUTE_BYTES);
                if (BY_EXPERT) {
#pragma unroll
                    for (u32 r = 0; r < K; r++) call.rows[(u64)token * K + r] = positions[r];
                }
            }
            if constexpr (RECORDS_WHOLE) {
                const u32 first_thread = warp * WARP, first_token = first + tile * TILE + first_thread;
                const u32 left = first_thread < TILE && first_token < end ? end - first_token : 0;
                const u32 num_vectors = (left < WARP ? left : WARP) * ROUTE_VECTORS;
                warp_barrier();
                for (u32 i = lane; i < num_vectors; i += WARP) store16(call.records + 16ull * ((u64)first_token * ROUTE_VECTORS + i), staged[first_thread * ROUTE_VECTORS + i]);
                warp_barrier();
            }
            if (num_tiles > 1 && lane < WORLD) base_low += total_below(s, NUM_WARPS, lane);
            if (num_tiles > 1 && WORLD > WARP && lane + WARP < WORLD) base_high += total_below(s, NUM_WARPS, lane + WARP);
        }
    }
    if (block == 0) { // the others end: dependents need not wait for them
        // (3) Everybody's words. sync counts: acquire, pairs with the release at entry of every peer
#pragma unroll 1
        for (u32 i = talker; i < WORLD * NUM_WORDS && !aborted; i += THREADS) {
            const u32 sender = i / NUM_WORDS, r = i % NUM_WORDS;
            const u64 word = wait_for<Words::COUNT>(me, OP, PHASE_COUNTS, sender, word_at(me, me.rank, COUNTS, count_index(epoch, sender, r)), epoch, failed);
            const u32 count = (u32)(word >> COUNT_SHIFT & COUNT_MASK);
            problem |= problem_of(me, word);
            if (REPLAY && count != call.counts[sender * NUM_WORDS + r]) problem |= OTHER_ROUTING;
            if (r < WORLD) {
                s.matrix[sender][r] = count | marks_of(me, word);
            } else {
                add_shared(&s.expert_rows[r - WORLD < EXPERTS ? r - WORLD : 0], count);
            }
            if (!REPLAY) call.counts[sender * NUM_WORDS + r] = count;
        }
        if (problem != 0) set_bits_shared(&s.problem, problem);
        block_barrier();
        // Only now: a dependent that starts before the words of late peers would hold the place that they need.
        launch_dependents();
        if (BY_EXPERT) {
            if (s.problem == 0) place_segments(me, call, s.expert_rows, true, s.decision);
            block_barrier();
        }
        if (warp == 0) {
            if (lane == 0) me.state->epoch = epoch;
            if (!IS_PLAIN || !decide_plain(me, call, s.matrix, s.problem, epoch, num_tokens)) decide(me, call, s.matrix, s.problem, epoch, asked, num_tokens, true, s.decision);
        }
    }
    if (failed) report(me);
}
