// cast, one scale a matrix.
//
// Computes   row = round(scale * x), column = its transpose, amax raised to the greatest |x|, scale_inv = 1 / scale (oracle::cast::cast)
// Layout     x, row: rows at any stride; column: columns at any stride; see locate.cuh. With ALIGNED, rows of x and row are whole vectors of eight elements
// Work       a block casts a part of a matrix, up to TILES_DOWN tiles of TILE_ROWS x TILE_COLUMNS one below the other, a thread a patch of 8 x 8 of each (the
//            last 2 * ACROSS threads one of the seam): load, round, store to row, put into the shared tile; then all threads store columns, dense along the addresses
// Shared     the transposed part and its seam; the part found; a word for each 32 threads
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

// Where a patch lies, and what there is of it.
struct PatchAt {
    const u8* x;
    u8* row;
    u64 x_stride;
    u64 row_stride;
    u32 num_valid; // rows of the input
    u32 num_rows;  // of the row copy; none of a seam
    u32 num_columns;
    u32 column; // in the shared tile
    u32 down;
};

// WHOLE: eight rows of eight columns, whole vectors each, or nothing in the row copy.
template <bool WHOLE> DEVICE void cast_patch(const PatchAt& at, float scale, u32& greatest, u32 in_piece, u32 out_piece) {
    Patch patch;
    if constexpr (WHOLE) {
        load_whole_patch(patch, at.x, at.x_stride);
    } else {
        load_patch<ALIGNED>(patch, at.x, at.x_stride, at.num_valid, at.num_columns * IN, in_piece);
    }
    u32 narrowed[PATCH][OUT_WORDS];
    u8* to = at.row;
#pragma unroll
    for (u32 r = 0; r < PATCH; r++) {
#pragma unroll
        for (u32 w = 0; w < IN_WORDS; w++) {
            greatest = greater<FROM>(greatest, patch.word[r][w]);
        }
        narrow_row(patch.word[r], [&](u32) { return scale; }, narrowed[r]);
        // Padding is zero whatever the scale is.
        if (!WHOLE && r >= at.num_valid) {
#pragma unroll
            for (u32 w = 0; w < OUT_WORDS; w++) {
                narrowed[r][w] = 0;
            }
        }
        if (ROW && (WHOLE ? at.num_rows > 0 : r < at.num_rows)) {
            store_pieces(to, narrowed[r], WHOLE ? PATCH * OUT : at.num_columns * OUT, out_piece);
        }
        to += at.row_stride;
    }
    if (COLUMN) {
        put_patch(shared_tile, narrowed, at.column, at.down);
    }
}

KERNEL_FITTING(NUM_THREADS, BLOCKS) cast_tile(PARAMETERS(Parameters) p) {
    SHARED Part found;
    SHARED Found search;
    SHARED u32 scratch[NUM_GROUPS];
    wait_for_dependencies();
    if (is_noop(p)) {
        return;
    }
    const u32 thread = thread_idx(), across = thread % ACROSS, down = thread / ACROSS;
    const bool is_of_seam = SEAM_ROWS > 0 && down >= PATCHES_DOWN;
    if (block_idx_x() == 0) {
        store_inverses(p);
    }
    for (u32 nth = 0; locate(p, nth, search, found); nth++) {
        const Matrix& m = p.matrices[LIST ? found.matrix : 0];
        const u32 num_rows = found.num_rows, num_valid = found.num_valid, matrix = found.matrix;
        const float scale = scale_of(p, m.scale, LIST ? 0 : matrix);
        const u32 num_columns = found.num_columns, left = across * PATCH < num_columns ? num_columns - across * PATCH : 0;
        const u32 columns_here = left < PATCH ? left : PATCH;
        // Of the thread's patches: rows from the top of the part as the shared tile has them, and as the matrix has them.
        u32 at = down * PATCH, end = num_rows, first_row = found.first_row, column = across * PATCH;
        if (is_of_seam) {
            const u32 in_seam = at - TILE_ROWS;
            at = num_rows + in_seam;
            end = found.seam == NO_SEAM ? 0 : num_rows + SEAM_ROWS;
            if (found.seam == SEAM_AT_TOP) {
                first_row = 0 - num_rows;
                column -= 1;
            }
        }
        // The row before which they lie may be above the part.
        const i64 down_by = (i64)(i32)(first_row + at) - (i64)found.first_row;
        const u8* x = found.x + down_by * (i64)m.x_stride + across * PATCH * IN;
        u8* row = found.row + at * m.row_stride + across * PATCH * OUT;
        const u32 in_piece = ALIGNED ? 16 : piece_of((u64)m.x, m.x_stride, m.num_columns * IN);
        const u32 out_piece = ALIGNED ? 16 : piece_of((u64)m.row, m.row_stride, m.num_columns * OUT);
        u32 greatest = 0;
        for (; at < end; at += TILE_ROWS) {
            const u32 rows_here = is_of_seam ? 0 : num_rows - at < PATCH ? num_rows - at : PATCH;
            const u32 valid = first_row + at < num_valid ? num_valid - (first_row + at) : 0, valid_here = valid < PATCH ? valid : PATCH;
            const PatchAt here = {x, row, m.x_stride, m.row_stride, valid_here, rows_here, columns_here, column, at / PATCH};
            // The loads of a whole patch are all under way before one is waited for; with predicates ptxas lets the last wait for the first.
            if (ALIGNED && valid_here == PATCH && columns_here == PATCH && (rows_here == PATCH || is_of_seam)) {
                cast_patch<true>(here, scale, greatest, 16, 16);
            } else {
                cast_patch<false>(here, scale, greatest, in_piece, out_piece);
            }
            x += TILE_ROWS * m.x_stride;
            row += TILE_ROWS * m.row_stride;
        }
        const Columns columns = columns_of(found);
        // The barrier in it: the shared tile is whole, and everyone has read what was found.
        const u32 bits = greatest_of_block(greatest_bits<FROM>(greatest), scratch);
        if (thread == 0 && m.amax != nullptr) {
            raise(m.amax + (LIST ? 0 : matrix), (i32)bits);
        }
        if (COLUMN) {
            store_columns(columns, shared_tile);
        }
        if (!search.has_more) {
            break;
        }
    }
    if (!LIST && block_idx_x() == 0 && thread == 0 && p.status != nullptr) {
        *p.status = search.status_of_all;
    }
}
