// Computes   what a caller asks of an arrival beside its views: sources, ids and weights of its rows unpacked from their records; in the expert layouts
//            the rows of each local expert, copied to the host and added to running statistics.
// Layout     records of the bank [rows, RECORD_BYTES]; source i32 [rows, 2], ids i32 and weights f32 [rows, ROW_K], contiguous, or null; statistics
//            u64 [L], counts_host u32 [L] in pinned memory, or null.
// Work       a thread per row, a stride of the grid apart; block 0 the counts. Few bytes; only called when asked for.
// Shared     none.
// Sync       none: the bank is this rank's alone (7).
// Requires   the outputs hold the rows that are valid.

struct ReportParameters {
    const BankHead* arrival;
    const char* records;
    const u32* expert_rows; // rows of each local expert, or null
    i32* source;
    i32* ids;
    f32* weights;
    u64* statistics;
    u32* counts_host;
    u32 num_local;
    u32 rows_per_expert; // of a fixed segment; otherwise 0
    Rank me;
};
static_assert(sizeof(ReportParameters) == 72 + sizeof(Rank), "The host fills in the same struct.");

KERNEL(THREADS) report(PARAMETERS(ReportParameters) p) {
    wait_for_dependencies();
    const u32 thread = thread_idx();
    // A call that was refused leaves the caller's memory as it is.
    if (block_idx_x() == 0 && p.expert_rows != nullptr && p.arrival->is_valid != 0) {
        for (u32 l = thread; l < p.num_local; l += THREADS) {
            const u32 num = p.expert_rows[l];
            if (p.statistics != nullptr) p.statistics[l] += num;
            if (p.counts_host != nullptr) p.counts_host[l] = num;
        }
    }
    if (p.source == nullptr) return;
    const u32 num_rows = p.arrival->num_rows;
    for (u32 row = block_idx_x() * THREADS + thread; row < num_rows; row += grid_blocks() * THREADS) {
        const bool is_row = p.rows_per_expert == 0 || row % p.rows_per_expert < p.expert_rows[row / p.rows_per_expert];
        const i32* record = (const i32*)(p.records + (u64)row * RECORD_BYTES);
        for (u32 i = 0; i < 2; i++) p.source[2ull * row + i] = is_row ? record[i] : -1;
        for (u32 i = 0; i < ROW_K; i++) {
            p.ids[(u64)ROW_K * row + i] = is_row ? record[2 + i] : -1;
            p.weights[(u64)ROW_K * row + i] = is_row ? ((const f32*)record)[2 + ROW_K + i] : 0.0f;
        }
    }
}
