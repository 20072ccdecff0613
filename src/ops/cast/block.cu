// cast, a scale for each block.
//
// Computes   for each block of BLOCK_LINES x BLOCK_LENGTH of a copy its scale by FORMULA, the copy as round(scale * x), the stored scale, and amax raised to
//            the greatest |x| (oracle::cast::cast); both copies from one read of memory
// Layout     as tile.cu; scales as `row_scales_of` and `column_scales_of` of locate.cuh say
// Work       a block casts a tile of TILE_ROWS x TILE_COLUMNS, a part. A group of 32 lanes casts 16 rows and then 16 columns, a lane a patch of 8 x 8: a line
//            of 128 lies in 16 lanes, so greatest magnitudes and scales go from lane to lane, and columns leave as 128 bytes each. The second read comes from
//            the first-level cache, into which the other groups have just read
// Shared     the part found, and sums over a group's matrices; a word for each 32 threads
// Sync       none between groups of lanes while a tile is cast, but once for a group, when its loads are under way, and for square blocks; amax by atomic
//            maximum, one a part
// Requires   as tile.cu
//
// Constants: those of tile.cu and locate.cuh, and FORMULA.

constexpr bool IS_SQUARE = BLOCK_LINES > 1;
constexpr u32 HALF = 16;                            // lanes along a line of a tile
constexpr u32 LANES = IS_SQUARE ? HALF : BLOCK_LENGTH / PATCH; // that a block has along a line
constexpr u32 LINE_WORDS = PATCH * IN / 4 < PATCH ? PATCH * IN / 4 : PATCH; // greatest magnitudes of a patch's lines: two halves a word, or one f32
constexpr u32 OWN = LANES == HALF ? 1 : PATCH / LANES;  // lines whose scale a lane computes
static_assert(TILE_ROWS == HALF * PATCH && TILE_COLUMNS == HALF * PATCH && OUT == 1, "Half a group of lanes holds a line.");
static_assert(!IS_SQUARE || (BLOCK_LINES == TILE_ROWS && BLOCK_LENGTH == TILE_COLUMNS), "A square block is a tile.");
static_assert(TILE_ROWS % BLOCK_LENGTH == 0, "Tiles hold whole blocks.");

template <class T> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16> = true;
constexpr u32 MAGNITUDES = IN == 4 ? 0x7FFFFFFF : 0x7FFF7FFF;

// Of two magnitudes, each half for itself; no NaN.
DEVICE u32 larger_halves(u32 a, u32 b) {
#if PLATFORM_AMD
    return greater<FROM>(a, b);
#else
    u32 larger;
    if constexpr (IS_BF16<FROM>) {
        asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    } else {
        asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    }
    return larger;
#endif
}

// Greatest magnitudes of several lines: of f32 one a word, of two bytes two a word, each half for itself.
DEVICE u32 larger_of(u32 a, u32 b) {
    if constexpr (IN == 4) {
        return a > b ? a : b;
    } else {
        return larger_halves(a, b);
    }
}

// The same of numbers: signs of the result are anything.
DEVICE u32 larger_magnitude(u32 a, u32 b) {
#if !PLATFORM_AMD && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860 // spec: PTX
    if constexpr (IN == 2) {
        u32 larger;
        if constexpr (IS_BF16<FROM>) {
            asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
        } else {
            asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
        }
        return larger;
    }
#endif
    return greater<FROM>(a, b);
}


DEVICE u32 at_most(u32 value, u32 limit) {
    return value < limit ? value : limit;
}

template <u32 MASK> DEVICE u32 of_lane_beside(u32 value) {
    return bits_of(shuffle_xor<MASK>(float_of(value)));
}

// Lanes along a line are those that differ in the bits FIRST .. 8 * FIRST.
constexpr u32 IN_ROW = 1, IN_COLUMN = 2;

template <u32 FIRST> DEVICE u32 along_of(u32 lane) {
    return lane / FIRST % HALF;
}
template <u32 FIRST> DEVICE u32 lane_along(u32 lane, u32 along) {
    return FIRST == 1 ? lane / HALF * HALF + along : along * 2 + lane % 2;
}

// Reduces NUM words over lanes that differ in the bits MASK, MASK / 2 .. FIRST; while there are several words, each lane goes on with half of them: the upper ones where
// the bit is set.
template <u32 NUM, u32 MASK, u32 FIRST> DEVICE void reduce_lines(u32 (&words)[LINE_WORDS], u32 lane) {
    if constexpr (MASK >= FIRST) {
        if constexpr (NUM > 1) {
            const bool is_upper = (lane & MASK) != 0;
#pragma unroll
            for (u32 i = 0; i < NUM / 2; i++) {
                const u32 kept = is_upper ? words[i + NUM / 2] : words[i], given = is_upper ? words[i] : words[i + NUM / 2];
                words[i] = larger_of(kept, of_lane_beside<MASK>(given));
            }
        } else {
            words[0] = larger_of(words[0], of_lane_beside<MASK>(words[0]));
        }
        reduce_lines<NUM == 1 ? 1 : NUM / 2, MASK / 2, FIRST>(words, lane);
    }
}

template <class T> DEVICE float magnitude_of(u32 word, bool is_high);
template <> DEVICE float magnitude_of<f32>(u32 word, bool) {
    return float_of(word);
}
template <> DEVICE float magnitude_of<bf16>(u32 word, bool is_high) {
    return float_of(is_high ? word & 0xFFFF0000 : word << 16);
}
template <> DEVICE float magnitude_of<f16>(u32 word, bool is_high) {
    return widen<f16>(f16{(u16)(is_high ? word >> 16 : word)});
}

// By rows, or by columns: from 0 on, which keeps NaN out.
DEVICE void greatest_of_rows(const Patch& patch, u32 (&words)[LINE_WORDS]) {
    u32 rows[PATCH];
#pragma unroll
    for (u32 r = 0; r < PATCH; r++) {
        rows[r] = 0;
#pragma unroll
        for (u32 w = 0; w < IN_WORDS; w++) {
            rows[r] = larger_magnitude(rows[r], patch.word[r][w]);
        }
        rows[r] &= MAGNITUDES;
    }
#pragma unroll
    for (u32 i = 0; i < LINE_WORDS; i++) {
        if constexpr (IN == 4) {
            words[i] = rows[i];
        } else {
            words[i] = larger_of(bytes_of<0, 1, 4, 5>(rows[2 * i], rows[2 * i + 1]), bytes_of<2, 3, 6, 7>(rows[2 * i], rows[2 * i + 1]));
        }
    }
}
DEVICE void greatest_of_columns(const Patch& patch, u32 (&words)[LINE_WORDS]) {
#pragma unroll
    for (u32 w = 0; w < LINE_WORDS; w++) {
        words[w] = 0;
#pragma unroll
        for (u32 r = 0; r < PATCH; r++) {
            words[w] = larger_magnitude(words[w], patch.word[r][w]);
        }
        words[w] &= MAGNITUDES;
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

// Where scales of lines of a tile go: the tile's first line and block, and the ends of what exists.
template <class S> struct Lines {
    S to;
    u32 first;
    u32 end;
    u32 first_block;
    u32 end_block;
};

DEVICE Scale scale_of_block(const Parameters& p, float amax) {
    return block_scale<FROM, FORMULA>(amax, LARGEST_VALUE, p.epsilon, (p.flags & POWER_OF_TWO) != 0);
}

// From the greatest magnitudes of a patch's lines in `words`: scales, stored, and a factor for each line. The patch's first line is `line`.
template <bool FULL, u32 FIRST, class S> DEVICE void scale_lines(const Parameters& p, const Lines<S>& lines, u32 (&words)[LINE_WORDS], u32 line, float (&factors)[PATCH]) {
    const u32 lane = thread_idx() % 32, along = along_of<FIRST>(lane), block = lines.first_block + along / LANES;
    reduce_lines<LINE_WORDS, LANES / 2 * FIRST, FIRST>(words, lane);
    u32 own_factor[OWN];
#pragma unroll
    for (u32 i = 0; i < OWN; i++) {
        const u32 own_line = lines.first + line + (OWN == 1 ? along / 2 : along % LANES * OWN + i);
        const Scale scale = scale_of_block(p, magnitude_of<FROM>(words[IN == 4 ? i : 0], OWN == 1 ? (along & 2) != 0 : i == 1));
        own_factor[i] = bits_of(scale.scale);
        // Of whole patches all columns are there, and so are the blocks of rows.
        const bool is_line = (FULL && FIRST == IN_COLUMN) || own_line < lines.end;
        const bool is_block = LANES == HALF || (FULL && FIRST == IN_ROW) || block < lines.end_block;
        if ((OWN > 1 || along % 2 == 0) && is_line && is_block) {
            store_scale(lines.to, own_line, block, scale);
        }
    }
#pragma unroll
    for (u32 i = 0; i < PATCH; i++) {
        factors[i] = float_of(OWN == 1 ? value_of(own_factor[0], lane_along<FIRST>(lane, i * 2))
                                       : value_of(own_factor[i % OWN], lane_along<FIRST>(lane, along / LANES * LANES + i / OWN)));
    }
}

// What of a tile there is: rows with padding, rows of the input, columns.
struct Extents {
    u32 num_rows;
    u32 num_valid;
    u32 num_columns;
};

// The patch at `at`, which is this row and column of a tile; 0 where nothing is. FULL: all of it is there, otherwise `first` is something that is there.
template <bool FULL> DEVICE void load_tile_patch(Patch& patch, const u8* at, const u8* first, const Matrix& m, const Extents& tile, u32 row, u32 column) {
    if constexpr (ALIGNED) {
        const u32 valid = FULL ? PATCH : column < tile.num_columns && row < tile.num_valid ? tile.num_valid - row : 0;
        Vec16 vector[PATCH][IN_WORDS / 4];
#pragma unroll
        for (u32 r = 0; r < PATCH; r++) {
            // Where there is nothing, something that is there is loaded and masked: no load waits for a condition.
            const Vec16* const from = (const Vec16*)(FULL || r < valid ? at : first);
#pragma unroll
            for (u32 i = 0; i < IN_WORDS / 4; i++) {
                vector[r][i] = from[i];
            }
            at += (u32)m.x_stride;
        }
#pragma unroll
        for (u32 r = 0; r < PATCH; r++) {
#pragma unroll
            for (u32 w = 0; w < IN_WORDS; w++) {
                patch.word[r][w] = FULL ? vector[r][w / 4].word[w % 4] : vector[r][w / 4].word[w % 4] & all_if_less(r, valid);
            }
        }
    } else {
        const u32 left = column < tile.num_columns ? tile.num_columns - column : 0, valid = row < tile.num_valid ? tile.num_valid - row : 0;
        load_patch<false>(patch, at, m.x_stride, at_most(valid, PATCH), at_most(left, PATCH) * IN, piece_of((u64)m.x, m.x_stride, m.num_columns * IN));
    }
}

// The first `num` bytes of a value.
DEVICE void store_bytes(u8* to, u64 value, u32 num) {
#pragma unroll 1
    for (u32 i = 0; i < num; i++) {
        to[i] = (u8)(value >> i * 8);
    }
}

// 8 bytes of a column that other lanes of a half go on with, at any address: whole words at their boundaries, which have bytes of the lane before. All lanes take part.
// `at` is where this lane's bytes begin and `num` how many of them and of those behind there are.
DEVICE void store_shifted(u8* to, u64 value, u32 along, u32 num) {
    const u32 shift = (u32)(u64)to & 7, lane = thread_idx() % 32;
    const u32 before = along == 0 ? lane : lane - IN_COLUMN;
    const u64 last = value_of((u32)value, before) | (u64)value_of((u32)(value >> 32), before) << 32;
    if (num == 0) {
        return;
    }
    // The word that ends with the first of this lane's bytes, up to the next boundary.
    const u64 word = shift == 0 ? value : last >> (64 - shift * 8) | value << shift * 8;
    const u32 end = num < 8 - shift ? num + shift : 8; // of what of the word exists
    if (along > 0 && end == 8) {
        *(u64*)(to - shift) = word;
    } else {
        const u32 first = along > 0 ? 0 : shift;
        store_bytes(to - shift + first, word >> first * 8, end - first);
    }
    if (num > 8 - shift && num <= 8) {
        store_bytes(to + 8 - shift, value >> (8 - shift) * 8, num - (8 - shift));
    }
}

// Casts a part of matrix `m`; false when `is_good`, which all threads call while the first loads are under way, says so. FULL: all columns of the tile are there, its rows
// are whole patches of the input, and columns are whole words. A lane whose patch is not there then loads the last one above it again, which changes no greatest
// magnitude of what is stored, and stores nothing: no mask waits for loads before the sums (measured: H200, matrices of 96 to 160 rows, 0.87 of the copy instead of 0.81).
template <bool FULL, class IsGood> DEVICE bool cast_tile_of(const Parameters& p, const Matrix& m, const Part& part, const Extents& tile, u32* scratch, u32& greatest, const IsGood& is_good) {
    const u32 thread = thread_idx(), lane = thread % 32, group = thread / 32, first_row = part.first_row, first_column = part.first_column;
    const u32 row_block = first_column / BLOCK_LENGTH, column_block = first_row / BLOCK_LENGTH;
    const u8* const x = m.x + (u64)(start_of(part) + first_row) * (u32)m.x_stride + first_column * IN;
    const u8* const first = FULL ? x : m.x;
    Patch patch;
    u32 words[LINE_WORDS];
    float factors[PATCH];
    if constexpr (ROW || !COLUMN || IS_SQUARE) {
        const u32 along = along_of<IN_ROW>(lane), line = group * HALF + lane / HALF * PATCH;
        const bool has_rows = IS_SQUARE || group * HALF < tile.num_rows, is_line = line < tile.num_rows;
        // Beside a patch in registers a square block has no room for sums: with four blocks resident the compiler would spill.
        if (IS_SQUARE && !is_good()) {
            return false;
        }
        if (has_rows) {
            const u32 from = FULL ? at_most(line, tile.num_rows - PATCH) : line;
            load_tile_patch<FULL>(patch, x + (u64)from * (u32)m.x_stride + along * PATCH * IN, first, m, tile, line, along * PATCH);
        }
        if (!IS_SQUARE && !is_good()) {
            return false;
        }
        if (has_rows) {
            greatest_of_rows(patch, words);
            u32 of_patch = words[0];
#pragma unroll
            for (u32 i = 1; i < LINE_WORDS; i++) {
                of_patch = larger_of(of_patch, words[i]);
            }
            greatest = larger_of(greatest, of_patch);
            if constexpr (IS_SQUARE) {
                const u32 of_group = greatest_of_group(greatest_bits<FROM>(of_patch));
                if (thread % 32 == 0) {
                    scratch[group] = of_group;
                }
                block_barrier();
                u32 of_tile = 0;
#pragma unroll
                for (u32 g = 0; g < NUM_GROUPS; g++) {
                    of_tile = scratch[g] > of_tile ? scratch[g] : of_tile;
                }
                const Scale scale = scale_of_block(p, float_of(of_tile));
#pragma unroll
                for (u32 i = 0; i < PATCH; i++) {
                    factors[i] = scale.scale;
                }
                // Packed scales repeat for each line.
                const u32 row_lines = STORED == PACKED ? tile.num_rows : 1, column_lines = STORED == PACKED ? tile.num_columns : 1;
                if (ROW && thread < row_lines) {
                    store_scale(row_scales_of(m, part), (STORED == PACKED ? first_row : column_block) + thread, row_block, scale);
                }
                if (COLUMN && thread < column_lines) {
                    store_scale(column_scales_of(m, part), (STORED == PACKED ? first_column : row_block) + thread, column_block, scale);
                }
            } else if constexpr (ROW) {
                const Lines<CopyScales> lines = {row_scales_of(m, part), first_row, first_row + tile.num_rows, row_block, row_block + quotient_up(tile.num_columns, BLOCK_LENGTH)};
                scale_lines<FULL, IN_ROW>(p, lines, words, line, factors);
            }
            if constexpr (ROW) {
                const u32 left = along * PATCH < tile.num_columns ? tile.num_columns - along * PATCH : 0, bytes = FULL ? PATCH * OUT : at_most(left, PATCH) * OUT;
                const u32 piece = ALIGNED ? 16 : piece_of((u64)m.row, m.row_stride, m.num_columns * OUT);
                u8* to = m.row + (u64)(before_of(part) + first_row + line) * (u32)m.row_stride + (first_column + along * PATCH) * OUT;
#pragma unroll
                for (u32 r = 0; r < PATCH; r++) {
                    u32 narrowed[OUT_WORDS];
                    narrow_row(patch.word[r], [&](u32) { return factors[r]; }, narrowed);
                    if constexpr (FULL) {
                        if (is_line) {
                            *(Vec8*)to = Vec8{narrowed[0], narrowed[1]};
                        }
                    } else if (line + r < tile.num_rows) {
                        store_pieces(to, narrowed, bytes, piece);
                    }
                    to += (u32)m.row_stride;
                }
            }
        }
    }
    if constexpr (COLUMN) {
        // Two lanes side by side read a whole sector: the cache is asked half as often as by lanes that all lie along the column (measured: H200, 0.91 of the copy
        // against 0.87).
        const u32 along = along_of<IN_COLUMN>(lane), line = group * HALF + lane % 2 * PATCH;
        const u32 from = FULL ? at_most(along * PATCH, tile.num_rows - PATCH) : along * PATCH;
        load_tile_patch<FULL>(patch, x + (u64)from * (u32)m.x_stride + line * IN, first, m, tile, along * PATCH, line);
        if constexpr (!ROW && !IS_SQUARE) {
            if (!is_good()) {
                return false;
            }
        }
        if constexpr (!IS_SQUARE) {
            greatest_of_columns(patch, words);
            if constexpr (!ROW) {
#pragma unroll
                for (u32 i = 0; i < LINE_WORDS; i++) {
                    greatest = larger_of(greatest, words[i]);
                }
            }
            const Lines<CopyScales> lines = {column_scales_of(m, part), first_column, first_column + tile.num_columns, column_block,
                                             column_block + quotient_up(tile.num_rows, BLOCK_LENGTH)};
            scale_lines<FULL, IN_COLUMN>(p, lines, words, line, factors);
        }
        u32 narrowed[PATCH][OUT_WORDS];
#pragma unroll
        for (u32 r = 0; r < PATCH; r++) {
            narrow_row(patch.word[r], [&](u32 c) { return factors[c]; }, narrowed[r]);
        }
        const u64 stride = column_stride_of(m, part);
        u8* to = m.column + (u64)before_of(part) * (m.num_columns * OUT) + (first_column + line) * stride + (first_row + along * PATCH) * OUT;
        const u32 below = along * PATCH < tile.num_rows ? tile.num_rows - along * PATCH : 0;
        const bool is_shifted = !FULL && ((u32)((u64)to | stride) & 7) != 0; // of words of 8 bytes
#pragma unroll
        for (u32 half = 0; half < OUT_WORDS; half++) {
            u32 upper[4], lower[4];
            transpose_bytes(narrowed[0][half], narrowed[1][half], narrowed[2][half], narrowed[3][half], upper[0], upper[1], upper[2], upper[3]);
            transpose_bytes(narrowed[4][half], narrowed[5][half], narrowed[6][half], narrowed[7][half], lower[0], lower[1], lower[2], lower[3]);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const bool is_there = line + half * 4 + i < tile.num_columns;
                if constexpr (FULL) {
                    if (below > 0) {
                        *(Vec8*)to = Vec8{upper[i], lower[i]};
                    }
                } else if (!is_shifted && is_there && below >= PATCH) {
                    *(Vec8*)to = Vec8{upper[i], lower[i]};
                } else if (is_shifted) {
                    store_shifted(to, unit_of(upper[i], lower[i]), along, is_there ? below : 0);
                } else if (is_there) {
                    store_bytes(to, unit_of(upper[i], lower[i]), below);
                }
                to += stride;
            }
        }
    }
    return true;
}

KERNEL_FITTING(NUM_THREADS, BLOCKS) cast_blocks(PARAMETERS(Parameters) p) {
    SHARED Part found;
    SHARED Search search;
    SHARED u32 scratch[2][NUM_GROUPS];
    wait_for_dependencies();
    if (is_noop(p)) {
        return;
    }
    Seen seen = {};
    bool is_there = true;
    if constexpr (LIST) {
        find_listed(p, search, found);
    } else {
        is_there = look_for_slot(p, search, found, seen);
    }
    const auto is_good = [&] { return LIST || status_of_group(p, search, found, seen) == 0; };
    if (!is_there) {
        if (block_idx_x() == 0) {
            is_good(); // writes the status
        }
        return;
    }
    Part of_table;
    read_part(p, search, of_table);
    const Part& part = TABLE ? of_table : found;
    const Matrix& m = matrix_of(p, search, part);
    const u32 columns_left = m.num_columns - part.first_column, valid = part.first_row < part.num_valid ? part.num_valid - part.first_row : 0;
    const Extents tile = {part.num_rows, at_most(valid, TILE_ROWS), at_most(columns_left, TILE_COLUMNS)};
    // A padded matrix begins at a multiple of 16 rows (spec: paddings).
    const u32 before = LIST || p.pad_rows > 1 ? 0 : part.start;
    const bool are_words = !COLUMN || (((u32)(u64)m.column | before * (m.num_columns * OUT) | (u32)column_stride_of(m, part)) & 7) == 0;
    u32 greatest = 0;
    const bool are_patches = tile.num_valid == tile.num_rows && tile.num_rows % PATCH == 0 && tile.num_columns == TILE_COLUMNS;
    const bool is_cast = ALIGNED && are_words && are_patches
                             ? cast_tile_of<true>(p, m, part, tile, scratch[0], greatest, is_good)
                             : cast_tile_of<false>(p, m, part, tile, scratch[0], greatest, is_good);
    if (is_cast && m.amax != nullptr) {
        const u32 of_part = greatest_of_block(greatest_bits<FROM>(greatest), scratch[1]);
        if (thread_idx() == 0) {
            raise(m.amax + (LIST ? 0 : part.matrix), (i32)of_part);
        }
    }
}
