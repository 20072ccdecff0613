// Patches: 8 x 8 elements that a thread loads, scales, rounds, and passes on by columns. Needs platform, float, fp8 and copy.
//
// Constants: FROM, TO (types), TILE_ROWS, TILE_COLUMNS, TILES_DOWN.

constexpr u32 PATCH = 8; // derived: 8 elements of 16 bits are one vector of 16 bytes, 8 of 8 bits a unit of the shared tile
constexpr u32 IN = sizeof(FROM);
constexpr u32 OUT = sizeof(TO);
constexpr u32 ACROSS = TILE_COLUMNS / PATCH;
constexpr u32 NUM_THREADS = TILE_ROWS / PATCH * ACROSS;
constexpr u32 NUM_GROUPS = NUM_THREADS / 32; // of 32 lanes
constexpr u32 IN_WORDS = PATCH * IN / 4;
constexpr u32 OUT_WORDS = PATCH * OUT / 4;

static_assert(TILE_COLUMNS % 64 == 0 && NUM_THREADS % 32 == 0, "A group of 32 lanes holds whole rows of patches.");
static_assert((ACROSS & (ACROSS - 1)) == 0, "Lanes are told apart by bits.");

// All bits when a < b, else none; both below 2^31.
DEVICE u32 all_if_less(u32 a, u32 b) {
    return (u32)((i32)(a - b) >> 31);
}

// Only FP8 has scales of its own.
template <class T, bool IS_FP8> struct Largest {
    static constexpr float VALUE = 1.0f;
};
template <class T> struct Largest<T, true> {
    static constexpr float VALUE = T::LARGEST_VALUE;
};
constexpr float LARGEST_VALUE = Largest<TO, OUT == 1>::VALUE;

struct Patch {
    u32 word[PATCH][IN_WORDS];
};

// Element `i` of a row of a patch.
template <class T> DEVICE float element_of(const u32* words, u32 i);
template <> DEVICE float element_of<f32>(const u32* words, u32 i) {
    return float_of(words[i]);
}
template <> DEVICE float element_of<bf16>(const u32* words, u32 i) {
    return float_of(i % 2 ? words[i / 2] & 0xFFFF0000 : words[i / 2] << 16);
}
template <> DEVICE float element_of<f16>(const u32* words, u32 i) {
    return widen<f16>(f16{(u16)(words[i / 2] >> i % 2 * 16)});
}

// Greatest magnitudes: NaN drops out. A word of f32, or two halves that are kept apart.
template <class T> DEVICE u32 greater(u32 greatest, u32 word);
// As bits of f32.
template <class T> DEVICE u32 greatest_bits(u32 greatest);

template <> DEVICE u32 greater<f32>(u32 greatest, u32 word) {
    const u32 magnitude = word & 0x7FFFFFFF;
    return magnitude <= 0x7F800000 && magnitude > greatest ? magnitude : greatest;
}
template <> DEVICE u32 greatest_bits<f32>(u32 greatest) {
    return greatest;
}

// INFINITY: the magnitude above which a half is NaN.
template <u32 INFINITY_BITS> DEVICE u32 greater_halves(u32 greatest, u32 word) {
    const u32 low = word & 0x7FFF, high = word & 0x7FFF0000;
    const u32 greatest_low = greatest & 0xFFFF, greatest_high = greatest & 0xFFFF0000;
    const u32 new_low = low <= INFINITY_BITS && low > greatest_low ? low : greatest_low;
    const u32 new_high = high <= INFINITY_BITS << 16 && high > greatest_high ? high : greatest_high;
    return new_low | new_high;
}

template <> DEVICE u32 greater<bf16>(u32 greatest, u32 word) {
#if PLATFORM_AMD
    return greater_halves<0x7F80>(greatest, word);
#else
    u32 result;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(greatest), "r"(word & 0x7FFF7FFF));
    return result;
#endif
}
template <> DEVICE u32 greatest_bits<bf16>(u32 greatest) {
    const u32 low = greatest << 16, high = greatest & 0xFFFF0000;
    return low > high ? low : high;
}

template <> DEVICE u32 greater<f16>(u32 greatest, u32 word) {
#if PLATFORM_AMD
    return greater_halves<0x7C00>(greatest, word);
#else
    u32 result;
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(greatest), "r"(word & 0x7FFF7FFF));
    return result;
#endif
}
template <> DEVICE u32 greatest_bits<f16>(u32 greatest) {
    const u32 low = greatest & 0xFFFF, high = greatest >> 16;
    return bits_of(widen<f16>(f16{(u16)(low > high ? low : high)}));
}

// The widest pieces that row starts and lengths take: 16 bytes at most.
DEVICE u32 piece_of(u64 address, u64 stride, u32 row_bytes) {
    const u32 bits = (u32)address | (u32)stride | row_bytes | 16;
    return bits & (0 - bits);
}

// Loads a patch; elements outside of `num_rows` and `valid_bytes` of a row are 0. With ALIGNED, rows are whole vectors.
template <bool ALIGNED> DEVICE void load_patch(Patch& patch, const u8* x, u64 stride, u32 num_rows, u32 valid_bytes, u32 piece) {
#pragma unroll
    for (u32 r = 0; r < PATCH; r++) {
        const u32 valid = r < num_rows ? valid_bytes : 0;
        if constexpr (ALIGNED) {
            load_pieces(patch.word[r], x, valid, 16);
        } else {
            load_pieces(patch.word[r], x, valid, piece);
        }
        x += stride;
    }
}

// Loads rows `first` to `first` + 7 of whole vectors; where there are no more than `num` rows, the last of them again. All loads are under way before one is waited
// for (measured: H200; with loads that depend on a predicate ptxas makes the last wait for the first).
DEVICE void load_patch_of(Patch& patch, const u8* x, u32 stride, u32 first, u32 num) {
    Vec16 vector[PATCH][IN_WORDS / 4];
#pragma unroll
    for (u32 r = 0; r < PATCH; r++) {
        const u32 row = first + r < num ? first + r : num - 1;
#pragma unroll
        for (u32 i = 0; i < IN_WORDS / 4; i++) {
            vector[r][i] = load_uncached(x + (u64)row * stride + i * 16);
        }
    }
#pragma unroll
    for (u32 r = 0; r < PATCH; r++) {
#pragma unroll
        for (u32 w = 0; w < IN_WORDS; w++) {
            patch.word[r][w] = vector[r][w / 4].word[w % 4];
        }
    }
}

// A row of elements, multiplied and rounded.
template <class FACTORS> DEVICE void narrow_row(const u32 (&in)[IN_WORDS], const FACTORS& factor, u32 (&out)[OUT_WORDS]) {
    float value[PATCH];
#pragma unroll
    for (u32 i = 0; i < PATCH; i++) {
        value[i] = factor(i) * element_of<FROM>(in, i);
    }
    if constexpr (OUT == 1) {
        out[0] = narrow_fp8x4<TO>(value[0], value[1], value[2], value[3]);
        out[1] = narrow_fp8x4<TO>(value[4], value[5], value[6], value[7]);
    } else if constexpr (OUT == 2) {
#pragma unroll
        for (u32 i = 0; i < PATCH; i += 2) {
            out[i / 2] = narrow_pair<TO>(value[i], value[i + 1]);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < PATCH; i++) {
            out[i] = bits_of(value[i]);
        }
    }
}

// The transposed tile in shared memory: units of 8 bytes, all units of a column one after the other, but their numbers mixed so that neither lanes
// beside each other in a row nor lanes along a column meet in a bank. A column has as many units as its rows take: of low parts there are more columns.

constexpr u32 GROUP_ROWS = TILE_ROWS * TILES_DOWN; // rows of a part at most
// Rows that columns are filled up to: whole patches and whole vectors (derived: units are mixed in blocks of 16, which hold columns of one patch when a column has an even
// number of them).
constexpr u32 FILL_ROWS = OUT == 1 ? 2 * PATCH : PATCH;
static_assert(GROUP_ROWS % FILL_ROWS == 0, "As many as the tile has.");

// Unit `unit` of a column, of which each has `units`.
DEVICE u32 unit_at(u32 column, u32 unit, u32 units) {
    return (column * units + unit) ^ (column / PATCH & 15); // 15: derived, 16 units of 8 bytes are all 32 banks
}

DEVICE u64 unit_of(u32 low, u32 high) {
    return low | (u64)high << 32;
}

// Passes on a patch of rounded elements: its columns from `column` on, the `down`-th from the top of the part, whose columns have `units` units each.
DEVICE void put_patch(u64* tile, const u32 (&rows)[PATCH][OUT_WORDS], u32 column, u32 down, u32 units) {
    const u32 unit = down * OUT;
    if constexpr (OUT == 1) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 upper[4], lower[4];
            transpose_bytes(rows[0][half], rows[1][half], rows[2][half], rows[3][half], upper[0], upper[1], upper[2], upper[3]);
            transpose_bytes(rows[4][half], rows[5][half], rows[6][half], rows[7][half], lower[0], lower[1], lower[2], lower[3]);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                tile[unit_at(column + half * 4 + i, unit, units)] = unit_of(upper[i], lower[i]);
            }
        }
    } else if constexpr (OUT == 2) {
#pragma unroll
        for (u32 i = 0; i < PATCH; i++) {
            u32 pair[4];
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
                const u32 first = rows[2 * r][i / 2], second = rows[2 * r + 1][i / 2];
                pair[r] = i % 2 ? bytes_of<2, 3, 6, 7>(first, second) : bytes_of<0, 1, 4, 5>(first, second);
            }
            tile[unit_at(column + i, unit, units)] = unit_of(pair[0], pair[1]);
            tile[unit_at(column + i, unit + 1, units)] = unit_of(pair[2], pair[3]);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < PATCH; i++) {
#pragma unroll
            for (u32 r = 0; r < 4; r++) {
                tile[unit_at(column + i, unit + r, units)] = unit_of(rows[2 * r][i], rows[2 * r + 1][i]);
            }
        }
    }
}

// 8 bytes of a column from byte `at` on, which lies in the column; what follows the column is anything.
DEVICE u64 bytes_at(const u64* tile, u32 column, u32 units, u32 at) {
    const u32 unit = at / 8, shift = at % 8 * 8;
    const u64 low = tile[unit_at(column, unit, units)];
    if (shift == 0) {
        return low;
    }
    const u64 high = unit + 1 < units ? tile[unit_at(column, unit + 1, units)] : 0;
    return low >> shift | high << (64 - shift);
}

// Bytes `first` to `end` of a column to `to` + first, in the widest pieces that the address takes.
DEVICE void store_edge(u8* to, const u64* tile, u32 column, u32 units, u32 first, u32 end) {
    while (first < end) {
        const u64 value = bytes_at(tile, column, units, first);
        const u64 address = (u64)(to + first);
        const u32 left = end - first;
        if (address % 8 == 0 && left >= 8) {
            *(u64*)(to + first) = value;
            first += 8;
        } else if (address % 4 == 0 && left >= 4) {
            *(u32*)(to + first) = (u32)value;
            first += 4;
        } else if (address % 2 == 0 && left >= 2) {
            *(u16*)(to + first) = (u16)value;
            first += 2;
        } else {
            to[first] = (u8)value;
            first += 1;
        }
    }
}

// Columns that do not start and end at boundaries of 16 bytes. Vectors at such boundaries of the destination, one more than a column has: whole ones at once,
// the ends in pieces.
RARE void store_ragged_columns(u8* to, u64 stride, const u64* tile, u32 length, u32 num_columns, u32 units) {
    const u32 num_vectors = (length + 15) / 16 + 1;
    for (u32 i = thread_idx(); i < num_vectors * num_columns; i += NUM_THREADS) {
        const u32 column = i / num_vectors, vector = i % num_vectors;
        u8* const start = to + column * stride;
        const u32 before = (u64)start & 15; // bytes of the first vector that are not the column's
        const u32 first = vector == 0 ? 0 : vector * 16 - before;
        const u32 end = vector * 16 + 16 - before < length ? vector * 16 + 16 - before : length;
        if (first + 16 == end) {
            const u64 low = bytes_at(tile, column, units, first), high = bytes_at(tile, column, units, first + 8);
            store_streaming((Vec16*)(start + first), Vec16{(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)});
        } else {
            store_edge(start, tile, column, units, first, end);
        }
    }
}

// Where a thread begins among the vectors of all columns one after the other, and how far it goes on each time: known before the columns are there.
struct Walk {
    u32 num_vectors; // of a column
    u32 column;
    u32 vector;
    u32 columns_on;
    u32 vectors_on;
};

DEVICE Walk walk_of(const u8* to, u32 length) {
    // The first threads of a warp start at a boundary of 128 bytes (derived: a line of the cache) when the columns lie one behind the other.
    const u32 thread = thread_idx(), shift = (u32)((u64)to / 16) % 8, num_vectors = length >= 16 ? length / 16 : 1;
    const u32 start = thread < shift ? thread + NUM_THREADS - shift : thread - shift;
    Walk w = {num_vectors, start / num_vectors, 0, NUM_THREADS / num_vectors, 0};
    w.vector = start - w.column * num_vectors;
    w.vectors_on = NUM_THREADS - w.columns_on * num_vectors;
    return w;
}

// Stores the columns of the tile, `length` bytes each, `stride` bytes apart, of `units` units of the tile each. All threads take part.
DEVICE void store_columns(u8* to, u64 stride, const u64* tile, u32 length, u32 num_columns, u32 units, Walk w) {
    if ((((u32)(u64)to | (u32)stride | length) & 15) != 0) {
        store_ragged_columns(to, stride, tile, length, num_columns, units);
        return;
    }
    while (w.column < num_columns) {
        // Two units side by side, in either order.
        const u32 unit = unit_at(w.column, w.vector * 2, units);
        const Vec16 pair = *(const Vec16*)(tile + unit / 2 * 2);
        const bool is_swapped = unit % 2 != 0;
        const Vec16 ordered = {is_swapped ? pair.word[2] : pair.word[0], is_swapped ? pair.word[3] : pair.word[1],
                               is_swapped ? pair.word[0] : pair.word[2], is_swapped ? pair.word[1] : pair.word[3]};
        store_streaming((Vec16*)(to + w.column * stride + w.vector * 16), ordered);
        w.column += w.columns_on;
        w.vector += w.vectors_on;
        if (w.vector >= w.num_vectors) {
            w.vector -= w.num_vectors;
            w.column++;
        }
    }
}

// The greatest magnitude of the block, in thread 0; `scratch` has a word for each group of 32 lanes. All threads take part.
DEVICE u32 greatest_of_block(u32 bits, u32* scratch) {
    bits = greatest_of_group(bits);
    if (thread_idx() % 32 == 0) {
        scratch[thread_idx() / 32] = bits;
    }
    block_barrier();
    if (thread_idx() == 0) {
        for (u32 i = 1; i < NUM_GROUPS; i++) {
            bits = scratch[i] > bits ? scratch[i] : bits;
        }
    }
    return bits;
}
