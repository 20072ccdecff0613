// cast, what is done once a matrix.
//
// Computes   before the tiles: amax = 0 when that is asked for; scale_inv = 1 / scale, or 0 as the place of a matrix's own greatest magnitude
//            after them (FINISH): from that magnitude scale_inv = 1 / scale, and amax raised by it (oracle::cast::cast, oracle::cast::raised)
// Layout     see locate.cuh
// Work       a thread a matrix
// Shared     nothing
// Sync       none: kernels of a stream run one after the other
// Requires   checked views
//
// Constants: FROM, TO (types), LIST, TABLE, FINISH, CURRENT (bools), TILE_ROWS, TILE_COLUMNS, TILES_DOWN, TAIL_TILES, MAX_MATRICES.

constexpr u32 MATRIX_THREADS = 128; // arbitrary: few matrices, short work

KERNEL(MATRIX_THREADS) cast_matrices(PARAMETERS(Parameters) p) {
    wait_for_dependencies();
    const u32 i = block_idx_x() * MATRIX_THREADS + thread_idx();
    if (i >= p.num_matrices || is_noop(p)) {
        return;
    }
    const Matrix& m = p.matrices[LIST ? i : 0];
    const u32 at = LIST ? 0 : i;
    if constexpr (FINISH) {
        const bool is_empty = m.num_columns == 0 || (LIST ? m.num_rows == 0 : offset_of(p, i + 1) <= offset_of(p, i));
        const u32 bits = ((const u32*)m.scale_inv)[at];
        if (m.amax != nullptr && !is_empty) {
            m.amax[at] = m.amax[at] > (i32)bits ? m.amax[at] : (i32)bits;
        }
        m.scale_inv[at] = 1.0f / scale_of(p, (const float*)m.scale_inv, at);
    } else {
        if (m.amax != nullptr && p.flags & RESET_AMAX) {
            m.amax[at] = 0;
        }
        if (m.scale_inv != nullptr) {
            m.scale_inv[at] = CURRENT ? 0.0f : 1.0f / scale_of(p, m.scale, at);
        }
    }
}
