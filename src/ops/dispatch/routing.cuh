// The routing of a call, shared by the kernels that make it: destinations of a token, its record, and what the count matrix decides.
// Needs layout.cuh and its constants, and:
//   THREADS      of a block
//   REPLAY       the routing is kept, only counts are exchanged
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
    u32 may_drop;
    RoutingHead* routing;
    u32* counts;      // [WORLD, NUM_WORDS]
    u32* sent;        // [T, NUM_DESTINATIONS]
    char* records;    // [T, ROUTE_BYTES]
    BankHead* arrival;
};

// What is wrong with a call, in bits.
constexpr u32 OVERSIZE = 1, FAILED = 2, OTHER_CALL = 4, OTHER_ROUTING = 8;

// The distinct owners of a token's routes; a route is masked when its id is out of range or stood before in the row.
DEVICE u64 destinations(const Rank& me, const Call& call, u32 token, i32 (&ids)[K]) {
    const Index* row = call.topk_idx + token * call.idx_stride;
    Index raw[K];
#pragma unroll
    for (u32 r = 0; r < K; r++) raw[r] = row[r];
    u64 mask = 0;
#pragma unroll
    for (u32 r = 0; r < K; r++) {
        bool is_masked = raw[r] < 0 || raw[r] >= (Index)NUM_EXPERTS;
#pragma unroll
        for (u32 q = 0; q < r; q++) is_masked |= raw[q] == raw[r];
        ids[r] = is_masked ? -1 : (i32)raw[r];
        if (!is_masked) mask |= 1ull << owner_of(me, (u32)raw[r]);
    }
    return mask;
}

// The tokens of this warp for each rank: lane r % WARP holds the count of rank r, for r below WARP in `low`, above in `high`.
DEVICE void count_lanes(u64 mask, u32 lane, u32& low, u32& high) {
#pragma unroll 8
    for (u32 r = 0; r < WORLD; r++) {
        const u32 n = num_bits(lanes_where(mask >> r & 1));
        if (lane == r % WARP) (r < WARP ? low : high) += n;
    }
}

DEVICE void write_record(const Rank& me, const Call& call, u32 token, const i32 (&ids)[K], char* to) {
    u32 words[ROUTE_BYTES / 4];
    words[0] = me.rank;
    words[1] = token;
    const float* weights = call.topk_weights + token * call.weight_stride;
#pragma unroll
    for (u32 r = 0; r < K; r++) {
        words[2 + r] = (u32)ids[r];
        const float w = call.topk_weights ? weights[r] : 1.0f;
        words[2 + K + r] = ids[r] >= 0 ? bits_of(w) : 0;
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

struct Decision {
    u32 base[WORLD];      // arrivals of lower ranks at each rank
    u32 start[WORLD + 1]; // arrivals here of each sender
    u32 dropped[WORLD];
};

// From the whole count matrix: whether the call goes on, where this rank's rows begin, what it receives. All ranks decide alike. One block writes
// what is kept. All threads take part; `d` is theirs afterwards.
DEVICE bool decide(const Rank& me, const Call& call, const u32 (&matrix)[WORLD][WORLD], u32 problem, u64 epoch, u32 asked, u32 num_tokens, bool writes, Decision& d) {
    const u32 thread = thread_idx();
    u32 demand = 0, base = 0, start = 0;
    if (thread < WORLD) {
        for (u32 sender = 0; sender < WORLD; sender++) {
            const u32 n = matrix[sender][thread];
            demand += n;
            if (sender < me.rank) base += n;
            if (sender < thread) start += matrix[sender][me.rank];
        }
        d.base[thread] = base;
        d.start[thread] = start;
        if (thread == WORLD - 1) d.start[WORLD] = start + matrix[thread][me.rank];
        const u32 mine = matrix[me.rank][thread];
        const u32 room = base < call.max_rows ? call.max_rows - base : 0;
        d.dropped[thread] = mine > room ? mine - room : 0;
        if (!call.may_drop && demand > call.max_rows) problem |= 16;
    }
    const bool is_refused = block_any(problem != 0);
    if (!is_refused) {
        if (!writes) return false;
        if (thread < WORLD) {
            if (!REPLAY) call.routing->arrival_base[thread] = base;
            call.arrival->arrival_start[thread] = start;
        }
        if (thread == me.rank) {
            const u32 kept = demand < call.max_rows ? demand : call.max_rows;
            call.arrival->arrival_start[WORLD] = demand;
            call.arrival->num_arrivals = demand;
            call.arrival->num_rows = kept;
            call.arrival->num_dropped = demand - kept;
            call.arrival->is_valid = 1;
            me.state->bank_epoch[me.bank] = epoch;
        }
        if (thread == 0 && !REPLAY) {
            u32 dropped = 0;
            for (u32 r = 0; r < WORLD; r++) dropped += d.dropped[r];
            call.routing->num_dropped = dropped;
            call.routing->epoch = epoch;
            call.routing->num_tokens = num_tokens;
        }
        return false;
    }
    // Refused: whoever comes after sees no rows, writes nothing and waits for nobody.
    const bool has_failed = block_any(problem & FAILED), is_other = block_any(problem & (OTHER_CALL | OTHER_ROUTING)), is_oversize = block_any(problem & OVERSIZE);
    if (!writes) return true;
    if (thread == 0) {
        if (!REPLAY) {
            call.routing->epoch = 0;
            call.routing->num_tokens = 0;
            call.routing->num_dropped = 0;
        }
        call.arrival->num_rows = 0;
        call.arrival->num_dropped = 0;
        call.arrival->num_arrivals = 0;
        call.arrival->is_valid = 0;
        me.state->bank_epoch[me.bank] = 0;
    }
    if (has_failed) return true;
    if (thread < WORLD) {
        u64 tokens = matrix[thread][0];
        if (WORLD > 1) tokens |= (u64)matrix[thread][WORLD > 1 ? 1 : 0] << 20;
        store_relaxed_system(&me.host->demand[thread], is_oversize ? (thread == me.rank ? asked : tokens) : demand);
        store_relaxed_system(&me.host->capacity[thread], is_oversize ? call.max_tokens : call.max_rows);
        fence_system();
    }
    block_barrier();
    if (thread == 0) store_relaxed_system(&me.host->status, epoch << 8 | (is_other ? STATUS_MISMATCH : is_oversize ? STATUS_CAPACITY_TOKENS : STATUS_CAPACITY_ROWS));
    return true;
}
