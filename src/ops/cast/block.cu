// cast, a scale for each block.
//
// Computes   for each block of BLOCK_LINES x BLOCK_LENGTH of a copy its scale by FORMULA, the copy as round(scale * x), the stored scale, and amax raised to
//            the greatest |x| (oracle::cast::cast); both copies from one read
// Layout     as tile.cu; scales as `place_scales` of locate.cuh says
// Work       a block casts a tile of TILE_ROWS x TILE_COLUMNS that starts at a multiple of both, a thread a patch of 8 x 8, which stays in registers: greatest
//            magnitudes of its rows and columns, a thread a scale, rows rounded and stored, columns rounded and put into the shared tile, columns stored
// Shared     the transposed tile; greatest magnitudes and factors of rows and columns; the part found
// Sync       block barriers; amax by atomic maximum, one a tile
// Requires   as tile.cu
//
// Constants: those of tile.cu, and FORMULA; TILES_DOWN is 1.

#if PLATFORM_AMD
extern __attribute__((shared)) u64 shared_tile[];
#else
extern __shared__ __align__(16) u64 shared_tile[];
#endif

constexpr bool IS_SQUARE = BLOCK_LINES > 1;
constexpr u32 BLOCKS_ACROSS = TILE_COLUMNS / BLOCK_LENGTH; // of a row of the tile
constexpr u32 BLOCKS_DOWN = TILE_ROWS / BLOCK_LENGTH;
constexpr u32 PATCHES = BLOCK_LENGTH / PATCH; // of a block along its length
constexpr u32 ROWS_OF_GROUP = PATCH * 32 / ACROSS; // rows that 32 threads hold
constexpr u32 GROUPS_OF_BLOCK = BLOCK_LENGTH / ROWS_OF_GROUP;
static_assert(TILE_ROWS % BLOCK_LENGTH == 0 && TILE_COLUMNS % BLOCK_LENGTH == 0 && TILES_DOWN == 1, "Tiles hold whole blocks.");
static_assert(!IS_SQUARE || (TILE_ROWS == BLOCK_LINES && TILE_COLUMNS == BLOCK_LENGTH), "A square block is a tile.");
static_assert(ACROSS <= 32 && PATCHES <= ACROSS && ROWS_OF_GROUP <= BLOCK_LENGTH, "Blocks are reduced by lanes, then by groups of lanes.");

DEVICE u32 larger_of(u32 a, u32 b) {
    return a > b ? a : b;
}

// The greatest over lanes that differ in the bits of MASK .. END / 2.
template <u32 MASK, u32 END> DEVICE u32 greatest_of_lanes(u32 value) {
    if constexpr (MASK < END) {
        const float other = shuffle_xor<MASK>(float_of(value));
        return greatest_of_lanes<MASK * 2, END>(larger_of(value, bits_of(other)));
    } else {
        return value;
    }
}

template <class S> DEVICE void store_scale(const S& to, u32 line, u32 block, const Scale& scale) {
    u8* const at = to.data + line * to.line_stride;
    if constexpr (STORED == PACKED) {
        u8* const word = at + block / SCALES_OF_WORD * to.block_stride;
        const u32 byte = block % SCALES_OF_WORD, end = block + 1 == to.num_blocks ? SCALES_OF_WORD : byte + 1;
        word[byte] = (u8)scale.e8m0;
        // The bytes past the last block.
        for (u32 i = byte + 1; i < end; i++) {
            word[i] = 0;
        }
    } else if constexpr (IS_F32) {
        *(float*)(at + block * to.block_stride) = scale.stored;
    } else {
        at[block * to.block_stride] = (u8)scale.e8m0;
    }
}

// As bits of f32: the greatest of each row and of each column of a patch.
DEVICE void greatest_of_patch(const Patch& patch, u32 (&of_rows)[PATCH], u32 (&of_columns)[PATCH]) {
    u32 columns[IN_WORDS] = {};
#pragma unroll
    for (u32 r = 0; r < PATCH; r++) {
        u32 row = 0;
#pragma unroll
        for (u32 w = 0; w < IN_WORDS; w++) {
            row = greater<FROM>(row, patch.word[r][w]);
            columns[w] = greater<FROM>(columns[w], patch.word[r][w]);
        }
        of_rows[r] = greatest_bits<FROM>(row);
    }
#pragma unroll
    for (u32 c = 0; c < PATCH; c++) {
        of_columns[c] = bits_of(element_of<FROM>(columns, c));
    }
}

KERNEL_FITTING(NUM_THREADS, BLOCKS) cast_blocks(PARAMETERS(Parameters) p) {
    SHARED Part found;
    SHARED Found search;
    SHARED u32 scratch[NUM_GROUPS];
    SHARED u32 greatest_of_rows[BLOCKS_ACROSS][TILE_ROWS];
    SHARED u32 greatest_of_columns[NUM_GROUPS][TILE_COLUMNS];
    SHARED float factors_of_rows[BLOCKS_ACROSS][TILE_ROWS];
    SHARED float factors_of_columns[BLOCKS_DOWN][TILE_COLUMNS];
    SHARED float factor_of_square;
    wait_for_dependencies();
    if (is_noop(p)) {
        return;
    }
    const u32 thread = thread_idx(), across = thread % ACROSS, down = thread / ACROSS, group = thread / 32;
    for (u32 nth = 0; locate(p, nth, search, found); nth++) {
        const u32 matrix = found.matrix, num_rows = found.num_rows, first_row = found.first_row, first_column = found.first_column;
        const Matrix& m = p.matrices[LIST ? matrix : 0];
        const u32 columns_left = m.num_columns - first_column, num_columns = columns_left < TILE_COLUMNS ? columns_left : TILE_COLUMNS;
        const u32 left = across * PATCH < num_columns ? num_columns - across * PATCH : 0, columns_here = left < PATCH ? left : PATCH;
        const u32 below = down * PATCH < num_rows ? num_rows - down * PATCH : 0, rows_here = below < PATCH ? below : PATCH;
        const u32 top = first_row + down * PATCH, valid = top < found.num_valid ? found.num_valid - top : 0, valid_here = valid < PATCH ? valid : PATCH;
        Patch patch;
        if constexpr (ALIGNED) {
            // Where there is nothing, something that is there is loaded and masked: no load waits for a condition.
            const u32 column = columns_here > 0 ? across * PATCH : 0;
            load_patch_of(patch, input_of(m, found) + (first_column + column) * IN, (u32)m.x_stride, top, found.num_valid);
#pragma unroll
            for (u32 r = 0; r < PATCH; r++) {
                const u32 mask = all_if_less(top + r, found.num_valid) & all_if_less(0, columns_here);
#pragma unroll
                for (u32 w = 0; w < IN_WORDS; w++) {
                    patch.word[r][w] &= mask;
                }
            }
        } else {
            load_patch<false>(patch, input_of(m, found) + (u64)top * m.x_stride + (first_column + across * PATCH) * IN, m.x_stride, valid_here, columns_here * IN,
                              piece_of((u64)m.x, m.x_stride, m.num_columns * IN));
        }
        u32 bits;
        {
            u32 of_rows[PATCH], of_columns[PATCH];
            greatest_of_patch(patch, of_rows, of_columns);
            bits = of_rows[0];
#pragma unroll
            for (u32 r = 1; r < PATCH; r++) {
                bits = larger_of(bits, of_rows[r]);
            }
            if constexpr (!IS_SQUARE) {
#pragma unroll
                for (u32 r = 0; r < PATCH; r++) {
                    const u32 greatest = greatest_of_lanes<1, PATCHES>(of_rows[r]);
                    if (ROW && across % PATCHES == 0) {
                        greatest_of_rows[across / PATCHES][down * PATCH + r] = greatest;
                    }
                }
#pragma unroll
                for (u32 c = 0; c < PATCH; c++) {
                    const u32 greatest = greatest_of_lanes<ACROSS, 32>(of_columns[c]);
                    if (COLUMN && thread % 32 < ACROSS) {
                        greatest_of_columns[group][across * PATCH + c] = greatest;
                    }
                }
            }
        }
        const bool power_of_two = (p.flags & POWER_OF_TWO) != 0;
        const u32 greatest = greatest_of_block(bits, scratch); // a barrier is in it
        if (thread == 0 && m.amax != nullptr) {
            raise(m.amax + (LIST ? 0 : matrix), (i32)greatest);
        }
        if constexpr (IS_SQUARE) {
            if (thread == 0) {
                const Scale scale = block_scale<FROM, FORMULA>(float_of(greatest), LARGEST_VALUE, p.epsilon, power_of_two);
                factor_of_square = scale.scale;
                scratch[0] = bits_of(scale.stored);
                scratch[1] = scale.e8m0;
            }
            block_barrier();
            const Scale scale = {factor_of_square, float_of(scratch[0]), scratch[1]};
            // Packed scales repeat for each line.
            const u32 row_lines = STORED == PACKED ? num_rows : 1, column_lines = STORED == PACKED ? num_columns : 1;
            const u32 row_line = STORED == PACKED ? first_row : first_row / BLOCK_LINES;
            const u32 column_line = STORED == PACKED ? first_column : first_column / BLOCK_LINES;
            if (ROW && thread < row_lines) {
                store_scale(found.row_scales, row_line + thread, first_column / BLOCK_LENGTH, scale);
            }
            if (COLUMN && thread < column_lines) {
                store_scale(found.column_scales, column_line + thread, first_row / BLOCK_LENGTH, scale);
            }
        } else {
            if (ROW) {
                for (u32 i = thread; i < BLOCKS_ACROSS * TILE_ROWS; i += NUM_THREADS) {
                    const u32 block = i / TILE_ROWS, row = i % TILE_ROWS;
                    if (row < num_rows && block * BLOCK_LENGTH < num_columns) {
                        const float amax = float_of(greatest_of_rows[block][row]);
                        const Scale scale = block_scale<FROM, FORMULA>(amax, LARGEST_VALUE, p.epsilon, power_of_two);
                        factors_of_rows[block][row] = scale.scale;
                        store_scale(found.row_scales, first_row + row, first_column / BLOCK_LENGTH + block, scale);
                    }
                }
            }
            if (COLUMN) {
                for (u32 i = thread; i < BLOCKS_DOWN * TILE_COLUMNS; i += NUM_THREADS) {
                    const u32 block = i / TILE_COLUMNS, column = i % TILE_COLUMNS;
                    if (column < num_columns && block * BLOCK_LENGTH < num_rows) {
                        u32 of_block = 0;
                        for (u32 g = 0; g < GROUPS_OF_BLOCK; g++) {
                            of_block = larger_of(of_block, greatest_of_columns[block * GROUPS_OF_BLOCK + g][column]);
                        }
                        const Scale scale = block_scale<FROM, FORMULA>(float_of(of_block), LARGEST_VALUE, p.epsilon, power_of_two);
                        factors_of_columns[block][column] = scale.scale;
                        store_scale(found.column_scales, first_column + column, first_row / BLOCK_LENGTH + block, scale);
                    }
                }
            }
            block_barrier();
        }
        if (rows_here > 0 && columns_here > 0) {
            if (ROW) {
                const u32 out_piece = ALIGNED ? 16 : piece_of((u64)m.row, m.row_stride, m.num_columns * OUT);
                u8* to = rows_of(m, found) + (u64)top * m.row_stride + (first_column + across * PATCH) * OUT;
#pragma unroll
                for (u32 r = 0; r < PATCH; r++) {
                    const float factor = IS_SQUARE ? factor_of_square : factors_of_rows[across / PATCHES][down * PATCH + r];
                    u32 narrowed[OUT_WORDS];
                    narrow_row(patch.word[r], [&](u32) { return factor; }, narrowed);
                    if (r < rows_here) {
                        store_pieces(to, narrowed, columns_here * OUT, out_piece);
                    }
                    to += m.row_stride;
                }
            }
            if (COLUMN) {
                float factors[PATCH];
#pragma unroll
                for (u32 c = 0; c < PATCH; c++) {
                    factors[c] = IS_SQUARE ? factor_of_square : factors_of_columns[down / PATCHES][across * PATCH + c];
                }
                u32 narrowed[PATCH][OUT_WORDS];
#pragma unroll
                for (u32 r = 0; r < PATCH; r++) {
                    narrow_row(patch.word[r], [&](u32 c) { return factors[c]; }, narrowed[r]);
                }
                put_patch(shared_tile, narrowed, across * PATCH, down);
            }
        }
        const u32 length = num_rows * OUT;
        u8* const columns = columns_of(m, found);
        const u64 column_stride = column_stride_of(m, found);
        const Walk walk = walk_of(columns, length);
        block_barrier();
        if (COLUMN) {
            store_columns(columns, column_stride, shared_tile, length, num_columns, walk);
        }
        if (!search.has_more) {
            break;
        }
    }
    if (!LIST && block_idx_x() == 0 && thread == 0 && p.status != nullptr) {
        *p.status = search.status_of_all;
    }
}
