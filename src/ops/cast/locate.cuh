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
};

// A sector of 32 bytes (spec: NVIDIA) that two parts write is slow. Where columns end within one, a part casts SEAM_ROWS more rows, for the shared tile only:
// those below it or, at the end of a matrix whose columns lie one behind the other, the first ones, which are the next column's.
enum Seam { NO_SEAM, SEAM_BELOW, SEAM_AT_TOP };

DEVICE u32 quotient_up(u32 a, u32 b) {
    return a / b + (a % b != 0);
}

constexpr u32 NO_PART = 0xFFFFFFFF;

// The parts of this block: when there are more parts than blocks, the first blocks have more.
struct Share {
    u32 first;
    u32 num;
};

DEVICE Share share_of_block(const Parameters& p, u32 num_parts) {
    const u32 block = block_idx_x();
    if (num_parts <= p.num_blocks) {
        return {block, block < num_parts ? 1u : 0u};
    }
    const u32 least = num_parts / p.num_blocks, larger = num_parts % p.num_blocks;
    return {block * least + (block < larger ? block : larger), least + (block < larger)};
}

// Sums over matrices.
struct Sums {
    u32 parts;  // of one strip
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

// Rows at whose multiples parts end (derived: a sector of 32 bytes; blocks with a scale are whole).
constexpr u32 CUT_ROWS = HAS_SCALES ? TILE_ROWS : 32;
static_assert(GROUP_ROWS % CUT_ROWS == 0, "The largest part is made of such rows.");

// Cuts `l` of the parts of a matrix: strips of columns one after the other, parts of a strip from top to bottom, as even as can be.
DEVICE void cut(Part& part, const Matrix& m, u32 matrix, u32 num_valid, u32 num_rows, u32 l, const Sums& before) {
    const u32 num_down = quotient_up(num_rows, GROUP_ROWS);
    u32 strip = l, k = 0, first_row = 0, end = num_rows;
    if (num_down > 1) {
        const u32 units = quotient_up(num_rows, CUT_ROWS), least = units / num_down, larger = units % num_down;
        strip = l / num_down;
        k = l % num_down;
        first_row = (k * least + (k < larger ? k : larger)) * CUT_ROWS;
        const u32 reach = first_row + (least + (k < larger)) * CUT_ROWS;
        end = reach < num_rows ? reach : num_rows;
    }
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

DEVICE i64 offset_of(const Parameters& p, u32 i) {
    return p.flags & OFFSETS_ARE_64_BITS ? ((const i64*)p.offsets)[i] : ((const i32*)p.offsets)[i];
}

// What 32 threads found of a group's matrices, for each such 32.
struct Found {
    Sums sums[NUM_GROUPS];
    u32 status[NUM_GROUPS];
    // Of the whole search.
    u32 has_more; // another part behind the one that was found
    u32 status_of_all;
};

// Finds part `nth` of this block; false when there is none. All threads take part; ends with a barrier.
//
// Each thread looks at one matrix (of more matrices at one in NUM_THREADS), and the one whose matrix has the part cuts it: what counts is the time until the
// block's first load. A group has no parts when its offsets are not what they must be: nothing is read or written outside of the buffers.
DEVICE bool locate(const Parameters& p, u32 nth, Found& shared, Part& found) {
    const u32 thread = thread_idx(), lane = thread % 32, group = thread / 32;
    if constexpr (LIST) {
        if (thread == 0) {
            find_in_list(p, block_idx_x(), found);
            shared.has_more = 0;
        }
        block_barrier();
        return true;
    }
    const Matrix& all = p.matrices[0];
    const u32 num_strips = p.num_strips;
    const bool has_sums = HAS_SCALES || p.pad_rows > 1; // without padding the offsets are the sums of rows
    const bool is_short = p.num_matrices <= NUM_THREADS;
    Sums total = {};
    u32 status = 0, part = NO_PART;
    // Twice when there are more matrices than threads: the number of parts decides which are this block's.
    for (u32 pass = is_short ? 1 : 0; pass < 2; pass++) {
        Sums before = {};
        for (u32 first = 0; first < p.num_matrices; first += NUM_THREADS) {
            const u32 i = first + thread;
            u32 start = 0, num_rows = 0, wrong = 0;
            Sums own = {};
            if (i < p.num_matrices) {
                const i64 at = offset_of(p, i), next = offset_of(p, i + 1);
                const bool is_long = !has_sums && (u64)next > p.row_capacity;
                wrong = next < at || next > (i64)all.num_rows || (i == 0 && at != 0) ? BAD_OFFSETS : is_long ? SHORT_OUTPUTS : 0;
                start = (u32)at;
                num_rows = (u32)(next - at);
                own.rows = padded(p, num_rows);
                own.parts = quotient_up(own.rows, GROUP_ROWS);
                own.blocks = blocks_of(own.rows);
                own.words = quotient_up(own.blocks, SCALES_OF_WORD);
            }
            Sums of_group = {sum_of_group(own.parts), 0, 0, 0};
            if (has_sums) {
                of_group.rows = sum_of_group(own.rows);
            }
            if constexpr (HAS_SCALES) {
                of_group.blocks = sum_of_group(own.blocks);
                of_group.words = sum_of_group(own.words);
            }
            wrong = greatest_of_group(wrong);
            if (lane == 0) {
                shared.sums[group] = of_group;
                shared.status[group] = wrong;
            }
            block_barrier();
            Sums sums = before; // of the matrices before those of this thread's group
#pragma unroll
            for (u32 g = 0; g < NUM_GROUPS; g++) {
                const Sums others = shared.sums[g];
                status = shared.status[g] > status ? shared.status[g] : status;
                before.parts += others.parts;
                sums.parts += g < group ? others.parts : 0;
                if (has_sums) {
                    before.rows += others.rows;
                    sums.rows += g < group ? others.rows : 0;
                }
                if constexpr (HAS_SCALES) {
                    before.blocks += others.blocks;
                    before.words += others.words;
                    sums.blocks += g < group ? others.blocks : 0;
                    sums.words += g < group ? others.words : 0;
                }
            }
            if (first + NUM_THREADS >= p.num_matrices && (is_short || pass == 0)) {
                total = before;
                const bool is_long = total.rows > p.row_capacity || total.blocks > p.block_capacity || total.words > p.word_capacity;
                status = status == 0 && is_long ? SHORT_OUTPUTS : status;
            }
            if (pass == 1) {
                const Share share = share_of_block(p, total.parts * num_strips);
                part = status == 0 && nth < share.num ? share.first + nth : NO_PART;
                if (thread == 0) {
                    shared.has_more = part != NO_PART && nth + 1 < share.num;
                    shared.status_of_all = status;
                }
                const u32 in_group = part - sums.parts * num_strips;
                if (part != NO_PART && part >= sums.parts * num_strips && in_group < of_group.parts * num_strips) {
                    // Not many threads come here: one group of 32.
                    const u32 parts_before = sum_up_to(own.parts, lane) - own.parts, l = in_group - parts_before * num_strips;
                    if (has_sums) {
                        sums.rows += sum_up_to(own.rows, lane) - own.rows;
                    } else {
                        sums.rows = start;
                    }
                    if constexpr (HAS_SCALES) {
                        sums.blocks += sum_up_to(own.blocks, lane) - own.blocks;
                        sums.words += sum_up_to(own.words, lane) - own.words;
                    }
                    if (in_group >= parts_before * num_strips && l < own.parts * num_strips) {
                        Matrix m = all;
                        m.x += start * m.x_stride;
                        m.row += sums.rows * m.row_stride;
                        m.column += (u64)sums.rows * m.num_columns * OUT;
                        m.column_stride = (u64)own.rows * OUT;
                        cut(found, m, i, num_rows, own.rows, l, sums);
                    }
                }
            }
            block_barrier();
        }
    }
    return part != NO_PART;
}
