// Computes   a whole dispatch of few tokens in one launch (oracle::dispatch, ByToken): routing, counts, the first STAGED_ROWS rows for each rank as
//            messages that carry their own flags, the rest straight into place; then takes the messages out of staging.
// Layout     as route.cu and payload.cu; staging [copies, sender, STAGED_ROWS, MESSAGE_PACKETS] of Packet in every rank's memory, no user sees it.
//            A message is its vectors of 16 bytes, row then record, each as two packets: first WARP packets of the words 0 and 1, then of 2 and 3.
// Work       every block routes all tokens, TILE at a time; its warps take parts of rows and of messages. Block 0 talks to the peers.
// Shared     the tile's destinations and records, totals, the count matrix: struct Shared.
// Sync       counts: as route.cu. packets: each word of 64 bits holds its epoch; no fence. done: only between ranks that had more rows than a message
//            holds, as payload.cu.
// Requires   SMALL: T <= TILE and T <= STAGED_ROWS; all blocks run at once (the registry of the device sees to it); `copies` = banks + 1, see step 1 of PROTOCOL.md; the kernel before this one has ended (waited for).

constexpr u32 ROUTE_VECTORS = ROUTE_BYTES / 16;
constexpr u32 ROW_VECTORS = ROW_BYTES / 16;
constexpr u32 PART_VECTORS = ((ROW_VECTORS + PARTS - 1) / PARTS + WARP - 1) / WARP * WARP; // whole groups; the last parts may be empty
constexpr u32 GROUPS = (ROW_VECTORS + WARP - 1) / WARP + (ROUTE_VECTORS + WARP - 1) / WARP; // of WARP vectors, the last of each kind not full
constexpr u64 MESSAGE_BYTES = GROUPS * WARP * 32ull;
constexpr u32 TILE = 64; // arbitrary: at most 32 tokens are expected here
constexpr u32 TILE_WARPS = TILE / WARP;
static_assert(!BY_EXPERT, "Expert layouts take the other path.");

struct LowLatencyParameters {
    Call call;
    const char* x;
    u64 x_stride;
    u64 x_region; // offsets in every rank's memory, of the bank of this call
    u64 record_region;
    u64 staging;
    u32 copies;
    u32 x_rows; // rows of x that may be read
    Rank me;
};
static_assert(sizeof(LowLatencyParameters) == 192 + sizeof(Rank), "The host fills in the same struct.");

struct Shared {
    alignas(16) char records[TILE][ROUTE_BYTES];
    u32 sent[TILE][NUM_DESTINATIONS];
    u32 warp_totals[TILE_WARPS][WORLD];
    u32 running[WORLD]; // tokens for each rank before the tile
    u32 matrix[WORLD][WORLD];
    Decision decision;
    u64 epoch;
    u32 aborted;
    u32 problem;
    u32 is_last;
    u32 is_refused;
};

// Routes one tile into shared memory and adds its counts to `running`, after which `sent` holds positions. Only the first TILE threads work.
DEVICE void route_tile(const LowLatencyParameters& p, Shared& s, u32 first, u32 num_tokens) {
    const u32 thread = thread_idx(), lane = thread % WARP, warp = thread / WARP;
    const u32 token = first + thread;
    Routes routes;
    u64 mask = 0;
    if (thread < TILE) {
        mask = token < num_tokens ? destinations(p.me, p.call, token, routes) : 0;
        u32 low = 0, high = 0;
        count_lanes(mask, lane, low, high);
        if (lane < WORLD) s.warp_totals[warp][lane] = low;
        if (WORLD > WARP && lane + WARP < WORLD) s.warp_totals[warp][lane + WARP] = high;
    }
    block_barrier();
    if (thread < TILE) {
        u32 low = lane < WORLD ? s.running[lane] : 0, high = WORLD > WARP && lane + WARP < WORLD ? s.running[lane + WARP] : 0;
        for (u32 w = 0; w < warp; w++) {
            if (lane < WORLD) low += s.warp_totals[w][lane];
            if (WORLD > WARP && lane + WARP < WORLD) high += s.warp_totals[w][lane + WARP];
        }
        u32 num = 0;
#pragma unroll MASKS_AT_ONCE
        for (u32 r = 0; r < WORLD; r++) {
            const bool goes = mask >> r & 1;
            const u64 lanes = lanes_where(goes);
            const u32 base = from_lane(r < WARP ? low : high, r % WARP);
            if (goes) s.sent[thread][num++] = r << RANK_SHIFT | (base + num_bits(lanes & ((1ull << lane) - 1)));
        }
        for (; num < NUM_DESTINATIONS; num++) s.sent[thread][num] = NONE;
        if (token < num_tokens) write_record(p.me, token, routes, s.records[thread]);
    }
    block_barrier();
    for (u32 r = thread; r < WORLD; r += THREADS) {
        for (u32 w = 0; w < TILE_WARPS; w++) s.running[r] += s.warp_totals[w][r];
    }
}

DEVICE void put_packets(char* group, u32 lane, Vec16 v, u64 tag) {
    store_packet(group + 16 * lane, Packet{{tag | v.word[0], tag | v.word[1]}});
    store_packet(group + 16 * (WARP + lane), Packet{{tag | v.word[2], tag | v.word[3]}});
}

// Polls until both packets are there; false after a failure.
DEVICE bool take_packets(const Rank& me, u32 sender, u64 epoch, const char* group, u32 lane, u64 tag, Vec16& v, bool& failed) {
    u64 start = 0;
    // sync packets: no fence; each word of 64 bits says itself that it is there
    for (u32 polls = 0;; polls++) {
        const Packet a = load_packet(group + 16 * lane), b = load_packet(group + 16 * (WARP + lane));
        v = Vec16{{(u32)a.word[0], (u32)a.word[1], (u32)b.word[0], (u32)b.word[1]}};
        const u32 want = (u32)(tag >> 32);
        if ((u32)(a.word[0] >> 32) == want && (u32)(a.word[1] >> 32) == want && (u32)(b.word[0] >> 32) == want && (u32)(b.word[1] >> 32) == want) return true;
        if (polls % 32 != 31) continue; // arbitrary, as in wait_for
        if (start == 0) start = time_ns();
        if (must_end(me, polls)) return false;
        if (time_ns() - start > me.timeout_ns) {
            failed |= give_up(me, OP, PHASE_ROWS, sender, epoch, a.word[0] >> 32);
            return false;
        }
    }
}

KERNEL_UNROUNDED(THREADS) low_latency(PARAMETERS(LowLatencyParameters) p) {
    SHARED Shared s;
    const Rank& me = p.me;
    const Call& call = p.call;
    const u32 thread = thread_idx(), lane = thread % WARP, warp = thread / WARP;
    const u32 block = block_idx_x(), blocks = grid_blocks();
    const u32 warps = blocks * NUM_WARPS, my_warp = block * NUM_WARPS + warp;
    // The last threads talk to the peers: few tokens leave them free, and the fence overlaps what the others load.
    const u32 talker = THREADS - 1 - thread;
    wait_for_dependencies();
    // sync counts: release, before this thread's first load; pairs with the acquire below on every peer
    if (block == 0 && talker < WORLD * WORLD) release_peers(me.is_one_device != 0);
    // The second warp: a wait for these loads would hold up the first one's.
    if (thread == WARP) {
        s.epoch = me.state->epoch + 1;
        s.aborted = is_aborted(me);
        s.problem = s.aborted ? FAILED : 0;
    }
    u32 num_tokens = REPLAY ? call.routing->num_tokens : call.device_tokens ? *call.device_tokens : call.num_tokens;
    const bool is_oversize = num_tokens > call.most_tokens;
    const u32 asked = num_tokens;
    if (is_oversize) num_tokens = 0;
    const u32 num_tiles = SMALL ? 1 : (num_tokens + TILE - 1) / TILE;
    for (u32 r = thread; r < WORLD; r += THREADS) s.running[r] = 0;
    // This warp's first piece of a row is on its way before anything is known of it.
    Vec16 ahead[UNROLL];
    if (my_warp / PARTS < p.x_rows) {
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            const u32 at = my_warp % PARTS * PART_VECTORS + u * WARP + lane;
            if (at < ROW_VECTORS) ahead[u] = load16(p.x + my_warp / PARTS * p.x_stride + 16ull * at);
        }
    }
    if (num_tiles == 0) block_barrier();

    // (2) This rank's words, once all tokens are counted.
    const auto post = [&]() {
        if (block != 0 || s.aborted) return;
#pragma unroll 1
        for (u32 i = talker; i < WORLD * WORLD; i += THREADS) {
            const u32 peer = i / WORLD, r = i % WORLD;
            store_relaxed_system(word_at(me, peer, COUNTS, count_index(s.epoch, me.rank, r)), count_word(me, s.epoch, r, s.running[r], is_oversize, asked));
        }
    };
    const auto write_row = [&](u32 tile, bool is_staging) {
        const u64 copy = s.epoch % p.copies;
        const u64 tag = (s.epoch & 0xFFFFFFFF) << 32;
        const u32 first = tile * TILE;
        const u32 rows = num_tokens - first < TILE ? num_tokens - first : TILE;
        for (u32 item = my_warp; item < rows * PARTS; item += warps) {
            const u32 token = item / PARTS, part = item % PARTS;
            const char* from = p.x + (first + token) * p.x_stride;
            const u32 begin = part * PART_VECTORS;
            const u32 part_end = begin + PART_VECTORS < ROW_VECTORS ? begin + PART_VECTORS : ROW_VECTORS;
            for (u32 start = begin; start < part_end; start += UNROLL * WARP) {
                Vec16 v[UNROLL];
#pragma unroll
                for (u32 u = 0; u < UNROLL; u++) {
                    if (item == my_warp && start == begin && tile == 0) {
                        v[u] = ahead[u];
                    } else if (start + u * WARP + lane < part_end) {
                        v[u] = load16(from + 16ull * (start + u * WARP + lane));
                    }
                }
                for (u32 d = 0; d < NUM_DESTINATIONS; d++) {
                    const u32 entry = s.sent[token][d];
                    if (entry == NONE) break;
                    const u32 rank = entry >> RANK_SHIFT, position = entry & POSITION_MASK;
                    if ((position < STAGED_ROWS) != is_staging) continue;
                    if (is_staging) {
                        char* message = (char*)(me.peers[rank] + p.staging + ((copy * WORLD + me.rank) * STAGED_ROWS + position) * MESSAGE_BYTES);
#pragma unroll
                        for (u32 u = 0; u < UNROLL; u++) {
                            if (start + u * WARP + lane < part_end) put_packets(message + (start / WARP + u) * WARP * 32, lane, v[u], tag);
                        }
                        if (start == 0 && lane < ROUTE_VECTORS) put_packets(message + (ROW_VECTORS + WARP - 1) / WARP * WARP * 32, lane, *(const Vec16*)(s.records[token] + 16 * lane), tag);
                    } else {
                        const u32 slot = s.decision.base[rank] + position;
                        if (slot >= call.max_rows) continue;
                        char* to = (char*)(me.peers[rank] + p.x_region + (u64)slot * ROW_BYTES);
#pragma unroll
                        for (u32 u = 0; u < UNROLL; u++) {
                            if (start + u * WARP + lane < part_end) store16(to + 16ull * (start + u * WARP + lane), v[u]);
                        }
                        if (start == 0 && lane < ROUTE_VECTORS) store16((char*)(me.peers[rank] + p.record_region + (u64)slot * RECORD_BYTES) + 16 * lane, *(const Vec16*)(s.records[token] + 16 * lane));
                    }
                }
            }
        }
    };

    // (1) Messages.
    if (num_tiles == 0) post();
    for (u32 tile = 0; tile < num_tiles; tile++) {
        route_tile(p, s, tile * TILE, num_tokens);
        block_barrier();
        if (tile == num_tiles - 1) post();
        if (!s.aborted) write_row(tile, true);
        // What is kept, by another block than the one that posts.
        if (block == (tile + 1) % blocks) {
            const u32 first = tile * TILE;
            const u32 rows = num_tokens - first < TILE ? num_tokens - first : TILE;
#pragma unroll 1
            for (u32 i = thread; i < rows * NUM_DESTINATIONS; i += THREADS) call.sent[(u64)first * NUM_DESTINATIONS + i] = s.sent[i / NUM_DESTINATIONS][i % NUM_DESTINATIONS];
#pragma unroll 1
            for (u32 i = thread; i < rows * ROUTE_VECTORS; i += THREADS) store16(call.records + ((u64)first * ROUTE_VECTORS + i) * 16, *(const Vec16*)(s.records[i / ROUTE_VECTORS] + 16 * (i % ROUTE_VECTORS)));
        }
        if (num_tiles > 1) block_barrier();
    }

    // (3) Everybody's words. sync counts: acquire, pairs with the release at entry of every peer
    const u64 epoch = s.epoch;
    const bool aborted = s.aborted;
    const u64 tag = (epoch & 0xFFFFFFFF) << 32;
    const u64 copy = epoch % p.copies;
    // Who comes last knows that every block has read the epoch.
    if (thread == 0 && add_relaxed_device(&me.state->arrived, 1) == blocks - 1) {
        me.state->arrived = 0;
        me.state->epoch = epoch;
    }
    u32 problem = 0;
    bool failed = false;
#pragma unroll 1
    for (u32 i = talker; i < WORLD * WORLD && !aborted; i += THREADS) {
        const u32 sender = i / WORLD, r = i % WORLD;
        // sync counts: acquire, as said above
        const u64 word = wait_for<Words::COUNT>(me, OP, PHASE_COUNTS, sender, word_at(me, me.rank, COUNTS, count_index(epoch, sender, r)), epoch, failed);
        const u32 count = (u32)(word >> COUNT_SHIFT & COUNT_MASK);
        problem |= problem_of(me, word);
        s.matrix[sender][r] = count | marks_of(me, word);
        if (block == 0) call.counts[sender * NUM_WORDS + r] = count;
    }
    if (problem != 0) set_bits_shared(&s.problem, problem);
    block_barrier();
    if (warp == 0) {
        const bool is_refused = decide(me, call, s.matrix, s.problem, epoch, asked, num_tokens, block == 0, s.decision);
        if (lane == 0) s.is_refused = is_refused;
    }
    block_barrier();
    // Whoever this kernel still waits for runs already: a dependent takes no place that is needed.
    launch_dependents();
    if (s.is_refused) {
        if (failed) report(me);
        return;
    }

    // (4, 5) Rows that no message holds.
    const bool is_beyond = !SMALL && block_any(thread < WORLD && s.matrix[me.rank][thread < WORLD ? thread : 0] > STAGED_ROWS);
    if (is_beyond) {
        for (u32 r = thread; r < WORLD; r += THREADS) s.running[r] = 0;
        block_barrier();
        for (u32 tile = 0; tile < num_tiles; tile++) {
            if (num_tiles > 1) {
                route_tile(p, s, tile * TILE, num_tokens);
                block_barrier();
            }
            write_row(tile, false);
            block_barrier();
        }
        // sync done: release; every block's rows, then the last block's words
        if (thread == 0) {
            // sync arrived: release, to the last block, which passes it on
            release_peers(me.is_one_device != 0);
            s.is_last = add_relaxed_device(&me.state->stored, 1) == blocks - 1;
            if (s.is_last) {
                me.state->stored = 0;
                // sync arrived: acquire of every block's release; sync done: release to the peers
                acquire_release_peers(me.is_one_device != 0);
            }
        }
        block_barrier();
        if (s.is_last) {
            for (u32 peer = thread; peer < WORLD; peer += THREADS) store_relaxed_system(word_at(me, peer, DONE, me.rank), epoch << EPOCH_SHIFT);
        }
    }

    // (7) Messages to their slots.
    u32 num_staged = 0;
    for (u32 sender = 0; sender < WORLD; sender++) {
        const u32 n = s.matrix[sender][me.rank];
        num_staged += n < STAGED_ROWS ? n : STAGED_ROWS;
    }
    for (u32 item = my_warp; item < num_staged * PARTS; item += warps) {
        u32 position = item / PARTS, sender = 0;
        const u32 part = item % PARTS;
        for (;; sender++) {
            const u32 n = s.matrix[sender][me.rank];
            const u32 staged = n < STAGED_ROWS ? n : STAGED_ROWS;
            if (position < staged) break;
            position -= staged;
        }
        const u32 slot = s.decision.start[sender] + position;
        const char* message = (const char*)(me.peers[me.rank] + p.staging + ((copy * WORLD + sender) * STAGED_ROWS + position) * MESSAGE_BYTES);
        char* to = (char*)(me.peers[me.rank] + p.x_region + (u64)slot * ROW_BYTES);
        char* record = (char*)(me.peers[me.rank] + p.record_region + (u64)slot * RECORD_BYTES);
        const u32 begin = part * PART_VECTORS;
        const u32 part_end = begin + PART_VECTORS < ROW_VECTORS ? begin + PART_VECTORS : ROW_VECTORS;
        bool is_there = true;
        for (u32 at = begin + lane; at < part_end && is_there; at += WARP) {
            Vec16 v;
            is_there = take_packets(me, sender, epoch, message + at / WARP * WARP * 32, lane, tag, v, failed);
            if (is_there && slot < call.max_rows) store16(to + 16ull * at, v);
        }
        if (part == 0 && lane < ROUTE_VECTORS && is_there) {
            Vec16 v;
            is_there = take_packets(me, sender, epoch, message + (ROW_VECTORS + WARP - 1) / WARP * WARP * 32, lane, tag, v, failed);
            if (is_there && slot < call.max_rows) store16(record + 16 * lane, v);
        }
        if (!is_there) break; // a failure: every rank gives up
    }
    // (6) sync done: acquire, pairs with the release above on every peer
    for (u32 peer = thread; block == 0 && peer < WORLD; peer += THREADS) {
        if (s.matrix[peer][me.rank] > STAGED_ROWS) wait_for<Words::DONE>(me, OP, PHASE_ROWS, peer, word_at(me, me.rank, DONE, peer), epoch, failed);
    }
    if (failed) report(me);
}
