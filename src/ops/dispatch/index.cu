// Computes   ByToken: how many received rows have a route to each local expert, and for GEMMs that gather the slots of those rows, ascending, each
//            segment padded to a multiple of `align` with -1 (oracle::dispatch, gather_idx); adds the counts to running statistics.
// Layout     records of the bank [rows, RECORD_BYTES]; num_rows_per_expert u32 [L], segment_start u32 [L + 1], gather_idx i32, statistics u64 [L]: the
//            last three may be null (gather_idx and segment_start together).
// Work       one block: rows in runs of THREADS, positions from bits of all local experts. Few bytes a row; only called when asked for.
// Shared     bits and counts of the local experts: struct Shared.
// Sync       none: the bank is this rank's alone (7).
// Requires   MOST_LOCAL local experts at most; gather_idx has room for all segments.

constexpr u32 RUN = 32 * (THREADS / 32);

struct IndexParameters {
    const BankHead* arrival;
    const char* records;
    u32* num_rows_per_expert;
    u32* segment_start;
    i32* gather_idx;
    u64* statistics;
    u32* counts_host; // pinned memory of the host, or null
    u32 align;
    u32 spare;
    Rank me;
};
static_assert(sizeof(IndexParameters) == 64 + sizeof(Rank), "The host fills in the same struct.");

struct Shared {
    u32 bits[MOST_LOCAL][RUN / 32];
    u32 counts[MOST_LOCAL];
    u32 starts[MOST_LOCAL + 1];
};

// The local expert of a route of a row, or NONE.
DEVICE u32 local_expert(const Rank& me, u32 id) {
    if (id == NONE || LOCAL_IDS) return id;
    return owner_of(me, id) == me.rank ? local_of(me, id) : NONE;
}

KERNEL_UNROUNDED(THREADS) index_rows(PARAMETERS(IndexParameters) p) {
    SHARED Shared s;
    const Rank& me = p.me;
    const u32 thread = thread_idx();
    wait_for_dependencies();
    const u32 num_local = first_expert_of(me, me.rank + 1) - first_expert_of(me, me.rank);
    const u32 num_rows = p.arrival->num_rows;
    for (u32 l = thread; l < MOST_LOCAL; l += THREADS) s.counts[l] = 0;
    block_barrier();
    for (u32 row = thread; row < num_rows; row += THREADS) {
        const u32* ids = (const u32*)(p.records + (u64)row * RECORD_BYTES) + 2;
        for (u32 r = 0; r < K; r++) {
            const u32 local = local_expert(me, ids[r]);
            if (local != NONE) add_shared(&s.counts[local], 1);
        }
    }
    block_barrier();
    if (thread == 0) {
        u32 start = 0;
        for (u32 l = 0; l < num_local; l++) {
            s.starts[l] = start;
            start += (s.counts[l] + p.align - 1) / p.align * p.align;
        }
        s.starts[num_local] = start;
    }
    block_barrier();
    for (u32 l = thread; l <= num_local; l += THREADS) {
        if (p.segment_start != nullptr) p.segment_start[l] = s.starts[l];
        if (l == num_local) continue;
        p.num_rows_per_expert[l] = s.counts[l];
        if (p.statistics != nullptr) p.statistics[l] += s.counts[l];
        if (p.counts_host != nullptr && p.arrival->is_valid != 0) p.counts_host[l] = s.counts[l]; // a call that was refused leaves it as it is
    }
    if (p.gather_idx == nullptr) return;
    for (u32 l = 0; l < num_local; l++) {
        for (u32 i = s.starts[l] + s.counts[l] + thread; i < s.starts[l + 1]; i += THREADS) p.gather_idx[i] = -1;
    }
    block_barrier();
    for (u32 first = 0; first < num_rows; first += RUN) {
        for (u32 i = thread; i < MOST_LOCAL * (RUN / 32); i += THREADS) s.bits[i / (RUN / 32)][i % (RUN / 32)] = 0;
        block_barrier();
        const u32 row = first + thread;
        const u32* ids = (const u32*)(p.records + (u64)row * RECORD_BYTES) + 2;
        for (u32 r = 0; r < K && row < num_rows; r++) {
            const u32 local = local_expert(me, ids[r]);
            if (local != NONE) set_bits_shared(&s.bits[local][thread / 32], 1u << thread % 32);
        }
        block_barrier();
        for (u32 r = 0; r < K && row < num_rows; r++) {
            const u32 local = local_expert(me, ids[r]);
            if (local == NONE) continue;
            u32 at = s.starts[local];
            for (u32 w = 0; w < thread / 32; w++) at += num_bits(s.bits[local][w]);
            p.gather_idx[at + num_bits(s.bits[local][thread / 32] & ((1u << thread % 32) - 1))] = (i32)row;
        }
        block_barrier();
        for (u32 l = thread; l < num_local; l += THREADS) {
            for (u32 w = 0; w < RUN / 32; w++) s.starts[l] += num_bits(s.bits[l][w]);
        }
        block_barrier();
    }
}
