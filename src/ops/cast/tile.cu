// cast, one scale a matrix.
//
// Computes   row = round(scale * x), column = its transpose, amax raised to the greatest |x|, scale_inv = 1 / scale (oracle::cast::cast)
// Layout     x, row: rows at any stride; column: columns at any stride; see locate.cuh. With ALIGNED, rows of x and row are whole vectors of eight elements
// Work       a block casts a part of a matrix, up to TILES_DOWN tiles of TILE_ROWS x TILE_COLUMNS one below the other, a thread a patch of 8 x 8 of each. Of low
//            matrices a part has several strips of columns, which stand beside each other in the shared tile:
//            load, round, store to row, put into the shared tile; then all threads store columns, dense along the addresses
// Shared     the transposed part; the part found; a word for each 32 threads
// Sync       block barriers; amax by atomic maximum, one a part
// Requires   checked views; pad_rows 1, 16, 32 or 128; fewer than 2^31 rows and columns, fewer than 2^32 padded rows
//
// Constants: FROM, TO (types), ROW, COLUMN, LIST, TABLE, CURRENT, ALIGNED (bools), TILE_ROWS, TILE_COLUMNS, TILES_DOWN, TAIL_TILES, STACK, MAX_MATRICES, BLOCKS
// (resident in a multiprocessor).

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

// Current scaling takes two passes: one that only measures, and one that casts. In between a matrix's greatest magnitude stands in scale_inv.
constexpr bool MEASURES = CURRENT && !ROW && !COLUMN;

DEVICE i32* amax_of(const Matrix& m) {
    return MEASURES ? (i32*)m.scale_inv : CURRENT ? nullptr : m.amax;
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
    for (u32 nth = 0; locate(p, nth, search, found); nth++) {
        const Target target = target_of(p, found);
        const Part& part = target.part;
        const Matrix& m = target.matrix;
        const float scale = MEASURES ? 1.0f : scale_of(p, CURRENT ? m.scale_inv : m.scale, LIST ? 0 : part.matrix);
        const u8* const x = input_of(m, part);
        u8* const row = rows_of(m, part);
        // Patches of a strip, from top to bottom.
        const u32 num_down = (part.num_rows + FILL_ROWS - 1) / FILL_ROWS * (FILL_ROWS / PATCH);
        const u32 x_stride = (u32)m.x_stride, row_stride = (u32)m.row_stride;
        u32 greatest = 0;
        for (u32 place = down; place < num_down * part.stack; place += TILE_ROWS / PATCH) {
            u32 strip = 0;
#pragma unroll
            for (u32 n = 1; n < STACK; n++) {
                strip += place >= n * num_down;
            }
            // Rows as the matrix counts them; with ALIGNED a thread has eight columns or none.
            const u32 down_of_strip = place - strip * num_down, first = part.first_row + down_of_strip * PATCH, end = part.first_row + part.num_rows;
            const u32 column_of_part = strip * TILE_COLUMNS + across * PATCH, column = part.first_column + column_of_part;
            const u32 left = column < m.num_columns ? m.num_columns - column : 0;
            const u32 columns_here = left < PATCH ? left : PATCH;
            Patch patch;
            if constexpr (ALIGNED) {
                if (columns_here == 0) {
                    break;
                }
                load_patch_of(patch, x + column * IN, x_stride, first, part.num_valid);
            } else {
                const u32 num_here = first < part.num_valid ? part.num_valid - first : 0;
                load_patch<false>(patch, x + (u64)first * x_stride + column * IN, x_stride, num_here, columns_here * IN, piece_of((u64)m.x, x_stride, m.num_columns * IN));
            }
            u32 narrowed[PATCH][OUT_WORDS];
            u8* to = row + (u64)first * row_stride + column * OUT;
#pragma unroll
            for (u32 r = 0; r < PATCH; r++) {
#pragma unroll
                for (u32 w = 0; w < IN_WORDS; w++) {
                    greatest = greater<FROM>(greatest, patch.word[r][w]);
                }
                narrow_row(patch.word[r], [&](u32) { return scale; }, narrowed[r]);
                // Padding is zero whatever the scale is.
                const u32 valid = all_if_less(first + r, part.num_valid);
#pragma unroll
                for (u32 w = 0; w < OUT_WORDS; w++) {
                    narrowed[r][w] &= valid;
                }
                if (ROW && first + r < end) {
                    if constexpr (ALIGNED) {
                        store_pieces(to, narrowed[r], PATCH * OUT, 16);
                    } else {
                        store_pieces(to, narrowed[r], columns_here * OUT, piece_of((u64)m.row, row_stride, m.num_columns * OUT));
                    }
                }
                to += row_stride;
            }
            if (COLUMN) {
                put_patch(shared_tile, narrowed, column_of_part, down_of_strip, num_down * OUT);
            }
        }
        const u32 length = part.num_rows * OUT, columns_left = m.num_columns - part.first_column;
        u8* const columns = columns_of(m, part);
        const Walk walk = walk_of(columns, length);
        // The barrier in it: the shared tile is whole, and everyone has read what was found.
        const u32 bits = greatest_of_block(greatest_bits<FROM>(greatest), scratch);
        i32* const amax = amax_of(m);
        if (thread == 0 && amax != nullptr) {
            raise(amax + (LIST ? 0 : part.matrix), (i32)bits);
        }
        if (COLUMN) {
            store_columns(columns, column_stride_of(m, part), shared_tile, length,
                          columns_left < part.stack * TILE_COLUMNS ? columns_left : part.stack * TILE_COLUMNS, num_down * OUT, walk);
        }
        if (TABLE || !search.has_more) {
            break;
        }
    }
    if (block_idx_x() == 0) {
        if (!CURRENT) {
            store_inverses(p);
        }
        if (!LIST && thread == 0 && p.status != nullptr) {
            *p.status = search.status_of_all;
        }
    }
}
