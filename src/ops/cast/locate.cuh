// Matrices, and which part of which a block casts. Needs platform, fp8, copy, formula and patch.
//
// Constants: ROW, COLUMN (copies), LIST (matrices with tensors of their own; else one buffer and offsets), TABLE (a list's matrices and parts stand in device memory; else its
// matrices in the parameters), CURRENT (bools), MAX_MATRICES; BLOCK_LINES and BLOCK_LENGTH (lines and elements of a line that share a scale; 0 without block
// scales), STORED (how they are stored), STACK (strips of TILE_COLUMNS columns that a part takes at most).

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
    u32 num_down;   // list: parts of a strip
};

struct ParametersOfAll {
    const u32* noop;     // or null
    const void* offsets; // group: num_matrices + 1
    u32* status;         // group: or null
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
    u32 tail_start; // group: matrices from this row on are cut into lower parts
    u32 num_parts;  // list: of all matrices, where a block casts several
    u32 num_stacks[2]; // group: parts of a low matrix, of two and of three strips each
};
static_assert(STACK <= 3, "As many as num_stacks has.");

// Of `status`; 0 when all was well.
constexpr u32 BAD_OFFSETS = 1, SHORT_OUTPUTS = 2;

constexpr u32 NOOP_IS_FLOAT = 1, OFFSETS_ARE_64_BITS = 2, RESET_AMAX = 4, POWER_OF_TWO = 8, LAST_FIRST = 16;

// Every block sees the same flag.
DEVICE bool is_noop(const ParametersOfAll& p) {
    if (p.noop == nullptr) {
        return false;
    }
    const u32 bits = *p.noop;
    return p.flags & NOOP_IS_FLOAT ? (bits & 0x7FFFFFFF) != 0 : bits != 0; // -0 is zero
}

// The scale of a matrix: given, absent, or from the matrix's own greatest magnitude, which then stands in its place.
DEVICE float scale_of(const ParametersOfAll& p, const float* scale, u32 i) {
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
    u32 blocks_before; // group: blocks along columns of the matrices before
    u32 words_before;  // and their words
};

// What a block casts: some rows of some columns of a matrix.
struct Part : PartScales<HAS_SCALES> {
    u32 matrix;
    u32 start;     // group: its first row in x
    u32 before;    // group: its first row in the copies, padding included
    u32 num_valid; // its rows
    u32 height;    // its rows, padding included
    u32 first_row;
    u32 num_rows; // of the part, padding included
    u32 first_column;
    u32 stack; // strips of columns
};

// A part in a table, with its matrix: all that a block needs to begin, in one read.
struct alignas(16) Entry {
    Matrix matrix;
    u32 number; // of the matrix
    u32 first_row;
    u32 num_rows; // padding included
    u32 first_column;
    u32 stack;
    u32 padding;
};
static_assert(sizeof(Entry) == sizeof(Matrix) + 24, "No padding but that.");

template <bool> struct ParametersOf : ParametersOfAll {
    Matrix matrices[MAX_MATRICES];
};
template <> struct ParametersOf<true> : ParametersOfAll {
    const Matrix* matrices;
    const Entry* parts; // num_blocks
};
using Parameters = ParametersOf<TABLE>;

DEVICE u32 quotient_up(u32 a, u32 b) {
    return a / b + (a % b != 0);
}

constexpr u32 NO_PART = 0xFFFFFFFF;

// The parts of this block: when there are more parts than blocks, the first blocks have more.
struct Share {
    u32 first;
    u32 num;
};

// Parts of the pass that casts with the matrices' own greatest magnitudes may be taken from the last to the first: what was measured last is in the cache still.
DEVICE u32 block_of_parts(const ParametersOfAll& p) {
    return CURRENT && (ROW || COLUMN) && (p.flags & LAST_FIRST) != 0 ? p.num_blocks - 1 - block_idx_x() : block_idx_x();
}

DEVICE Share share_of_block(const Parameters& p, u32 num_parts) {
    const u32 block = block_of_parts(p);
    if (num_parts <= p.num_blocks) {
        return {block, block < num_parts ? 1u : 0u};
    }
    const u32 least = num_parts / p.num_blocks, larger = num_parts % p.num_blocks;
    return {block * least + (block < larger ? block : larger), least + (block < larger)};
}

// Blocks along a column.
DEVICE u32 blocks_of(u32 num_rows) {
    return HAS_SCALES ? quotient_up(num_rows, BLOCK_LENGTH) : 0;
}

DEVICE u32 padded(const Parameters& p, u32 num_rows) {
    return (num_rows + p.pad_rows - 1) & ~(p.pad_rows - 1); // pad_rows is a power of two
}

DEVICE u32 start_of(const Part& part) {
    return LIST ? 0 : part.start;
}
DEVICE u32 before_of(const Part& part) {
    return LIST ? 0 : part.before;
}
// Where the scales of a part's matrix lie.
template <class M, class P> DEVICE CopyScales row_scales_of(const M& m, const P& part) {
    const u64 stride = m.row_scales_stride;
    const u32 lines_before = STORED == PACKED || BLOCK_LINES == 1 ? before_of(part) : LIST ? 0 : part.blocks_before;
    CopyScales scales;
    scales.data = m.row_scales + (IS_ROW_MAJOR ? lines_before * stride : (u64)lines_before * STORED_BYTES);
    scales.line_stride = IS_ROW_MAJOR ? stride : STORED_BYTES;
    scales.block_stride = IS_ROW_MAJOR ? STORED_BYTES : stride;
    scales.num_blocks = quotient_up(m.num_columns, BLOCK_LENGTH);
    return scales;
}
template <class M, class P> DEVICE CopyScales column_scales_of(const M& m, const P& part) {
    const u64 stride = m.column_scales_stride;
    const u32 num_blocks = blocks_of(part.height), before = LIST ? 0 : STORED == PACKED ? part.words_before : part.blocks_before;
    // The scales of a group's column copies follow each other without gaps when they are row-major.
    const u64 lines = LIST ? stride : (u64)num_blocks * STORED_BYTES;
    CopyScales scales;
    scales.data = m.column_scales + (IS_ROW_MAJOR ? (u64)quotient_up(m.num_columns, BLOCK_LINES) * before * STORED_BYTES : before * stride);
    scales.line_stride = IS_ROW_MAJOR ? lines : STORED_BYTES;
    scales.block_stride = IS_ROW_MAJOR ? STORED_BYTES : stride;
    scales.num_blocks = num_blocks;
    return scales;
}

// Rows at whose multiples parts end (derived: a sector of 32 bytes; blocks with a scale are whole).
constexpr u32 CUT_ROWS = HAS_SCALES ? TILE_ROWS : 32;
static_assert(GROUP_ROWS % CUT_ROWS == 0, "The largest part is made of such rows.");

// Rows of a part at most, of matrices at the end of a group: blocks that end late are short.
constexpr u32 TAIL_ROWS = HAS_SCALES ? GROUP_ROWS : TILE_ROWS * TAIL_TILES;
static_assert(TAIL_ROWS % CUT_ROWS == 0, "As above.");

// Rows of a matrix at most, of which a part of `part_rows` rows takes `n` strips: as many as fit, one behind the other.
DEVICE constexpr u32 most_rows(u32 part_rows, u32 n) {
    return part_rows / n / FILL_ROWS * FILL_ROWS;
}

// Strips that a part of a matrix of `height` rows takes.
DEVICE u32 stack_of(u32 height, bool is_tail) {
    u32 stack = 1;
#pragma unroll
    for (u32 n = 2; n <= STACK; n++) {
        stack += height <= (is_tail ? most_rows(TAIL_ROWS, n) : most_rows(GROUP_ROWS, n));
    }
    return stack;
}

// Parts from top to bottom.
DEVICE u32 down_of(u32 height, bool is_tail) {
    return is_tail ? (height + TAIL_ROWS - 1) / TAIL_ROWS : (height + GROUP_ROWS - 1) / GROUP_ROWS;
}

// Whether a group's matrix that starts at row `start` is cut into the lower parts.
DEVICE bool is_in_tail(const Parameters& p, u32 start) {
    return start >= p.tail_start;
}

// Parts of a group's matrix of `height` rows, padding included, that starts at row `start`.
DEVICE u32 parts_of(const Parameters& p, u32 height, u32 start) {
    const bool is_tail = is_in_tail(p, start);
    u32 num = down_of(height, is_tail) * p.num_strips;
#pragma unroll
    for (u32 n = 2; n <= STACK; n++) {
        // One without rows has none: below none there is the largest number.
        num = height - 1 < (is_tail ? most_rows(TAIL_ROWS, n) : most_rows(GROUP_ROWS, n)) ? p.num_stacks[n - 2] : num;
    }
    return num;
}

// Cuts `l` of the parts of a matrix of part.height rows: strips of columns one after the other, `num_down` parts of a strip from top to bottom, as even as
// can be; or `stack` strips in each.
DEVICE void cut(Part& part, u32 l, u32 num_down, u32 stack) {
    u32 strip = l * stack, first_row = 0, end = part.height;
    if (num_down > 1) {
        const u32 units = quotient_up(part.height, CUT_ROWS), least = units / num_down, larger = units % num_down;
        strip = l / num_down;
        const u32 k = l % num_down;
        first_row = (k * least + (k < larger ? k : larger)) * CUT_ROWS;
        const u32 reach = first_row + (least + (k < larger)) * CUT_ROWS;
        end = reach < part.height ? reach : part.height;
    }
    part.first_row = first_row;
    part.num_rows = end - first_row;
    part.first_column = strip * TILE_COLUMNS;
    part.stack = stack;
}

// Where the tensors of a part's matrix begin, and where its columns lie.
DEVICE const u8* input_of(const Matrix& m, const Part& part) {
    return m.x + (u64)part.start * (u32)m.x_stride;
}
DEVICE u8* rows_of(const Matrix& m, const Part& part) {
    return m.row + (u64)part.before * (u32)m.row_stride;
}
DEVICE u64 column_stride_of(const Matrix& m, const Part& part) {
    return LIST ? m.column_stride : (u64)part.height * OUT;
}
DEVICE u8* columns_of(const Matrix& m, const Part& part) {
    return m.column + (u64)part.before * (m.num_columns * OUT) + part.first_column * column_stride_of(m, part) + part.first_row * OUT;
}

// The part of an entry of a table.
template <class P> DEVICE void part_of_entry(const P& p, const Entry& entry, Part& found) {
    found.matrix = entry.number;
    found.start = 0;
    found.before = 0;
    found.num_valid = entry.matrix.num_rows;
    found.height = padded(p, entry.matrix.num_rows);
    found.first_row = entry.first_row;
    found.num_rows = entry.num_rows;
    found.first_column = entry.first_column;
    found.stack = entry.stack;
}

// Part `l` of a list: thread 0. A template, so that the form that is not there is not looked at.
template <class P> DEVICE void find_in_list(const P& p, u32 l, Part& found) {
    if constexpr (TABLE) {
        part_of_entry(p, p.parts[l], found);
    } else {
        u32 first = 0, end = p.num_matrices;
        while (first + 1 < end) {
            const u32 middle = (first + end) / 2;
            const bool is_before = p.matrices[middle].first_part <= l;
            first = is_before ? middle : first;
            end = is_before ? end : middle;
        }
        const Matrix& m = p.matrices[first];
        Part part;
        part.matrix = first;
        part.start = 0;
        part.before = 0;
        part.num_valid = m.num_rows;
        part.height = padded(p, m.num_rows);
        cut(part, l - m.first_part, m.num_down, stack_of(part.height, false));
        found = part;
    }
}

DEVICE i64 offset_of(const Parameters& p, u32 i) {
    return p.flags & OFFSETS_ARE_64_BITS ? ((const i64*)p.offsets)[i] : ((const i32*)p.offsets)[i];
}
