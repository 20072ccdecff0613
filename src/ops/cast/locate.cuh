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
    Matrix matrices[MAX_MATRICES];
};

// Of `status`; 0 when all was well.
constexpr u32 BAD_OFFSETS = 1, SHORT_OUTPUTS = 2;

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
    u32 num_valid; // of the matrix, without it
    u32 num_columns;
    u32 first_row;
    u32 first_column;
    u32 seam;          // enum Seam
    u32 first_foreign; // columns from here on leave the sector of memory in which they start to the part that ends in it
    u32 num_extended;  // columns before this one fill the sector in which they end
    u32 status;        // where there is no part
};

// A sector of 32 bytes (spec: NVIDIA) that two parts write is slow. Where columns end within one, a part casts SEAM_ROWS more rows, for the shared tile only:
// those below it or, at the end of a matrix whose columns lie one behind the other, the first ones, which are the next column's.
enum Seam { NO_SEAM, SEAM_BELOW, SEAM_AT_TOP };

DEVICE u32 quotient_up(u32 a, u32 b) {
    return a / b + (a % b != 0);
}

constexpr u32 NO_PART = 0xFFFFFFFF;

// Part `nth` of this block: when there are more parts than blocks, the first blocks have more.
DEVICE u32 part_of_block(const Parameters& p, u32 nth, u32 num_parts) {
    const u32 block = block_idx_x();
    if (num_parts <= p.num_blocks) {
        return nth == 0 && block < num_parts ? block : NO_PART;
    }
    const u32 least = num_parts / p.num_blocks, larger = num_parts % p.num_blocks;
    const u32 own = least + (block < larger);
    return nth < own ? block * least + (block < larger ? block : larger) + nth : NO_PART;
}

// Sums over the matrices before one.
struct Sums {
    u32 rows;   // padded
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
DEVICE void cut(Part& part, const Matrix& m, u32 matrix, u32 num_valid, u32 num_rows, u32 l, const Sums& before) {
    const u32 num_down = quotient_up(num_rows, GROUP_ROWS), strip = l / num_down, k = l % num_down;
    const u32 units = quotient_up(num_rows, TILE_ROWS), least = units / num_down, larger = units % num_down;
    const u32 first_row = (k * least + (k < larger ? k : larger)) * TILE_ROWS, reach = first_row + (least + (k < larger)) * TILE_ROWS;
    const u32 end = reach < num_rows ? reach : num_rows;
    const u32 first_column = strip * TILE_COLUMNS, left = m.num_columns - first_column;
    const u32 num_columns = left < TILE_COLUMNS ? left : TILE_COLUMNS;
    part.matrix = matrix;
    part.first_row = first_row;
    part.first_column = first_column;
    part.num_rows = end - first_row;
    part.num_valid = num_valid;
    part.num_columns = num_columns;
    part.x = m.x + first_row * m.x_stride + first_column * IN;
    part.row = m.row + first_row * m.row_stride + first_column * OUT;
    part.column_stride = m.column_stride;
    part.column = m.column + first_column * m.column_stride + first_row * OUT;
    if constexpr (SEAM_ROWS > 0) {
        const u32 ends = (u32)(u64)m.column | (u32)m.column_stride;
        const bool is_cut = num_down > 1 && ((ends | num_rows * OUT) & 15) == 0 && (ends & 16) != 0; // 16: derived, half a sector
        const bool is_dense = m.column_stride == (u64)num_rows * OUT, is_last = k + 1 == num_down;
        part.seam = !is_cut ? NO_SEAM : !is_last ? SEAM_BELOW : is_dense ? SEAM_AT_TOP : NO_SEAM;
        part.first_foreign = !is_cut ? TILE_COLUMNS : k > 0 ? 0 : is_dense ? 1 : TILE_COLUMNS;
        part.num_extended = !is_cut ? 0 : !is_last ? num_columns : is_dense ? num_columns - 1 : 0;
    } else {
        part.seam = NO_SEAM;
        part.first_foreign = TILE_COLUMNS;
        part.num_extended = 0;
    }
    if constexpr (HAS_SCALES) {
        place_scales(part, m, num_rows, before);
    }
}

// The matrix of a list that a part belongs to.
DEVICE void find_in_list(const Parameters& p, u32 part, Part& found) {
    u32 first = 0, end = p.num_matrices;
    while (first + 1 < end) {
        const u32 middle = (first + end) / 2;
        const bool is_before = p.matrices[middle].first_part <= part;
        first = is_before ? middle : first;
        end = is_before ? end : middle;
    }
    const Matrix& m = p.matrices[first];
    cut(found, m, first, m.num_rows, padded(p, m.num_rows), part - m.first_part, Sums{});
}

constexpr u32 LOOKS = 8; // matrices that a lane looks at at once (derived: 256 in all, which few layers exceed; their loads are under way together)
constexpr u32 LOOK = 32 * LOOKS;

// Starts and ends of matrices first + lane, first + lane + 32, ...; of the last matrix where there are no more.
template <class T> DEVICE void load_offsets(const void* offsets, u32 first, u32 num_matrices, i64 (&starts)[LOOKS], i64 (&ends)[LOOKS]) {
#pragma unroll
    for (u32 j = 0; j < LOOKS; j++) {
        const u32 i = first + j * 32 + thread_idx() % 32, at = i < num_matrices ? i : num_matrices - 1;
        starts[j] = ((const T*)offsets)[at];
        ends[j] = ((const T*)offsets)[at + 1];
    }
}

// Finds the part of a group: by 32 threads, so that no barrier stands between the loads of the offsets and the result. A group has no parts when its offsets are not
// what they must be: nothing is read or written outside of the buffers.
DEVICE void find_in_group(const Parameters& p, u32 nth, Part& found) {
    const u32 lane = thread_idx() % 32, num_matrices = p.num_matrices, num_strips = p.num_strips;
    const Matrix& all = p.matrices[0];
    const bool has_sums = HAS_SCALES || p.pad_rows > 1; // without padding the offsets are the sums of rows
    const bool is_short = num_matrices <= LOOK;
    u32 num_parts = 0, status = 0;
    // Twice when one look does not take all matrices in: the number of parts decides which is this block's.
    for (u32 pass = is_short ? 1 : 0; pass < 2; pass++) {
        u32 parts_before = 0; // of one strip
        Sums own_before = {}; // of this lane's matrices
        for (u32 first = 0; first < num_matrices; first += LOOK) {
            i64 starts[LOOKS], ends[LOOKS];
            if (p.flags & OFFSETS_ARE_64_BITS) {
                load_offsets<i64>(p.offsets, first, num_matrices, starts, ends);
            } else {
                load_offsets<i32>(p.offsets, first, num_matrices, starts, ends);
            }
            u32 num_rows[LOOKS], parts_of_look[LOOKS];
            if (pass == 0 || is_short) {
                bool is_wrong = false;
                Sums own = own_before;
#pragma unroll
                for (u32 j = 0; j < LOOKS; j++) {
                    const u32 i = first + j * 32 + lane, rows = i < num_matrices ? padded(p, (u32)(ends[j] - starts[j])) : 0;
                    is_wrong = is_wrong || ends[j] < starts[j] || ends[j] > (i64)all.num_rows || (i == 0 && starts[j] != 0);
                    own.rows += rows;
                    own.blocks += blocks_of(rows);
                    own.words += quotient_up(blocks_of(rows), SCALES_OF_WORD);
                }
                status |= greatest_of_group(is_wrong) ? BAD_OFFSETS : 0;
                const bool is_end = first + LOOK >= num_matrices;
                if (is_end) {
                    const u32 last = (num_matrices - 1) % LOOK / 32; // its ends in every lane from the last matrix on
                    i64 end = ends[0];
#pragma unroll
                    for (u32 j = 1; j < LOOKS; j++) {
                        end = j == last ? ends[j] : end;
                    }
                    const u64 rows = has_sums ? sum_of_group(own.rows) : value_of((u32)end, 31);
                    bool is_long = rows > p.row_capacity;
                    if constexpr (HAS_SCALES) {
                        is_long = is_long || sum_of_group(own.blocks) > p.block_capacity || sum_of_group(own.words) > p.word_capacity;
                    }
                    status |= is_long ? SHORT_OUTPUTS : 0;
                }
                if (pass == 0) {
                    own_before = own;
                }
            }
#pragma unroll
            for (u32 j = 0; j < LOOKS; j++) {
                const u32 i = first + j * 32 + lane;
                num_rows[j] = i < num_matrices ? (u32)(ends[j] - starts[j]) : 0;
                parts_of_look[j] = sum_of_group(quotient_up(padded(p, num_rows[j]), GROUP_ROWS));
            }
            if (pass == 0 || is_short) {
#pragma unroll
                for (u32 j = 0; j < LOOKS; j++) {
                    num_parts += parts_of_look[j] * num_strips;
                }
            }
            if (pass == 0) {
                continue;
            }
            const u32 part = status == 0 ? part_of_block(p, nth, num_parts) : NO_PART;
            if (part == NO_PART) {
                break;
            }
            // The 32 matrices that it is among.
            u32 look = LOOKS, rows = 0, start = 0, parts = 0;
#pragma unroll
            for (u32 j = 0; j < LOOKS; j++) {
                const u32 first_part = parts_before * num_strips;
                if (look == LOOKS) {
                    if (part - first_part < parts_of_look[j] * num_strips) {
                        look = j;
                        rows = num_rows[j];
                        start = (u32)starts[j];
                        parts = parts_before;
                    } else if (has_sums) {
                        const u32 in_all = padded(p, num_rows[j]);
                        own_before.rows += in_all;
                        own_before.blocks += blocks_of(in_all);
                        own_before.words += quotient_up(blocks_of(in_all), SCALES_OF_WORD);
                    }
                }
                parts_before += parts_of_look[j];
            }
            if (look == LOOKS) {
                continue;
            }
            const u32 in_all = padded(p, rows), own = quotient_up(in_all, GROUP_ROWS), up_to = sum_up_to(own, lane);
            const bool is_mine = part - (parts + up_to - own) * num_strips < own * num_strips;
            const u32 from = greatest_of_group(is_mine ? lane : 0), l = part - (parts + value_of(up_to - own, from)) * num_strips;
            const u32 of_matrix = value_of(rows, from), first_row = value_of(start, from);
            Sums before = {first_row, 0, 0};
            if (has_sums) {
                const bool is_before = lane < from;
                before.rows = sum_of_group(own_before.rows + (is_before ? in_all : 0));
                if constexpr (HAS_SCALES) {
                    before.blocks = sum_of_group(own_before.blocks + (is_before ? blocks_of(in_all) : 0));
                    before.words = sum_of_group(own_before.words + (is_before ? quotient_up(blocks_of(in_all), SCALES_OF_WORD) : 0));
                }
            }
            if (lane == 0) {
                const u32 in_copies = padded(p, of_matrix);
                Matrix m = all;
                m.x += first_row * m.x_stride;
                m.row += before.rows * m.row_stride;
                m.column += (u64)before.rows * m.num_columns * OUT;
                m.column_stride = (u64)in_copies * OUT;
                cut(found, m, first + look * 32 + from, of_matrix, in_copies, l, before);
            }
            return;
        }
    }
    if (lane == 0) {
        found.matrix = NO_PART;
        found.status = status;
    }
}

// Finds part `nth` of this block; false when there is none. All threads take part; ends with a barrier.
DEVICE bool locate(const Parameters& p, u32 nth, Part& found) {
    if (LIST && nth > 0) {
        return false;
    }
    if (LIST ? thread_idx() == 0 : thread_idx() < 32) {
        if constexpr (LIST) {
            find_in_list(p, block_idx_x(), found);
        } else {
            find_in_group(p, nth, found);
        }
    }
    block_barrier();
    return found.matrix != NO_PART;
}
