// Matrices, and which part of which a block casts. Needs platform, fp8, copy, formula and patch.
//
// Constants: LIST (matrices stand in the parameters; else one buffer and offsets), CURRENT (bools), MAX_MATRICES; BLOCK_LINES and BLOCK_LENGTH (lines
// and elements of a line that share a scale; 0 without block scales), STORED (how they are stored).

constexpr bool HAS_SCALES = BLOCK_LENGTH > 0;
// Parts begin at multiples of as many rows (16: derived, so that columns of whole vectors stay whole).
constexpr u32 UNIT_ROWS = HAS_SCALES ? GROUP_ROWS : 16;

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
    u32 padding;
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

// Parts that a block casts: from the first to the one before the end.
struct Parts {
    u32 next;
    u32 end;
};

// What the first 32 threads of a block keep of the search: sums over the matrices before a lane's own, and with them.
struct Search {
    u32 parts_before; // of one strip
    u32 parts_end;
    u32 rows_before; // padded
    u32 blocks_before; // along the columns
    u32 words_before;
};

// Blocks along a column.
DEVICE u32 blocks_of(u32 num_rows) {
    return HAS_SCALES ? quotient_up(num_rows, BLOCK_LENGTH) : 0;
}

DEVICE u32 padded(const Parameters& p, u32 num_rows) {
    return (num_rows + p.pad_rows - 1) & ~(p.pad_rows - 1); // pad_rows is a power of two
}

// Where the scales of a matrix lie. A template, so that it is not looked at where there are none.
template <class P, class M> DEVICE void place_scales(P& part, const M& m, u32 num_rows, const Search& before) {
    const u32 row_lines_before = BLOCK_LINES == 1 ? before.rows_before : before.blocks_before;
    const u32 num_blocks = blocks_of(num_rows);
    const u64 row_stride = m.row_scales_stride, column_stride = m.column_scales_stride;
    part.row_scales.num_blocks = quotient_up(m.num_columns, BLOCK_LENGTH);
    part.column_scales.num_blocks = num_blocks;
    if constexpr (STORED == PACKED) {
        part.row_scales.data = m.row_scales + (u64)before.rows_before * STORED_BYTES;
        part.column_scales.data = m.column_scales + before.words_before * column_stride;
    } else if constexpr (IS_ROW_MAJOR) {
        part.row_scales.data = m.row_scales + row_lines_before * row_stride;
        part.column_scales.data = m.column_scales + (u64)quotient_up(m.num_columns, BLOCK_LINES) * before.blocks_before * STORED_BYTES;
    } else {
        part.row_scales.data = m.row_scales + (u64)row_lines_before * STORED_BYTES;
        part.column_scales.data = m.column_scales + before.blocks_before * column_stride;
    }
    // The scales of a group's column copies follow each other without gaps when they are row-major.
    const u64 column_lines = LIST ? column_stride : (u64)num_blocks * STORED_BYTES;
    part.row_scales.line_stride = IS_ROW_MAJOR ? row_stride : STORED_BYTES;
    part.row_scales.block_stride = IS_ROW_MAJOR ? STORED_BYTES : row_stride;
    part.column_scales.line_stride = IS_ROW_MAJOR ? column_lines : STORED_BYTES;
    part.column_scales.block_stride = IS_ROW_MAJOR ? STORED_BYTES : column_stride;
}

// Cuts `l` of the parts of a matrix: strips of columns one after the other, parts of a strip from top to bottom, as even as units allow.
DEVICE Part cut(const Matrix& m, u32 matrix, u32 num_valid, u32 num_rows, u32 l, const Search& before) {
    const u32 num_down = quotient_up(num_rows, GROUP_ROWS), strip = l / num_down, k = l % num_down;
    const u32 units = quotient_up(num_rows, UNIT_ROWS), least = units / num_down, larger = units % num_down;
    const u32 first_row = (k * least + (k < larger ? k : larger)) * UNIT_ROWS, reach = first_row + (least + (k < larger)) * UNIT_ROWS;
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

// Divides the matrices of a group among 32 lanes, in order.
DEVICE u32 first_matrix(const Parameters& p, u32 lane) {
    const u32 first = lane * quotient_up(p.num_matrices, 32);
    return first < p.num_matrices ? first : p.num_matrices;
}

DEVICE i64 offset_of(const Parameters& p, u32 i) {
    return p.flags & OFFSETS_ARE_64_BITS ? ((const i64*)p.offsets)[i] : ((const i32*)p.offsets)[i];
}

// The parts of this block. By its first 32 threads. None when the offsets are not what they must be: nothing is read or written outside of the
// buffers.
DEVICE Parts parts_of_block(const Parameters& p, u32 lane, Search& search) {
    if constexpr (LIST) {
        return {block_idx_x(), block_idx_x() + 1};
    }
    const Matrix& all = p.matrices[0];
    u32 i = first_matrix(p, lane);
    const u32 end = first_matrix(p, lane + 1);
    i64 before = offset_of(p, i);
    bool is_bad = i == 0 && before != 0;
    u32 parts = 0, rows = 0, blocks = 0, words = 0;
#pragma unroll 8
    for (; i < end; i++) {
        const i64 after = offset_of(p, i + 1);
        is_bad = is_bad || after < before || after > (i64)all.num_rows;
        const u32 more = padded(p, (u32)(after - before));
        parts += quotient_up(more, GROUP_ROWS);
        rows += more;
        blocks += blocks_of(more);
        words += quotient_up(blocks_of(more), SCALES_OF_WORD);
        before = after;
    }
    if constexpr (HAS_SCALES) {
        search.blocks_before = sum_up_to(blocks, lane) - blocks;
        search.words_before = sum_up_to(words, lane) - words;
        is_bad = is_bad || search.blocks_before + blocks > p.block_capacity || search.words_before + words > p.word_capacity;
    }
    search.parts_end = sum_up_to(parts, lane);
    search.parts_before = search.parts_end - parts;
    // Without padding the offsets are these sums.
    search.rows_before = !HAS_SCALES && p.pad_rows == 1 ? 0 : sum_up_to(rows, lane) - rows;
    is_bad = is_bad || search.rows_before + rows > p.row_capacity;
    if (greatest_of_group(is_bad) != 0) {
        return {0, 0};
    }
    // The first blocks have one more.
    const u32 num_parts = value_of(search.parts_end, 31) * quotient_up(all.num_columns, TILE_COLUMNS);
    const u32 least = num_parts / p.num_blocks, larger = num_parts % p.num_blocks, block = block_idx_x();
    const u32 first = block * least + (block < larger ? block : larger);
    return {first, first + least + (block < larger)};
}

// Finds a part. By the first 32 threads of the block, one of which writes it.
DEVICE void locate(const Parameters& p, u32 part, u32 lane, const Search& search, Part& found) {
    if constexpr (LIST) {
        if (lane == 0) {
            u32 first = 0, end = p.num_matrices;
            while (first + 1 < end) {
                const u32 middle = (first + end) / 2;
                const bool is_before = p.matrices[middle].first_part <= part;
                first = is_before ? middle : first;
                end = is_before ? end : middle;
            }
            const Matrix& m = p.matrices[first];
            found = cut(m, first, m.num_rows, padded(p, m.num_rows), part - m.first_part, search);
        }
        return;
    }
    Matrix m = p.matrices[0];
    const u32 num_strips = quotient_up(m.num_columns, TILE_COLUMNS), slot = part / num_strips;
    if (search.parts_before <= slot && slot < search.parts_end) {
        u32 i = first_matrix(p, lane);
        Search sums = search;
        i64 before = offset_of(p, i);
        for (;; i++) {
            const i64 after = offset_of(p, i + 1);
            const u32 num_rows = (u32)(after - before), rows = padded(p, num_rows), parts = quotient_up(rows, GROUP_ROWS);
            if (slot < sums.parts_before + parts) {
                const u64 rows_before_it = p.pad_rows == 1 ? (u64)before : sums.rows_before;
                m.x += before * m.x_stride;
                m.row += rows_before_it * m.row_stride;
                m.column += rows_before_it * m.num_columns * OUT;
                m.column_stride = (u64)rows * OUT;
                found = cut(m, i, num_rows, rows, part - sums.parts_before * num_strips, sums);
                return;
            }
            sums.parts_before += parts;
            sums.rows_before += rows;
            sums.blocks_before += blocks_of(rows);
            sums.words_before += quotient_up(blocks_of(rows), SCALES_OF_WORD);
            before = after;
        }
    }
}
