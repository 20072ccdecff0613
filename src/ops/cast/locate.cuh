// Matrices, and which part of which a block casts. Needs platform, fp8, copy, formula and patch.
//
// Constants: LIST (matrices stand in the parameters; else one buffer and offsets), CURRENT (bools), MAX_MATRICES; BLOCK_LINES and BLOCK_LENGTH (lines
// and elements of a line that share a scale; 0 without block scales), STORED (how they are stored).

constexpr bool HAS_SCALES = BLOCK_LENGTH > 0;

template <bool> struct MatrixScales {};
// Each may be null; strides in bytes, from row to row.
template <> struct MatrixScales<true> {
    u8* row_scales;
    u8* column_scales;
    u64 row_scales_stride;
    u64 column_scales_stride;
};

// One matrix of a list; of a group, what all its matrices have in common. Strides in bytes; each output may be null.
struct Matrix : MatrixScales<HAS_SCALES> {
    const u8* x;
    u8* row;
    u8* column;
    const float* scale;
    i32* amax;
    float* scale_inv;
    u64 x_stride;
    u64 row_stride;
    u64 column_stride;
    u32 num_rows; // group: of x
    u32 num_columns;
    u32 first_part; // list: parts of the matrices before
    u32 padding;
};

struct Parameters {
    const u32* noop;     // or null
    const void* offsets; // group: num_matrices + 1
    // Group: what the outputs hold of padded rows, and of blocks along columns and their words.
    u64 row_capacity;
    u64 block_capacity;
    u64 word_capacity;
    u32 num_matrices;
    u32 num_blocks;
    u32 pad_rows;
    u32 flags;
    float epsilon;
    u32 num_strips; // group: of TILE_COLUMNS columns
    Matrix matrices[MAX_MATRICES];
};

constexpr u32 NOOP_IS_FLOAT = 1, OFFSETS_ARE_64_BITS = 2, RESET_AMAX = 4, POWER_OF_TWO = 8;

// Every block sees the same flag.
DEVICE bool is_noop(const Parameters& p) {
    if (p.noop == nullptr) {
        return false;
    }
    const u32 bits = *p.noop;
    return p.flags & NOOP_IS_FLOAT ? (bits & 0x7FFFFFFF) != 0 : bits != 0; // -0 is zero
}

// The scale of a matrix: given, absent, or from the matrix's own greatest magnitude, which then stands in its place.
DEVICE float scale_of(const Parameters& p, const float* scale, u32 i) {
    if constexpr (CURRENT) {
        return te_scale(scale[i], LARGEST_VALUE, p.epsilon, (p.flags & POWER_OF_TWO) != 0, LARGEST_FINITE<f32>);
    } else {
        return scale == nullptr ? 1.0f : scale[i];
    }
}

enum Stored { ROW_MAJOR_F32, ROW_MAJOR_E8M0, COLUMN_MAJOR_F32, COLUMN_MAJOR_E8M0, PACKED };

constexpr u32 STORED_BYTES = STORED == ROW_MAJOR_F32 || STORED == COLUMN_MAJOR_F32 || STORED == PACKED ? 4 : 1;
constexpr bool IS_ROW_MAJOR = STORED == ROW_MAJOR_F32 || STORED == ROW_MAJOR_E8M0;
constexpr bool IS_F32 = STORED == ROW_MAJOR_F32 || STORED == COLUMN_MAJOR_F32;
constexpr u32 SCALES_OF_WORD = 4; // spec: packed E8M0

template <bool> struct PartScales {};
// Where the scales of a matrix's copy lie: strides in bytes, from line to line and from block to block (packed: word to word).
struct CopyScales {
    u8* data; // or null
    u64 line_stride;
    u64 block_stride;
    u32 num_blocks;
};
template <> struct PartScales<true> {
    CopyScales row_scales;
    CopyScales column_scales;
};

// What a block casts: some rows of some columns of a matrix.
struct Part : PartScales<HAS_SCALES> {
    const u8* x;
    u8* row;
    u8* column;
    u64 column_stride;
    u32 matrix;
    u32 num_rows;  // padding included
    u32 num_valid; // without it
    u32 num_columns;
    u32 first_row;
    u32 first_column;
};

DEVICE u32 quotient_up(u32 a, u32 b) {
    return a / b + (a % b != 0);
}

constexpr u32 NO_PART = 0xFFFFFFFF;

// Part `nth` of this block: when there are more parts than blocks, the first blocks have more.
DEVICE u32 part_of_block(const Parameters& p, u32 nth, u32 num_parts) {
    const u32 block = block_idx_x();
    u32 least = 1, larger = 0;
    if (num_parts < p.num_blocks) {
        least = 0;
        larger = num_parts;
    } else if (num_parts < 2 * p.num_blocks) {
        larger = num_parts - p.num_blocks;
    } else {
        least = num_parts / p.num_blocks;
        larger = num_parts % p.num_blocks;
    }
    const u32 own = least + (block < larger);
    return nth < own ? block * least + (block < larger ? block : larger) + nth : NO_PART;
}

// Sums over matrices.
struct Sums {
    u32 parts; // of one strip
    u32 rows;  // padded
    u32 blocks; // along the columns
    u32 words;
};

// Blocks along a column.
DEVICE u32 blocks_of(u32 num_rows) {
    return HAS_SCALES ? quotient_up(num_rows, BLOCK_LENGTH) : 0;
}

DEVICE u32 padded(const Parameters& p, u32 num_rows) {
    return (num_rows + p.pad_rows - 1) & ~(p.pad_rows - 1); // pad_rows is a power of two
}

// Where the scales of a matrix lie. A template, so that it is not looked at where there are none.
template <class P, class M> DEVICE void place_scales(P& part, const M& m, u32 num_rows, const Sums& before) {
    const u32 row_lines_before = BLOCK_LINES == 1 ? before.rows : before.blocks;
    const u32 num_blocks = blocks_of(num_rows);
    const u64 row_stride = m.row_scales_stride, column_stride = m.column_scales_stride;
    part.row_scales.num_blocks = quotient_up(m.num_columns, BLOCK_LENGTH);
    part.column_scales.num_blocks = num_blocks;
    if constexpr (STORED == PACKED) {
        part.row_scales.data = m.row_scales + (u64)before.rows * STORED_BYTES;
        part.column_scales.data = m.column_scales + before.words * column_stride;
    } else if constexpr (IS_ROW_MAJOR) {
        part.row_scales.data = m.row_scales + row_lines_before * row_stride;
        part.column_scales.data = m.column_scales + (u64)quotient_up(m.num_columns, BLOCK_LINES) * before.blocks * STORED_BYTES;
    } else {
        part.row_scales.data = m.row_scales + (u64)row_lines_before * STORED_BYTES;
        part.column_scales.data = m.column_scales + before.blocks * column_stride;
    }
    // The scales of a group's column copies follow each other without gaps when they are row-major.
    const u64 column_lines = LIST ? column_stride : (u64)num_blocks * STORED_BYTES;
    part.row_scales.line_stride = IS_ROW_MAJOR ? row_stride : STORED_BYTES;
    part.row_scales.block_stride = IS_ROW_MAJOR ? STORED_BYTES : row_stride;
    part.column_scales.line_stride = IS_ROW_MAJOR ? column_lines : STORED_BYTES;
    part.column_scales.block_stride = IS_ROW_MAJOR ? STORED_BYTES : column_stride;
}

// Cuts `l` of the parts of a matrix: strips of columns one after the other, parts of a strip from top to bottom, as even as whole tiles allow.
DEVICE Part cut(const Matrix& m, u32 matrix, u32 num_valid, u32 num_rows, u32 l, const Sums& before) {
    const u32 num_down = quotient_up(num_rows, GROUP_ROWS), strip = l / num_down, k = l % num_down;
    const u32 units = quotient_up(num_rows, TILE_ROWS), least = units / num_down, larger = units % num_down;
    const u32 first_row = (k * least + (k < larger ? k : larger)) * TILE_ROWS, reach = first_row + (least + (k < larger)) * TILE_ROWS;
    const u32 end = reach < num_rows ? reach : num_rows;
    Part part;
    part.matrix = matrix;
    part.first_row = first_row;
    part.first_column = strip * TILE_COLUMNS;
    part.num_rows = end - first_row;
    part.num_valid = first_row >= num_valid ? 0 : end < num_valid ? end - first_row : num_valid - first_row;
    const u32 left = m.num_columns - part.first_column;
    part.num_columns = left < TILE_COLUMNS ? left : TILE_COLUMNS;
    part.x = m.x + first_row * m.x_stride + part.first_column * IN;
    part.row = m.row + first_row * m.row_stride + part.first_column * OUT;
    part.column_stride = m.column_stride;
    part.column = m.column + part.first_column * m.column_stride + first_row * OUT;
    if constexpr (HAS_SCALES) {
        place_scales(part, m, num_rows, before);
    }
    return part;
}

DEVICE i64 offset_of(const Parameters& p, u32 i) {
    return p.flags & OFFSETS_ARE_64_BITS ? ((const i64*)p.offsets)[i] : ((const i32*)p.offsets)[i];
}

// What 32 threads found of a group's matrices, for each such 32.
struct Found {
    Sums sums[NUM_GROUPS];
    u32 is_bad[NUM_GROUPS];
};

// The matrix of a list that a part belongs to.
DEVICE void locate_in_list(const Parameters& p, u32 part, Part& found) {
    u32 first = 0, end = p.num_matrices;
    while (first + 1 < end) {
        const u32 middle = (first + end) / 2;
        const bool is_before = p.matrices[middle].first_part <= part;
        first = is_before ? middle : first;
        end = is_before ? end : middle;
    }
    const Matrix& m = p.matrices[first];
    found = cut(m, first, m.num_rows, padded(p, m.num_rows), part - m.first_part, Sums{});
}

// The matrix of a group: `num_rows` rows from row `start` on, behind others that add up to `before`.
DEVICE void locate_in_matrix(const Parameters& p, u32 matrix, u32 start, u32 num_rows, const Sums& before, u32 part, Part& found) {
    Matrix m = p.matrices[0];
    const u32 rows = padded(p, num_rows);
    m.x += start * m.x_stride;
    m.row += before.rows * m.row_stride;
    m.column += (u64)before.rows * m.num_columns * OUT;
    m.column_stride = (u64)rows * OUT;
    found = cut(m, matrix, num_rows, rows, part, before);
}

// Finds part `nth` of this block; false when there is none. All threads take part; ends with a barrier.
//
// Each thread looks at one matrix (of more matrices at one in NUM_THREADS): the block's latency before its first load is what counts. A group has no parts
// when its offsets are not what they must be: nothing is read or written outside of the buffers.
DEVICE bool locate(const Parameters& p, u32 nth, Found& shared, Part& found) {
    const u32 thread = thread_idx(), lane = thread % 32, group = thread / 32;
    if constexpr (LIST) {
        if (thread == 0 && nth == 0) {
            locate_in_list(p, block_idx_x(), found);
        }
        block_barrier();
        return nth == 0;
    }
    const Matrix& all = p.matrices[0];
    const u32 num_strips = p.num_strips;
    bool is_bad = false;
    // Twice when there are more matrices than threads: the number of parts decides which are this block's.
    Sums total = {};
    for (u32 pass = p.num_matrices > NUM_THREADS ? 0 : 1; pass < 2; pass++) {
        Sums before = {};
        const u32 num_parts = total.parts * num_strips;
        for (u32 first = 0; first < p.num_matrices; first += NUM_THREADS) {
            const u32 i = first + thread;
            u32 start = 0, num_rows = 0;
            Sums own = {};
            bool is_wrong = false;
            if (i < p.num_matrices) {
                const i64 at = offset_of(p, i), next = offset_of(p, i + 1);
                is_wrong = next < at || next > (i64)all.num_rows || (i == 0 && at != 0) || (p.pad_rows == 1 && (u64)next > p.row_capacity);
                start = (u32)at;
                num_rows = (u32)(next - at);
                own.rows = padded(p, num_rows);
                own.parts = quotient_up(own.rows, GROUP_ROWS);
                own.blocks = blocks_of(own.rows);
                own.words = quotient_up(own.blocks, SCALES_OF_WORD);
            }
            Sums up_to = {sum_up_to(own.parts, lane), 0, 0, 0};
            if (HAS_SCALES || p.pad_rows > 1) {
                up_to.rows = sum_up_to(own.rows, lane);
            }
            if constexpr (HAS_SCALES) {
                up_to.blocks = sum_up_to(own.blocks, lane);
                up_to.words = sum_up_to(own.words, lane);
            }
            const u32 wrong = greatest_of_group(is_wrong);
            if (lane == 31) {
                shared.sums[group] = up_to;
                shared.is_bad[group] = wrong;
            }
            block_barrier();
            Sums sums = before;
#pragma unroll
            for (u32 g = 0; g < NUM_GROUPS; g++) {
                const Sums of_group = shared.sums[g];
                is_bad = is_bad || shared.is_bad[g] != 0;
                before.parts += of_group.parts;
                sums.parts += g < group ? of_group.parts : 0;
                if (HAS_SCALES || p.pad_rows > 1) {
                    before.rows += of_group.rows;
                    sums.rows += g < group ? of_group.rows : 0;
                }
                if constexpr (HAS_SCALES) {
                    before.blocks += of_group.blocks;
                    before.words += of_group.words;
                    sums.blocks += g < group ? of_group.blocks : 0;
                    sums.words += g < group ? of_group.words : 0;
                }
            }
            const bool is_last = first + NUM_THREADS >= p.num_matrices;
            if (pass == 1) {
                const u32 part = part_of_block(p, nth, is_last && first == 0 ? before.parts * num_strips : num_parts);
                // Without padding the offsets are these sums.
                sums.parts += up_to.parts - own.parts;
                sums.rows = HAS_SCALES || p.pad_rows > 1 ? sums.rows + up_to.rows - own.rows : start;
                sums.blocks += up_to.blocks - own.blocks;
                sums.words += up_to.words - own.words;
                const u32 l = part - sums.parts * num_strips;
                if (part != NO_PART && part >= sums.parts * num_strips && l < own.parts * num_strips) {
                    locate_in_matrix(p, i, start, num_rows, sums, l, found);
                }
            }
            block_barrier();
        }
        total = before;
    }
    is_bad = is_bad || total.rows > p.row_capacity || total.blocks > p.block_capacity || total.words > p.word_capacity;
    return !is_bad && part_of_block(p, nth, total.parts * num_strips) != NO_PART;
}
