// Computes   every row of this rank's tokens, with its record, into its slot at each destination; without RECEIVE_FOLLOWS also says that they are complete and
//            waits until those for this rank are (oracle::dispatch; in the expert layouts: the row at the first of its slots, and a transit record).
// Layout     x rows of ROW_BYTES (before quantisation X_BYTES), x_stride bytes apart, 16-byte aligned; sent, records, places, rows, routing: as route.cu
//            wrote them; every rank's bank: regions x [max_rows, ROW_BYTES], records [max_rows, RECORD_BYTES] or transit [arrivals, RECORD_BYTES],
//            scales, at their offsets, the same on all ranks.
// Work       a warp takes a part of a row: PARTS parts of each token, UNROLL vectors of 16 bytes a lane at a time; read once, written to each
//            destination. Any grid: only one block waits, when every other one has its place.
// Shared     what the block adds to done words, the flag of the one that waits; with BULK the barriers of the copies and, dynamic, the rows.
// Sync       done: with RECEIVE_FOLLOWS the end of the grid is all. Otherwise every block that had a row releases (4). Where all ranks are on one device, it counts itself in the done word of every peer (5); otherwise in this
//            rank's memory, and the last one releases to the peers and stores the words. One thread per peer polls, acquiring (6). Pairs with the same lines of every peer.
// Requires   slots below max_rows or the row is left out; route.cu of this epoch has ended (waited for): its acquire covers the credit. With QUANTIZE
//            parts are whole blocks of 128 elements.

constexpr u32 NUM_WARPS = THREADS / WARP;
constexpr u32 ROUTE_BYTES = (8 + 8 * K + 15) / 16 * 16;
constexpr u32 ROUTE_VECTORS = ROUTE_BYTES / 16;
constexpr u32 ROW_VECTORS = ROW_BYTES / 16;
constexpr u32 PART_VECTORS = (ROW_VECTORS + PARTS - 1) / PARTS;
constexpr u32 STEP = UNROLL * WARP;
constexpr bool DIVIDES = ROW_VECTORS % (PARTS * STEP) == 0; // no vector beyond the part: no tests
// QUANTIZE: 0 none, 1 f32 scales, 2 powers of two.
constexpr u32 X_VECTORS = QUANTIZE ? sizeof(Element) : 1; // vectors of x that make one of the row
// SCALES: 0 none, 1 inside the record, 2 words of a column-major matrix.
constexpr u32 NUM_SCALE_BYTES = SCALES && !QUANTIZE ? SCALE_BYTES : 1; // of the caller
constexpr u32 SCALE_WORDS = (NUM_SCALE_BYTES + 3) / 4;
constexpr u32 RECORD_WORDS = BY_EXPERT ? 2 + 3 * K : 2 + 2 * K; // before the scales
constexpr u32 WORDS = RECORD_WORDS + (SCALES == 1 && !QUANTIZE ? SCALE_WORDS : 0); // with those of the caller
// The record is copied as it is kept: nothing in it depends on the destination, and no scales share its last vector.
constexpr bool COPIES_RECORD = !BY_EXPERT && !LOCAL_IDS && SCALES != 1;
// LOCAL_ROWS: only to measure; rows and records go to this rank's own memory.
// BULK: 0, or rows that a warp keeps in shared memory at a time (dynamic: NUM_WARPS * BULK * ROW_BYTES), moved by the copy engine (sm_90 and later).
static_assert(BULK == 0 || (PARTS == 1 && !QUANTIZE && BULK >= 2 && NUM_DESTINATIONS <= WARP), "The copy engine moves whole rows as they are.");
// WITH_SIGNALS: false where receive.cu says that rows are complete (RECEIVE_FOLLOWS), or to measure. A block that waits for its stores to end keeps the next one
// from its place (measured, H200, 4096 tokens with few warps a multiprocessor: 30 us of 750 at 8 ranks), so with many rows none does.
static_assert(THREADS >= WORLD, "One thread signals to each peer.");
static_assert(ROW_BYTES % 16 == 0, "Rows are copied in vectors of 16 bytes.");
static_assert(!QUANTIZE || PARTS == 1 || PART_VECTORS % BLOCK_LANES == 0, "A block of 128 elements is quantised by one warp.");
constexpr u32 WARP_BLOCKS = WARP / BLOCK_LANES; // blocks of 128 elements that a warp holds at a time
static_assert(!QUANTIZE || UNROLL <= BLOCK_LANES, "A warp has a lane for each block of a step.");
static_assert(QUANTIZE != 2 || SCALES != 2 || PARTS == 1 || PART_VECTORS % (4 * BLOCK_LANES) == 0, "The four scales of a word are made by one warp.");

struct PayloadParameters {
    const char* x;
    u64 x_stride;
    const char* scales; // [T, SCALE_BYTES] of the caller
    u64 scale_stride;
    const RoutingHead* routing;
    const u32* sent;
    const char* records;
    const u32* rows;     // expert layouts
    const Place* places; // expert layouts
    const u32* counts;
    u64 x_region;      // offsets in every rank's memory, of the bank of this call
    u64 record_region; // of records, expert layouts: of transit records
    u64 scale_region;
    u64 scale_rows;    // rows of a column of the scale matrix
    u32 max_rows;
    u32 max_tokens;
    u32 x_rows; // rows of x that may be read
    u32 waits;  // 0: the waiting half is another launch
    u32 triggers; // 1: dependents may start before the rows of the peers are here (they must not fill a device that ranks share)
    u32 spare;
    Rank me;
};
static_assert(sizeof(PayloadParameters) == 136 + sizeof(Rank), "The host fills in the same struct.");

DEVICE Vec16 load_row(const char* at) {
    return STREAM ? load16_streaming(at) : load16(at);
}

DEVICE void store_row(char* at, Vec16 v) {
    STREAM ? store16_streaming(at, v) : store16(at, v);
}

// What one lane holds of a row: UNROLL vectors as they arrive, and with QUANTIZE the scales of their blocks.
struct Piece {
    Vec16 raw[UNROLL * X_VECTORS];
    u32 scale[QUANTIZE ? UNROLL : 1];
};

DEVICE void load_step(Piece& piece, const char* from, u32 at, u32 end) {
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
#pragma unroll
        for (u32 i = 0; i < X_VECTORS; i++) {
            if (DIVIDES || at + u * WARP < end) {
                piece.raw[u * X_VECTORS + i] = load_row(from + 16ull * ((at + u * WARP) * X_VECTORS + i));
            } else if (QUANTIZE) {
                piece.raw[u * X_VECTORS + i] = Vec16{};
            }
        }
    }
}

DEVICE u32 end_of(u32 begin) {
    return begin + PART_VECTORS < ROW_VECTORS ? begin + PART_VECTORS : ROW_VECTORS;
}

// The first step of an item.
DEVICE void load_piece(Piece& piece, const PayloadParameters& p, u32 item, u32 lane) {
    const u32 begin = item % PARTS * PART_VECTORS;
    load_step(piece, p.x + item / PARTS * p.x_stride, begin + lane, end_of(begin));
}

// A lane for each (destination, vector) of a token's record.
constexpr u32 RECORD_STEPS = (NUM_DESTINATIONS * ROUTE_VECTORS + WARP - 1) / WARP;

DEVICE void load_record(Vec16 (&v)[RECORD_STEPS], const PayloadParameters& p, u32 token, u32 lane) {
#pragma unroll
    for (u32 i = 0; i < RECORD_STEPS; i++) v[i] = load16(p.records + (u64)token * ROUTE_BYTES + 16 * ((i * WARP + lane) % ROUTE_VECTORS));
}

// Word g of the caller's scales, which may have any alignment; what is beyond them is 0.
DEVICE u32 scale_word(const char* scales, u32 g) {
    if (NUM_SCALE_BYTES % 4 == 0 && (u64)scales % 4 == 0) return ((const u32*)scales)[g];
    u32 word = 0;
    for (u32 i = 0; i < 4 && 4 * g + i < NUM_SCALE_BYTES; i++) word |= (u32)(u8)scales[4 * g + i] << 8 * i;
    return word;
}

// A lane for each word of a record that is put together, some at a time: as many as the usual scales need, and at most 4 (arbitrary).
constexpr u32 WORD_STEPS = WORDS < 4 * WARP ? (WORDS + WARP - 1) / WARP : 4;

DEVICE void load_words(u32 (&words)[WORD_STEPS], const PayloadParameters& p, u32 token, u32 first, u32 lane) {
    const u32* record = (const u32*)(p.records + (u64)token * ROUTE_BYTES);
#pragma unroll
    for (u32 i = 0; i < WORD_STEPS; i++) {
        const u32 w = first + i * WARP + lane;
        if (w < 2 + 2 * K) {
            words[i] = record[w];
        } else if (w < RECORD_WORDS) {
            words[i] = p.rows[(u64)token * K + (w - 2 - 2 * K)];
        } else if (w < WORDS) {
            words[i] = scale_word(p.scales + token * p.scale_stride, w - RECORD_WORDS);
        }
    }
}

// The vectors that travel take the first places of `raw`.
DEVICE void quantize_piece(Piece& piece) {
    if constexpr (QUANTIZE != 0) {
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            float values[16];
#pragma unroll
            for (u32 i = 0; i < X_VECTORS; i++) Vector<Element>::widen_all(piece.raw[u * X_VECTORS + i], values + i * Vector<Element>::SIZE);
            const Quantized q = quantize<QUANTIZE == 2>(values);
            piece.raw[u] = q.bytes;
            piece.scale[u] = q.scale;
        }
    }
}

KERNEL_UNROUNDED(THREADS) payload(PARAMETERS(PayloadParameters) p) {
    SHARED u32 is_last;
    SHARED u64 share; // of a done word
    SHARED u64 barriers[BULK ? NUM_WARPS * BULK : 1];
    const Rank& me = p.me;
    const u32 thread = thread_idx(), lane = thread % WARP;
    const u32 blocks = grid_blocks();
    char* const stages = BULK ? dynamic_shared() + thread / WARP * (BULK * ROW_BYTES) : nullptr;
    u64* const loaded = barriers + (BULK ? thread / WARP * BULK : 0);
    u32 round = 0; // rows that this warp has moved
    if (BULK && lane + 1 <= BULK) barrier_init(loaded + lane, 1);
    if (BULK) warp_barrier();
    const u32 stride = blocks * NUM_WARPS;
    u32 item = (block_idx_x() * THREADS + thread) / WARP;
    wait_for_dependencies();
    // It finds a place while the last blocks work, and waits for their end: by that the rows are complete.
    if (RECEIVE_FOLLOWS) launch_dependents();
    // What does not depend on each other is asked for together.
    const u64 epoch = me.state->bank_epoch[me.bank];
    const u32 num_tokens = p.routing->num_tokens;
    const LaneRanks ranks = load_lane_ranks(me, p.routing, lane);
    const u64 last_done = WITH_SIGNALS && thread == 0 && block_idx_x() == 0 ? load_relaxed_device(word_at(me, me.rank, DONE, me.rank)) : 0;
    u32 entry = lane < NUM_DESTINATIONS && item / PARTS < p.max_tokens ? p.sent[(u64)(item / PARTS) * NUM_DESTINATIONS + lane] : NONE;
    Piece piece;
    if (WITH_ROWS && !BULK && item / PARTS < p.x_rows) load_piece(piece, p, item, lane);
    Vec16 record_vectors[RECORD_STEPS];
    if (COPIES_RECORD && WITH_RECORDS && item % PARTS == 0 && item / PARTS < p.max_tokens) load_record(record_vectors, p, item / PARTS, lane);
    if (epoch == 0) return; // refused on all ranks
    const u32 num_items = num_tokens * PARTS;
    // A block without an item has nothing to release: it is not counted. One block signals even without tokens.
    const u32 with_items = (num_items + NUM_WARPS - 1) / NUM_WARPS;
    const u32 workers = with_items < blocks ? (with_items != 0 ? with_items : 1) : blocks;
    if (block_idx_x() >= workers) return;
    // Where all ranks are on one device the block that starts last waits: what comes back is looked at when the rows are stored.
    u32 started = 0;
    if (WITH_SIGNALS && thread == 0 && me.is_one_device != 0) {
        started = add_relaxed_device(&me.state->arrived, 1);
        // Together the blocks take done words from the epoch that they say to this one: below it while a block is missing, whichever.
        share = block_idx_x() != 0 ? 1 : ((epoch - (last_done >> EPOCH_SHIFT)) << EPOCH_SHIFT) - (workers - 1);
    }
    const auto fetch = [&](u32 token, u32 stage) { bulk_load(stages + stage * ROW_BYTES, p.x + token * p.x_stride, ROW_BYTES, loaded + stage); };
    if (BULK && WITH_ROWS && lane == 0) {
        for (u32 i = 0; i + 1 != BULK && item + i * stride < num_items; i++) fetch(item + i * stride, i);
    }
    while (item < num_items) {
        const u32 token = item / PARTS, part = item % PARTS;
        const char* from = p.x + token * p.x_stride;
        const char* record = p.records + (u64)token * ROUTE_BYTES;
        const u32 begin = part * PART_VECTORS;
        const u32 end = end_of(begin);
        // Lane d has destination d.
        const Destination destination = destination_of(me, p.routing, ranks, entry);
        const u64 memory = LOCAL_ROWS ? me.peers[me.rank] : destination.memory;
        const u32 rank = destination.rank, arrival = destination.arrival;
        u32 slot = !BY_EXPERT && arrival < p.max_rows ? arrival : NONE; // else dropped
        item += stride;
        entry = lane < NUM_DESTINATIONS && item < num_items ? p.sent[(u64)(item / PARTS) * NUM_DESTINATIONS + lane] : NONE;
        if (BY_EXPERT) {
            // Lane r has route r; the first that is kept has the row.
            u32 owner = NONE, kept_slot = NONE;
            if (lane < K) {
                const i32 id = ((const i32*)record)[2 + lane];
                if (id >= 0) {
                    const Place place = p.places[id];
                    const u32 position = p.rows[(u64)token * K + lane];
                    owner = owner_of(me, (u32)id);
                    kept_slot = position < place.room ? place.slot + position : NONE;
                }
            }
            for (u32 r = 0; r < K; r++) {
                const u32 route_owner = from_lane(owner, r), route_slot = from_lane(kept_slot, r);
                if (slot == NONE && rank != NONE && route_owner == rank) slot = route_slot;
            }
        }
        const u64 row_at = memory + p.x_region + (u64)slot * ROW_BYTES;
        const u64 record_at = memory + p.record_region + (u64)arrival * RECORD_BYTES;
        const u32 kept = (u32)lanes_where(slot != NONE);                       // destinations that get a row
        const u32 told = BY_EXPERT ? (u32)lanes_where(arrival != NONE) : kept; // and a record
        const bool has_record = WITH_RECORDS && part == 0;
        u32 record_words[WORD_STEPS];
        if (!COPIES_RECORD && has_record) load_words(record_words, p, token, 0, lane);
        if (WITH_ROWS && BULK) {
            const u32 stage = round % (BULK ? BULK : 1);
            barrier_wait(loaded + stage, round / (BULK ? BULK : 1) % 2);
            if (slot != NONE) bulk_store((char*)row_at, stages + stage * ROW_BYTES, ROW_BYTES);
            bulk_commit();
            // The stage before this one is free once its stores have read it.
            bulk_wait_read<1>();
            warp_barrier();
            const u32 next = item + (BULK - 2) * stride;
            if (lane == 0 && next < num_items) fetch(next, (round + BULK - 1) % (BULK ? BULK : 1));
            round++;
        }
        if (WITH_ROWS && !BULK) {
            for (u32 at = begin + lane;;) {
                quantize_piece(piece);
                // Scales of the step's blocks, which lie one behind the other: a lane for each.
                const u32 block = (at - lane) / BLOCK_LANES + lane;
                u32 block_scale = 0;
                if constexpr (QUANTIZE != 0 && SCALES == 1) {
#pragma unroll
                    for (u32 u = 0; u < UNROLL; u++) {
                        const u32 scale = from_lane(piece.scale[u], lane % WARP_BLOCKS * BLOCK_LANES);
                        if (lane / WARP_BLOCKS == u) block_scale = scale;
                    }
                }
                for (u32 rest = BY_EXPERT != 0 && QUANTIZE != 0 ? told : kept; rest != 0; rest &= rest - 1) {
                    const u32 d = lowest_bit(rest);
                    char* to = (char*)from_lane64(row_at, d);
                    if (kept >> d & 1) {
#pragma unroll
                        for (u32 u = 0; u < UNROLL; u++) {
                            if (DIVIDES || at + u * WARP < end) store_row(to + 16ull * (at + u * WARP), piece.raw[u]);
                        }
                    }
                    if constexpr (QUANTIZE != 0 && SCALES == 1) {
                        char* scales = (char*)from_lane64(record_at, d) + 4 * RECORD_WORDS;
                        if (lane < UNROLL * WARP_BLOCKS && block * BLOCK_LANES < end) {
                            if (QUANTIZE == 1) {
                                ((u32*)scales)[block] = block_scale;
                            } else {
                                ((u8*)scales)[block] = (u8)block_scale;
                            }
                        }
                    }
                    if constexpr (QUANTIZE != 0 && SCALES == 2) {
                        const u32 d_slot = from_lane(slot, d);
                        u32* column = (u32*)(from_lane64(memory, d) + p.scale_region) + d_slot;
#pragma unroll
                        for (u32 u = 0; u < UNROLL; u++) {
                            const u32 block = (at + u * WARP) / BLOCK_LANES;
                            if (QUANTIZE == 1) {
                                if (lane % BLOCK_LANES == 0 && at + u * WARP < end) column[block * p.scale_rows] = piece.scale[u];
                            } else {
                                // Four bytes of a word are in four groups of lanes; a byte that is not there is 0.
                                u32 word = at + u * WARP < end ? piece.scale[u] : 0;
                                word |= from_lane(word, (lane + 8) % WARP) << 8;
                                word = (word & 0xFFFF) | from_lane(word & 0xFFFF, (lane + 16) % WARP) << 16;
                                if (lane % 32 == 0 && at + u * WARP < end) column[block / 4 * p.scale_rows] = word;
                            }
                        }
                    }
                }
                at += STEP;
                if (at - lane >= end) break;
                load_step(piece, from, at, end);
            }
        }
        if constexpr (COPIES_RECORD) {
            if (has_record) {
#pragma unroll
                for (u32 i = 0; i < RECORD_STEPS; i++) {
                    const u32 d = (i * WARP + lane) / ROUTE_VECTORS, vector = (i * WARP + lane) % ROUTE_VECTORS;
                    char* to = (char*)from_lane64(record_at, d % WARP);
                    if (d < NUM_DESTINATIONS && told >> d & 1) store_row(to + 16 * vector, record_vectors[i]);
                }
            }
        } else {
            for (u32 first = 0; has_record;) {
                for (u32 rest = told; rest != 0; rest &= rest - 1) {
                    const u32 d = lowest_bit(rest);
                    u32* to = (u32*)from_lane64(record_at, d);
                    const u32 to_rank = from_lane(rank, d);
#pragma unroll
                    for (u32 i = 0; i < WORD_STEPS; i++) {
                        const u32 w = first + i * WARP + lane;
                        if (w >= WORDS) continue;
                        u32 word = record_words[i];
                        const bool is_id = w >= 2 && w < 2 + K, is_weight = w >= 2 + K && w < 2 + 2 * K;
                        if ((BY_EXPERT && is_id) || (!BY_EXPERT && LOCAL_IDS && (is_id || is_weight))) {
                            const i32 id = ((const i32*)record)[is_id ? w : w - K];
                            const bool is_there = id >= 0 && owner_of(me, (u32)id) == to_rank;
                            if (is_id) word = !is_there ? NONE : BY_EXPERT ? (u32)id : local_of(me, (u32)id);
                            if (is_weight && !is_there) word = 0;
                        }
                        to[w] = word;
                    }
                }
                first += WORD_STEPS * WARP;
                if (first >= WORDS) break;
                load_words(record_words, p, token, first, lane);
            }
        }
        if constexpr (QUANTIZE == 0 && SCALES == 2) {
            for (u32 g = lane; has_record && g < (SCALE_WORDS + WARP - 1) / WARP * WARP; g += WARP) {
                const u32 word = g < SCALE_WORDS ? scale_word(p.scales + token * p.scale_stride, g) : 0;
                for (u32 rest = kept; rest != 0; rest &= rest - 1) {
                    const u32 d = lowest_bit(rest), d_slot = from_lane(slot, d);
                    u32* column = (u32*)(from_lane64(memory, d) + p.scale_region) + d_slot;
                    if (g < SCALE_WORDS) column[g * p.scale_rows] = word;
                }
            }
        }
        if (item >= num_items) break;
        // The registers are free: the next row is on its way before its list is looked at.
        if (WITH_ROWS && !BULK) load_piece(piece, p, item, lane);
        if (COPIES_RECORD && WITH_RECORDS && item % PARTS == 0) load_record(record_vectors, p, item / PARTS, lane);
    }
    if (BULK) bulk_wait();
    if (!WITH_SIGNALS) return;
    const bool is_one_device = me.is_one_device != 0;
    if (is_one_device && thread == 0) is_last = started == workers - 1;
    block_barrier();
    // Read here: before, they would take registers from the rows.
    const bool may_wait = thread < WORLD && (!is_one_device || is_last);
    const u64 done = may_wait ? me.state->bank_epoch[me.bank] : 0;
    const u32 expected = may_wait ? p.counts[thread * NUM_WORDS + me.rank] : 0; // arrivals from this peer
    if (is_one_device) {
        if (thread >= WORLD) return;
        // sync done: release, this block's rows; a word that has all shares was changed last after each of these
        release_device();
        // Nothing comes back: a block that waits longer keeps the next one from its place (measured, H200, 4 ranks, 4096 tokens: 3 us of a dispatch).
        count_relaxed_device(word_at(me, thread, DONE, me.rank), share);
    } else {
        if (thread == 0) {
            // sync arrived: release, to the last block only, which passes it on
            if (RELEASE_DEVICE) {
                release_device();
            } else {
                release_system();
            }
            is_last = add_relaxed_device(&me.state->arrived, 1) == workers - 1;
            // sync arrived: acquire of every block's release; sync done: release to the peers
            if (is_last) acquire_release_system();
        }
        block_barrier();
    }
    if (!is_last || thread >= WORLD) return;
    if (!is_one_device) store_relaxed_system(word_at(me, thread, DONE, me.rank), done << EPOCH_SHIFT);
    if (thread == 0) me.state->arrived = 0;
    if (p.triggers) launch_dependents();
    // (6) sync done: acquire, pairs with the releases above on every peer
    bool failed = false;
    if (p.waits != 0 && expected != 0) wait_for<Words::DONE>(me, OP_DISPATCH, PHASE_ROWS, thread, word_at(me, me.rank, DONE, thread), done, failed);
    if (failed) report(me);
}
