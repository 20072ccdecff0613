// The routing of a call, shared by the kernels that make it: destinations of a token, its record, and what the count matrix decides.
// Needs layout.cuh and its constants, and:
//   THREADS      of a block
//   SMALL        few tokens: one tile is enough
//   REPLAY       the routing is kept, only counts are exchanged
//   MAY_DROP     rows beyond the buffers are dropped
//   Index        i32 or i64

constexpr u32 NUM_WARPS = THREADS / WARP;
constexpr u32 ROUTE_BYTES = (8 + 8 * K + 15) / 16 * 16; // of a token's part of a record: source, ids, weights
constexpr u32 OP = REPLAY ? OP_REPLAY : OP_DISPATCH;
constexpr u64 KIND = REPLAY ? KIND_REPLAY : KIND_DISPATCH;

// A call's input and where its routing is kept.
struct Call {
    const Index* topk_idx;
    const float* topk_weights; // null: all 1
    const u32* device_tokens;  // null: num_tokens
    u64 idx_stride;            // elements
    u64 weight_stride;
    u32 num_tokens;
    u32 max_tokens;
    u32 max_rows;
    u32 most_tokens; // that can be read; a device count above it is refused as one above max_tokens is
    RoutingHead* routing;
    u32* counts;      // [WORLD, NUM_WORDS]
    u32* sent;        // [T, NUM_DESTINATIONS]
    char* records;    // [T, ROUTE_BYTES]
    BankHead* arrival;
    // Expert layouts.
    u32* rows;           // [T, K] position among this rank's rows of the expert, NONE where masked
    Place* places;       // [NUM_EXPERTS] of this rank's rows
    Place* arriving;     // [WORLD, local experts] of the rows that come here
    u32* expert_rows;    // [local experts] rows kept
    u32* segment_start;  // [local experts + 1]
    u32 segment_align;   // rows to whose multiple a segment is padded
    u32 rows_per_expert; // most rows that a segment keeps
};
static_assert(sizeof(Call) == 144, "The host fills in the same struct.");

// Tokens routed at a time. Expert layouts: limited by the bits of all experts in shared memory.
constexpr u32 EXPERTS = BY_EXPERT ? NUM_EXPERTS : 1;
constexpr u32 BIT_BYTES = 16384; // derived: with three words for each of 2048 experts it stays below 48 KB of static shared memory
constexpr u32 MOST_TILE = BY_EXPERT != 0 ? BIT_BYTES * 8 / EXPERTS / 64 * 64 : THREADS; // whole warps of 64 too
static_assert(EXPERTS <= 2048, "The expert layouts keep a word for each expert in shared memory.");

// The routes of a tile by expert: one bit for each token.
template <u32 TILE> struct ExpertTile {
    u32 bits[EXPERTS][TILE / 32];
    u32 running[EXPERTS]; // rows before the tile
};

// The positions of a tile's routes among the rows of their experts, in the order of tokens. All threads take part; the first TILE have a token.
template <u32 TILE> DEVICE void place_experts(ExpertTile<TILE>& tile, const i32 (&ids)[K], bool has_token, u32 (&positions)[K]) {
    const u32 thread = thread_idx();
    for (u32 i = thread; i < EXPERTS * (TILE / 32); i += THREADS) tile.bits[i / (TILE / 32)][i % (TILE / 32)] = 0;
    block_barrier();
    if (has_token) {
#pragma unroll
        for (u32 r = 0; r < K; r++) {
            if (ids[r] >= 0) set_bits_shared(&tile.bits[ids[r]][thread / 32], 1u << thread % 32);
        }
    }
    block_barrier();
    if (has_token) {
#pragma unroll
        for (u32 r = 0; r < K; r++) {
            positions[r] = NONE;
            if (ids[r] < 0) continue;
            u32 n = tile.running[ids[r]];
            MASK_LOOP
            for (u32 w = 0; w < thread / 32; w++) n += num_bits(tile.bits[ids[r]][w]);
            positions[r] = n + num_bits(tile.bits[ids[r]][thread / 32] & ((1u << thread % 32) - 1));
        }
    }
    block_barrier();
    for (u32 e = thread; e < EXPERTS; e += THREADS) {
        u32 n = tile.running[e];
        MASK_LOOP
        for (u32 w = 0; w < TILE / 32; w++) n += num_bits(tile.bits[e][w]);
        tile.running[e] = n;
    }
    block_barrier();
}

// What is wrong with a call, in bits.
constexpr u32 OVERSIZE = 1, FAILED = 2, OTHER_CALL = 4, OTHER_ROUTING = 8;

// A token's routes: ids, -1 where masked, and the bits of their weights.
struct Routes {
    i32 ids[K];
    u32 weights[K];
};

// Reads them, and returns the distinct owners. A route is masked when its id is out of range or stood before in the row.
DEVICE u64 destinations(const Rank& me, const Call& call, u32 token, Routes& routes) {
    const Index* row = call.topk_idx + token * call.idx_stride;
    Index raw[K];
#pragma unroll
    for (u32 r = 0; r < K; r++) raw[r] = row[r];
    const float* weights = call.topk_weights + token * call.weight_stride;
#pragma unroll
    for (u32 r = 0; r < K; r++) routes.weights[r] = bits_of(call.topk_weights ? weights[r] : 1.0f);
    i32(&ids)[K] = routes.ids;
    u64 mask = 0;
#pragma unroll
    for (u32 r = 0; r < K; r++) {
        const i32 id = raw[r] >= 0 && raw[r] < (Index)NUM_EXPERTS ? (i32)raw[r] : -1;
        bool is_new = id >= 0;
#pragma unroll
        for (u32 q = 0; q < r; q++) is_new &= ids[q] != id;
        ids[r] = is_new ? id : -1;
        if (is_new) mask |= 1ull << owner_of(me, (u32)id);
    }
    return mask;
}

// The tokens of this warp for each rank: lane r % WARP holds the count of rank r, for r below WARP in `low`, above in `high`.
DEVICE void count_lanes(u64 mask, u32 lane, u32& low, u32& high) {
#pragma unroll MASKS_AT_ONCE
    for (u32 r = 0; r < WORLD; r++) {
        const u32 n = num_bits(lanes_where(mask >> r & 1));
        if (lane == r % WARP) (r < WARP ? low : high) += n;
    }
}

DEVICE void write_record(const Rank& me, u32 token, const Routes& routes, char* to) {
    u32 words[ROUTE_BYTES / 4];
    words[0] = me.rank;
    words[1] = token;
#pragma unroll
    for (u32 r = 0; r < K; r++) {
        words[2 + r] = (u32)routes.ids[r];
        words[2 + K + r] = routes.ids[r] >= 0 ? routes.weights[r] : 0;
    }
#pragma unroll
    for (u32 i = 2 + 2 * K; i < ROUTE_BYTES / 4; i++) words[i] = 0;
#pragma unroll
    for (u32 v = 0; v < ROUTE_BYTES / 16; v++) *(Vec16*)(to + 16 * v) = Vec16{{words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3]}};
}

// The word of this rank about `count` tokens for rank `r`.
DEVICE u64 count_word(const Rank& me, u64 epoch, u32 r, u32 count, bool is_oversize, u32 asked) {
    // With too many tokens the words carry their number, 20 bits each.
    const u64 value = is_oversize ? (r < 2 ? (u64)asked >> 20 * r & COUNT_MASK : 0) : count;
    return epoch << EPOCH_SHIFT | value << COUNT_SHIFT | (u64)me.bank << 3 | (u64)is_oversize << 2 | KIND;
}

// What is wrong by a word of a peer.
DEVICE u32 problem_of(const Rank& me, u64 word) {
    if (word == 0) return FAILED;
    const bool is_same = (word & 3) == KIND && (word >> 3 & 1) == me.bank;
    return (word >> 2 & 1 ? OVERSIZE : 0) | (is_same ? 0 : OTHER_CALL);
}

// The flags of a word that is not of this call, above its count: the count matrix is then only read to say what is wrong.
constexpr u32 MARK_SHIFT = 28;
constexpr u32 MARK_INVALID = 4;

DEVICE u32 marks_of(const Rank& me, u64 word) {
    return problem_of(me, word) != 0 ? (u32)(word & 15) << MARK_SHIFT : 0;
}

struct Decision {
    u32 base[WORLD];      // arrivals of lower ranks at each rank
    u32 start[WORLD + 1]; // arrivals here of each sender
    u32 demand[WORLD];    // rows that each rank needs
    u32 dropped[WORLD];   // of this rank's rows there
    u32 dropped_here;
    u32 num_rows;
};

constexpr u32 TOO_MANY_ROWS = 16;

// Expert layouts: where the segments of every rank begin and what they keep. `rows` [NUM_EXPERTS]: all rows of each expert.
DEVICE void place_segments(const Rank& me, const Call& call, const u32* rows, bool writes, Decision& d) {
    const u32 lane = thread_idx() % WARP;
    const u32 limit = BY_EXPERT == 1 && !MAY_DROP ? NONE : call.rows_per_expert;
    for (u32 rank = thread_idx() / WARP; rank < WORLD; rank += NUM_WARPS) {
        const u32 first = first_expert_of(me, rank), end = first_expert_of(me, rank + 1);
        u32 start = 0, most = 0, dropped = 0, dropped_here = 0;
        for (u32 i = first; i < end; i += WARP) {
            const bool is_expert = i + lane < end;
            const u32 expert = is_expert ? expert_at(me, i + lane) : 0;
            const u32 all = is_expert ? rows[expert] : 0;
            const u32 kept = all < limit ? all : limit;
            const u32 padded = BY_EXPERT == 2 ? call.rows_per_expert : (kept + call.segment_align - 1) / call.segment_align * call.segment_align;
            const u32 taken = is_expert ? padded : 0;
            u32 sum = taken; // of this lane and those before
            for (u32 step = 1; step < WARP; step *= 2) {
                const u32 below = from_lane(sum, lane >= step ? lane - step : lane);
                if (lane >= step) sum += below;
            }
            const u32 segment = start + sum - taken;
            if (is_expert) {
                most = all > most ? all : most;
                u32 before = 0;
                for (u32 sender = 0; sender < WORLD; sender++) {
                    const u32 n = call.counts[sender * NUM_WORDS + WORLD + expert];
                    const Place place = {segment + before, kept > before ? kept - before : 0};
                    if (sender == me.rank) {
                        if (writes && !REPLAY) call.places[expert] = place;
                        dropped += n > place.room ? n - place.room : 0;
                    }
                    if (writes && rank == me.rank) call.arriving[sender * (end - first) + i + lane - first] = place;
                    before += n;
                }
                if (rank == me.rank) dropped_here += all - kept;
                if (writes && rank == me.rank) {
                    call.expert_rows[i + lane - first] = kept;
                    call.segment_start[i + lane - first] = segment;
                    if (i + lane + 1 == end) call.segment_start[end - first] = segment + taken;
                }
            }
            start += from_lane(sum, WARP - 1);
        }
        for (u32 step = 1; step < WARP; step *= 2) {
            const u32 other = from_lane(most, lane ^ step);
            most = other > most ? other : most;
            dropped += from_lane(dropped, lane ^ step);
            dropped_here += from_lane(dropped_here, lane ^ step);
        }
        if (lane == 0) {
            d.demand[rank] = BY_EXPERT == 2 ? most : start;
            d.dropped[rank] = dropped;
            if (rank == me.rank) {
                d.dropped_here = dropped_here;
                d.num_rows = start;
            }
        }
    }
}

// A refused call: whoever comes after sees no rows, writes nothing and waits for nobody; the host learns why.
DEVICE void refuse(const Rank& me, const Call& call, const u32 (&matrix)[WORLD][WORLD], u32 problem, u64 epoch, u32 asked, const Decision& d) {
    const u32 lane = thread_idx() % WARP;
    const u32 capacity = BY_EXPERT == 2 ? call.rows_per_expert : call.max_rows;
    if (lane == 0) {
        me.state->bank_epoch[me.bank] = 0;
        if (!REPLAY) {
            call.routing->epoch = 0;
            call.routing->num_tokens = 0;
            call.routing->num_dropped = 0;
        }
        call.arrival->num_rows = 0;
        call.arrival->num_dropped = 0;
        call.arrival->num_arrivals = 0;
        call.arrival->is_valid = 0;
    }
    if (BY_EXPERT) {
        const u32 num_local = first_expert_of(me, me.rank + 1) - first_expert_of(me, me.rank);
        for (u32 l = lane; l <= num_local; l += WARP) {
            if (l < num_local) call.expert_rows[l] = 0;
            call.segment_start[l] = 0;
        }
    }
    if (problem & FAILED) return;
    const bool is_other = problem & (OTHER_CALL | OTHER_ROUTING), is_oversize = problem & OVERSIZE;
#pragma unroll 1
    for (u32 r = lane; r < WORLD; r += WARP) {
        const u32 marks = matrix[r][0] >> MARK_SHIFT;
        u64 needed = d.demand[r], available = capacity;
        if (is_other) {
            // What each rank called, and its count for this rank; what this rank called, and the count that it expected.
            const u32 count = matrix[r][me.rank] & COUNT_MASK;
            needed = marks | (u64)count << 8;
            available = me.bank << 3 | KIND | (u64)(REPLAY ? call.counts[r * NUM_WORDS + me.rank] : count) << 8;
        } else if (is_oversize) {
            // Of those that have too many tokens; one rank alone has but 20 bits: its own number is known.
            u64 tokens = matrix[r][0] & COUNT_MASK;
            if (NUM_WORDS > 1) tokens |= (u64)call.counts[r * NUM_WORDS + 1] << 20;
            needed = (marks & MARK_INVALID) == 0 ? 0 : r == me.rank ? asked : tokens;
            available = r == me.rank ? call.most_tokens : call.max_tokens;
        }
        store_relaxed_system(&me.host->demand[r], needed);
        store_relaxed_system(&me.host->capacity[r], available);
    }
    // sync record: release, pairs with the acquire of the host, which reads the status first
    release_system();
    warp_barrier();
    const u64 status = is_other ? STATUS_MISMATCH : is_oversize ? STATUS_CAPACITY_TOKENS : BY_EXPERT == 2 ? STATUS_CAPACITY_EXPERT : STATUS_CAPACITY_ROWS;
    if (lane == 0) store_relaxed_system(&me.host->status, epoch << 8 | status);
}

// From the whole count matrix: whether the call goes on, where this rank's rows begin, what it receives. All ranks decide alike. Done by the first
// warp; in the expert layouts after `place_segments` and a barrier. `problem`: what the words said. One block writes what is kept.
DEVICE bool decide(const Rank& me, const Call& call, const u32 (&matrix)[WORLD][WORLD], u32 problem, u64 epoch, u32 asked, u32 num_tokens, bool writes, Decision& d) {
    const u32 lane = thread_idx() % WARP;
    const u32 capacity = BY_EXPERT == 2 ? call.rows_per_expert : call.max_rows;
    bool is_over = false;
#pragma unroll 1
    for (u32 r = lane; r < WORLD; r += WARP) {
        u32 demand = 0, base = 0, start = 0;
#pragma unroll MASKS_AT_ONCE
        for (u32 sender = 0; sender < WORLD; sender++) {
            const u32 n = matrix[sender][r];
            demand += n;
            if (sender < me.rank) base += n;
            if (sender < r) start += matrix[sender][me.rank];
        }
        d.base[r] = base;
        d.start[r] = start;
        if (r == WORLD - 1) d.start[WORLD] = start + matrix[r][me.rank];
        if (!BY_EXPERT) {
            const u32 mine = matrix[me.rank][r];
            const u32 room = base < call.max_rows ? call.max_rows - base : 0;
            d.demand[r] = demand;
            d.dropped[r] = mine > room ? mine - room : 0;
            if (r == me.rank) {
                d.num_rows = demand < call.max_rows ? demand : call.max_rows;
                d.dropped_here = demand - d.num_rows;
            }
        }
        is_over |= (BY_EXPERT == 1 || !MAY_DROP) && d.demand[r] > capacity;
    }
    if (problem == 0 && lanes_where(is_over) != 0) problem = TOO_MANY_ROWS;
    warp_barrier();
    if (!writes) return problem != 0;
    if (problem == 0) {
#pragma unroll 1
        for (u32 r = lane; r < WORLD; r += WARP) {
            if (!REPLAY) call.routing->arrival_base[r] = d.base[r];
            call.arrival->arrival_start[r] = d.start[r];
        }
        if (lane == 0) {
            me.state->bank_epoch[me.bank] = epoch;
            call.arrival->arrival_start[WORLD] = d.start[WORLD];
            call.arrival->num_arrivals = d.start[WORLD];
            call.arrival->num_rows = d.num_rows;
            call.arrival->num_dropped = d.dropped_here;
            call.arrival->is_valid = 1;
            if (!REPLAY) {
                u32 dropped = 0;
                for (u32 r = 0; r < WORLD; r++) dropped += d.dropped[r];
                call.routing->num_dropped = dropped;
                call.routing->epoch = epoch;
                call.routing->num_tokens = num_tokens;
            }
        }
        return false;
    }
    refuse(me, call, matrix, problem, epoch, asked, d);
    return true;
}

// By token, nothing dropped, a lane for each rank: what `decide` decides when all is well, in registers and few instructions (measured, H200, 128 tokens, 2 ranks: a
// dispatch 0.16 us shorter). Otherwise writes nothing and returns false. Done by the first warp.
constexpr bool IS_PLAIN = !BY_EXPERT && !MAY_DROP && WORLD <= WARP;

DEVICE bool decide_plain(const Rank& me, const Call& call, const u32 (&matrix)[WORLD][WORLD], u32 problem, u64 epoch, u32 num_tokens) {
    const u32 lane = thread_idx() % WARP;
    const bool is_rank = lane < WORLD;
    const u32 r = is_rank ? lane : 0;
    u32 demand = 0, base = 0, start = 0;
#pragma unroll MASKS_AT_ONCE
    for (u32 sender = 0; sender < WORLD; sender++) {
        const u32 there = matrix[sender][r], here = matrix[sender][me.rank];
        demand += there;
        base += sender < me.rank ? there : 0;
        start += sender < r ? here : 0;
    }
    const u32 end = start + matrix[r][me.rank];
    if (problem != 0 || lanes_where(is_rank && demand > call.max_rows) != 0) return false;
    if (is_rank) {
        if (!REPLAY) call.routing->arrival_base[lane] = base;
        call.arrival->arrival_start[lane] = start;
    }
    if (lane == WORLD - 1) {
        me.state->bank_epoch[me.bank] = epoch;
        call.arrival->arrival_start[WORLD] = end;
        call.arrival->num_arrivals = end;
        call.arrival->num_rows = end;
        call.arrival->num_dropped = 0;
        call.arrival->is_valid = 1;
        if (!REPLAY) {
            call.routing->num_dropped = 0;
            call.routing->epoch = epoch;
            call.routing->num_tokens = num_tokens;
        }
    }
    return true;
}
