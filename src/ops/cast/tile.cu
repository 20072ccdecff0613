// cast, one scale a matrix.
//
// Computes   row = round(scale * x), column = its transpose, amax raised to the greatest |x|, scale_inv = 1 / scale (oracle::cast::cast)
// Layout     x, row: rows at any stride; column: columns at any stride; see locate.cuh. With ALIGNED, rows of x and row are whole vectors of eight elements
// Work       a block casts a part of a matrix, up to TILES_DOWN tiles of TILE_ROWS x TILE_COLUMNS one below the other, a thread a patch of 8 x 8 of each:
//            load, round, store to row, put into the shared tile; then all threads store columns, dense along the addresses
// Shared     the transposed part; the part found; a word for each 32 threads
// Sync       block barriers; amax by atomic maximum, one a part
// Requires   checked views; pad_rows 1, 16, 32 or 128; fewer than 2^31 rows and columns, fewer than 2^32 padded rows
//
// Constants: FROM, TO (types), ROW, COLUMN, LIST, CURRENT, ALIGNED (bools), TILE_ROWS, TILE_COLUMNS, TILES_DOWN, MAX_MATRICES, BLOCKS (resident in a
// multiprocessor).

#if PLATFORM_AMD
extern __attribute__((shared)) u64 shared_tile[];
#else
extern __shared__ __align__(16) u64 shared_tile[];
#endif

// 1 / scale of every matrix, by the first block.
DEVICE void store_inverses(const Parameters& p) {
    for (u32 i = thread_idx(); i < p.num_matrices; i += NUM_THREADS) {
        const Matrix& m = p.matrices[LIST ? i : 0];
        if (m.scale_inv != nullptr) {
            m.scale_inv[LIST ? 0 : i] = 1.0f / scale_of(p, m.scale, LIST ? 0 : i);
        }
    }
}

KERNEL_FITTING(NUM_THREADS, BLOCKS) cast_tile(PARAMETERS(Parameters) p) {
    SHARED Part found;
    SHARED Parts parts_shared;
    SHARED u32 scratch[NUM_GROUPS];
    wait_for_dependencies();
    if (is_noop(p)) {
        return;
    }
    const u32 thread = thread_idx(), across = thread % ACROSS, down = thread / ACROSS;
    Search search = {};
    if (thread < 32) {
        const Parts parts = parts_of_block(p, thread, search);
        if (parts.next < parts.end) {
            locate(p, parts.next, thread, search, found);
        }
        if (thread == 0) {
            parts_shared = parts;
        }
    }
    if (block_idx_x() == 0) {
        store_inverses(p);
    }
    block_barrier();
    const u32 end = parts_shared.end;
    for (u32 next = parts_shared.next; next < end;) {
        const Matrix& m = p.matrices[LIST ? found.matrix : 0];
        const u32 num_rows = found.num_rows, num_valid = found.num_valid, matrix = found.matrix;
        const u32 num_columns = found.num_columns;
        const float scale = scale_of(p, m.scale, LIST ? 0 : matrix);
        const u32 left = across * PATCH < num_columns ? num_columns - across * PATCH : 0;
        const u32 columns_here = left < PATCH ? left : PATCH;
        const u8* x = found.x + down * PATCH * m.x_stride + across * PATCH * IN;
        u8* row = found.row + down * PATCH * m.row_stride + across * PATCH * OUT;
        const u32 in_piece = ALIGNED ? 16 : piece_of((u64)m.x, m.x_stride, m.num_columns * IN);
        const u32 out_piece = ALIGNED ? 16 : piece_of((u64)m.row, m.row_stride, m.num_columns * OUT);
        u32 greatest = 0;
        for (u32 at = down * PATCH; at - down * PATCH < num_rows; at += TILE_ROWS) {
            if (at < num_rows) {
                const u32 rows_here = num_rows - at < PATCH ? num_rows - at : PATCH;
                const u32 valid_here = at >= num_valid ? 0 : num_valid - at < PATCH ? num_valid - at : PATCH;
                Patch patch;
                load_patch<ALIGNED>(patch, x, m.x_stride, valid_here, columns_here * IN, in_piece);
                u32 narrowed[PATCH][OUT_WORDS];
                u8* to = row;
#pragma unroll
                for (u32 r = 0; r < PATCH; r++) {
#pragma unroll
                    for (u32 w = 0; w < IN_WORDS; w++) {
                        greatest = greater<FROM>(greatest, patch.word[r][w]);
                    }
                    narrow_row(patch.word[r], [&](u32) { return scale; }, narrowed[r]);
                    // Padding is zero whatever the scale is.
                    if (r >= valid_here) {
#pragma unroll
                        for (u32 w = 0; w < OUT_WORDS; w++) {
                            narrowed[r][w] = 0;
                        }
                    }
                    if (ROW && r < rows_here) {
                        store_pieces(to, narrowed[r], columns_here * OUT, out_piece);
                    }
                    to += m.row_stride;
                }
                if (COLUMN) {
                    put_patch(shared_tile, narrowed, across, at);
                }
            }
            x += TILE_ROWS * m.x_stride;
            row += TILE_ROWS * m.row_stride;
        }
        u8* const column = found.column;
        const u64 column_stride = found.column_stride;
        // The barrier in it: the shared tile is whole, and everyone has read what was found.
        const u32 bits = greatest_of_block(greatest_bits<FROM>(greatest), scratch);
        next++;
        if (thread == 0 && m.amax != nullptr) {
            raise(m.amax + (LIST ? 0 : matrix), (i32)bits);
        }
        if (COLUMN) {
            store_columns(column, column_stride, shared_tile, num_rows, num_columns);
        }
        if (next < end) {
            if (thread < 32) {
                locate(p, next, thread, search, found);
            }
            block_barrier();
        }
    }
}
