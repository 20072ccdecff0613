// What the kernels of expert parallelism share: memory of a rank that peers write, memory of a rank alone, words, records, bounded waits.
// Numbers in parentheses are steps of `ep/PROTOCOL.md`. Needs platform.cuh, sync.cuh, lanes.cuh and these constants:
//   WORLD, NUM_EXPERTS, K        ranks, global experts, routes of a token
//   HAS_MAP                      owners come from a table; otherwise expert e lives on rank floor(e * WORLD / NUM_EXPERTS)
//   BY_EXPERT                    0 ByToken, 1 ByExpert, 2 ByExpertFixed
//   LOCAL_IDS                    ids in records are local ones

constexpr u32 MAX_RANKS = 64; // spec (DESIGN 3.2): a token's destinations are one 64-bit mask
constexpr u32 NONE = 0xFFFFFFFF;
constexpr u32 NUM_DESTINATIONS = K < WORLD ? K : WORLD; // most ranks that a token goes to
constexpr u32 NUM_WORDS = WORLD + (BY_EXPERT ? NUM_EXPERTS : 0);
static_assert(WORLD >= 1 && WORLD <= MAX_RANKS && K >= 1 && K <= 32, "The tables are made for 64 ranks and 32 routes.");

// Count words (`ep/signal.rs`): epoch 40 bits, count 20, bank 1, invalid 1, kind 2.
// Done words: epoch 40 bits; below them, until all blocks of the next one have stored their rows, what those that have add up to.
constexpr u32 EPOCH_SHIFT = 24;
constexpr u32 COUNT_SHIFT = 4;
constexpr u64 COUNT_MASK = (1 << 20) - 1;
constexpr u64 KIND_DISPATCH = 1;
constexpr u64 KIND_REPLAY = 2;

// Where a token goes: rank in the upper 8 bits, position among this rank's tokens for it in the lower 24 (at most 524288 tokens).
constexpr u32 RANK_SHIFT = 24;
constexpr u32 POSITION_MASK = (1 << RANK_SHIFT) - 1;

// Words of a rank that its peers write, at `signals` in its memory: bytes from there. 128: a line of the second-level cache.
constexpr u64 ABORT = 0;                                    // u64: not 0 once any rank failed
constexpr u64 FAILURES = 128;                               // [WORLD] Failure, by writer
constexpr u64 COUNTS = FAILURES + 64 * WORLD;               // u64 [2 parities of the epoch, sender, NUM_WORDS], compared with ==
constexpr u64 DONE = COUNTS + 16ull * WORLD * NUM_WORDS;    // u64 [sender], epochs compared with >=
constexpr u64 READY = DONE + 8 * WORLD;                     // u64 [2 banks, sender]: epoch of the arrival, compared with >=
constexpr u64 SIGNAL_BYTES = READY + 16 * WORLD;

// What happened first, in words so that each is written whole.
struct Failure {
    u64 what;   // kind | op << 8 | phase << 16 | rank << 24 | peer << 32 | blocks arrived << 40
    u64 wanted; // epoch
    u64 seen;
    u64 time;
    u64 spare[4];
};
static_assert(sizeof(Failure) == 64, "The host fills in the same struct.");
constexpr u32 FAILED_TIMEOUT = 1, FAILED_LEFT = 2;
constexpr u32 OP_DISPATCH = 1, OP_REPLAY = 2, OP_COMBINE = 3;
constexpr u32 PHASE_BLOCKS = 1, PHASE_COUNTS = 2, PHASE_ROWS = 3, PHASE_READY = 4;

// A rank's own memory, one for each object. Zeroed at setup.
struct State {
    u64 epoch;         // last dispatch or replay; advanced by its first kernel
    u64 bank_epoch[2]; // dispatch that filled the bank; 0 after one that was refused
    u64 failed;        // in its lower half: a wait of this rank came to its bound
    u32 arrived;       // blocks of the running kernel that have been counted; 0 between kernels
    u32 stored;        // the same for a second count in one kernel
    u64 spare[3];
};
static_assert(sizeof(State) == 64, "The host fills in the same struct.");

// In memory of the host: what kernels write and the next call returns as an error, and the word by which the host ends their waits.
struct HostRecord {
    u64 status; // 0, or one of STATUS_*; the epoch in the upper 56 bits
    u64 num_demands;
    Failure failure;
    u64 demand[MAX_RANKS];
    u64 capacity[MAX_RANKS];
    u64 abort; // not 0 once the host knows that the world has failed
    u64 left;  // a bit for each rank of which the host knows that it has left
};
static_assert(sizeof(HostRecord) == 1120, "The host fills in the same struct.");
constexpr u64 STATUS_CAPACITY_TOKENS = 1, STATUS_CAPACITY_ROWS = 2, STATUS_MISMATCH = 3, STATUS_FAILED = 4, STATUS_CAPACITY_EXPERT = 5;

// What describes an arrival, in this rank's own memory, one for each bank; arrays of u32 follow.
struct BankHead {
    u32 num_rows;
    u32 num_dropped;
    u32 num_arrivals;
    u32 is_valid;
    u32 arrival_start[MAX_RANKS + 1]; // first arrival of each sender
    u32 spare[3];
};
static_assert(sizeof(BankHead) == 288, "The host fills in the same struct.");

// What is kept of a dispatch for combine and replay, in memory of the caller.
struct RoutingHead {
    u64 epoch; // of the dispatch that filled it; 0: refused
    u32 num_tokens;
    u32 num_dropped;
    u32 arrival_base[MAX_RANKS]; // arrivals of lower ranks at each rank
};
static_assert(sizeof(RoutingHead) == 272, "The host fills in the same struct.");

// Where rows of one sender for one expert go on its owner: row i has slot `slot + i` while i is below `room`, otherwise it is dropped.
struct Place {
    u32 slot;
    u32 room;
};

// One rank, as every kernel knows it.
struct Rank {
    u64 timeout_ns;
    u64 signals;  // offset of the words in every rank's memory
    State* state;
    HostRecord* host;
    const u32* owners;       // when HAS_MAP: [NUM_EXPERTS]
    const u32* experts;      // when HAS_MAP: [NUM_EXPERTS] ids grouped by owner, ascending
    const u32* first_expert; // when HAS_MAP: [WORLD + 1] where each owner's begin in `experts`
    u32 rank;
    u32 bank;
    u32 is_one_device; // 1: all ranks are threads of one process on this device
    u32 spare;
    u64 peers[WORLD]; // memory of every rank, at the addresses that this device uses; at the end of every parameter struct
};
static_assert(sizeof(Rank) == 72 + 8 * WORLD, "The host fills in the same struct.");

DEVICE u64* word_at(const Rank& me, u32 peer, u64 offset, u64 index) {
    return (u64*)(me.peers[peer] + me.signals + offset) + index;
}

DEVICE u64 count_index(u64 epoch, u32 sender, u32 word) {
    return ((epoch & 1) * WORLD + sender) * NUM_WORDS + word;
}

DEVICE u32 owner_of(const Rank& me, u32 expert) {
    if (HAS_MAP) return me.owners[expert];
    return (u32)((u64)expert * (u64)WORLD / (u64)NUM_EXPERTS);
}

// The experts of rank r are `expert_at(i)` for i from `first_expert_of(r)` to `first_expert_of(r + 1)`, ascending.
DEVICE u32 first_expert_of(const Rank& me, u32 rank) {
    if (HAS_MAP) return me.first_expert[rank];
    return (u32)(((u64)rank * (u64)NUM_EXPERTS + WORLD - 1) / (u64)WORLD);
}

DEVICE u32 expert_at(const Rank& me, u32 i) {
    return HAS_MAP ? me.experts[i] : i;
}

// The id of an expert inside its owner.
DEVICE u32 local_of(const Rank& me, u32 expert) {
    const u32 first = first_expert_of(me, owner_of(me, expert));
    if (!HAS_MAP) return expert - first;
    u32 i = first;
    while (me.experts[i] != expert) i++;
    return i - first;
}

DEVICE bool is_aborted(const Rank& me) {
    return load_relaxed_system(word_at(me, me.rank, ABORT, 0)) != 0;
}

// The same, or this rank's host says so: whoever finds that passes it on to the kernels behind. Only in waits that last: a read of the host's memory takes
// microseconds.
DEVICE bool must_end(const Rank& me, u32 polls) {
    if (is_aborted(me) || load_relaxed_device(&me.state->failed) != 0) return true;
    if (polls % 1024 != 1023 || load_relaxed_system(&me.host->abort) == 0) return false; // 1024: arbitrary, about half a millisecond
    store_relaxed_system(word_at(me, me.rank, ABORT, 0), 1);
    return true;
}

// This rank's host says that `peer` has left: its kernels had ended by then, so what it has not said it never will. As rarely as above.
DEVICE bool has_left(const Rank& me, u32 peer, u32 polls) {
    // sync left: acquire, pairs with the host's store; the poll that follows sees all that the rank has said
    return polls % 1024 == 1023 && (load_acquire_system(&me.host->left) >> peer & 1) != 0;
}

// A wait that ends without what it waited for. Kept until the end of the kernel, where `report` stands once: code that never runs would lie in the way.
struct TimedOut {
    u64 what; // as Failure
    u64 wanted;
    u64 seen;
};

DEVICE TimedOut& timed_out() {
    SHARED TimedOut first;
    return first;
}

// Records a failure at every rank, and makes all of them give up. Only the thread whose wait returned 0 with `failed` set, at the end.
DEVICE void report(const Rank& me) {
    const TimedOut& t = timed_out();
    const u64 now = time_ns();
#pragma unroll 1
    for (u32 i = 0; i <= WORLD; i++) {
        u64* words = i < WORLD ? word_at(me, i, FAILURES, me.rank * (sizeof(Failure) / 8)) : (u64*)&me.host->failure;
        store_relaxed_system(words + 1, t.wanted);
        store_relaxed_system(words + 2, t.seen);
        store_relaxed_system(words + 3, now);
        store_relaxed_system(words, t.what);
    }
    // sync first: release; the records are complete before any abort word says so. sync record: the host's, before its status
    release_system();
    store_relaxed_system(&me.host->status, STATUS_FAILED);
#pragma unroll 1
    for (u32 i = 0; i < WORLD; i++) store_relaxed_system(word_at(me, i, ABORT, 0), 1);
}

// The first wait of this rank that comes to its bound, or waits for a rank that has left, is written down; true for the thread that had it. All of its later
// waits end at once.
DEVICE bool give_up(const Rank& me, u32 op, u32 phase, u32 peer, u64 wanted, u64 seen, u32 kind = FAILED_TIMEOUT) {
    if (claim_relaxed_device((u32*)&me.state->failed, 1) != 0) return false;
    const u64 arrived = me.state->arrived & 0xFFFFFF;
    timed_out() = {kind | op << 8 | phase << 16 | (u64)me.rank << 24 | (u64)peer << 32 | arrived << 40, wanted, seen};
    return true;
}

// Kinds of words. READY holds an epoch, the others hold one above what else they say.
enum class Words { COUNT, DONE, READY };

// Polls a word until it is of the epoch (count words) or at least of it (the others), and acquires. Returns its value, or 0 after a failure of
// any rank.
template <Words KIND> DEVICE u64 wait_for(const Rank& me, u32 op, u32 phase, u32 peer, const u64* at, u64 wanted, bool& failed) {
    u64 start = 0;
    bool is_gone = false;
    for (u32 polls = 0;; polls++) {
        const u64 value = load_acquire_system(at);
        const u64 seen = KIND == Words::READY ? value : value >> EPOCH_SHIFT;
        if (KIND == Words::COUNT ? seen == wanted : seen >= wanted) return value;
        if (polls % 32 != 31) continue; // arbitrary: the clock is read every 20 us at most
        if (start == 0) start = time_ns();
        if (must_end(me, polls)) return 0;
        if (is_gone || time_ns() - start > me.timeout_ns) {
            failed |= give_up(me, op, phase, peer, wanted, seen, is_gone ? FAILED_LEFT : FAILED_TIMEOUT);
            return 0;
        }
        is_gone = has_left(me, peer, polls); // then 32 more polls
    }
}

// What lane r keeps of rank r: where its memory is, and this rank's first arrival there. In lanes and not in tables: one load, no chain.
struct LaneRanks {
    u64 memory;
    u32 base;
};

DEVICE LaneRanks load_lane_ranks(const Rank& me, const RoutingHead* routing, u32 lane) {
    LaneRanks lanes = {0, 0};
    if (WORLD <= WARP && lane < WORLD) lanes = {me.peers[lane], routing->arrival_base[lane]};
    return lanes;
}

// Of an entry of `sent`: the rank, the number of the arrival there, the rank's memory. NONE, NONE, 0 when the lane has none. All lanes take part.
struct Destination {
    u64 memory;
    u32 rank;
    u32 arrival;
};

DEVICE Destination destination_of(const Rank& me, const RoutingHead* routing, const LaneRanks& lanes, u32 entry) {
    const bool is_there = entry != NONE;
    const u32 rank = is_there ? entry >> RANK_SHIFT : 0;
    u64 memory;
    u32 base;
    if (WORLD <= WARP) {
        memory = from_lane64(lanes.memory, rank);
        base = from_lane(lanes.base, rank);
    } else {
        memory = me.peers[rank];
        base = routing->arrival_base[rank];
    }
    return {memory, is_there ? rank : NONE, is_there ? base + (entry & POSITION_MASK) : NONE};
}
