// The cast as it is commonly done: what `moe bench cast` compares with.
//
// Computes   for up to MAX_MATRICES matrices: row = e4m3(scale * x), column = its transpose, amax raised to the greatest |x|, scale_inv = 1 / scale
// Layout     x [rows, columns] bf16; row [rows, columns], column [columns, rows] e4m3, all contiguous
// Work       a block of 256 threads a tile of 64 x 64, a thread 4 x 4 elements: whole tiles at aligned addresses in vectors of 4 elements, others one by one
// Shared     the tile, transposed
// Sync       a block barrier; amax by atomic maximum, one a block
// Requires   contiguous matrices, fewer than 2^31 tiles

constexpr u32 TILE = 64;    // arbitrary, as are THREADS
constexpr u32 THREADS = 256;
constexpr u32 PITCH = TILE + 4; // derived: rows of the transposed tile start in different banks

struct Matrix {
    const u16* x;
    u8* row;
    u8* column;
    const float* scale;
    i32* amax;
    float* scale_inv;
    u32 num_rows;
    u32 num_columns;
    u32 first_tile;
    u32 padding;
};

struct Parameters {
    u32 num_matrices;
    u32 padding;
    Matrix matrices[MAX_MATRICES];
};

KERNEL(THREADS) plain_cast(PARAMETERS(Parameters) p) {
    SHARED __align__(16) u8 tile[TILE * PITCH];
    SHARED u32 greatest_of_groups[THREADS / 32];
    u32 i = 0;
    while (i + 1 < p.num_matrices && p.matrices[i + 1].first_tile <= block_idx_x()) {
        i++;
    }
    const Matrix& m = p.matrices[i];
    const u32 l = block_idx_x() - m.first_tile, across = (m.num_columns + TILE - 1) / TILE;
    const u32 first_row = l / across * TILE, first_column = l % across * TILE;
    const u32 thread = thread_idx(), c = thread % 16 * 4, r = thread / 16 * 4;
    const float scale = *m.scale;
    const bool is_whole = first_row + TILE <= m.num_rows && first_column + TILE <= m.num_columns && m.num_columns % 4 == 0 && m.num_rows % 4 == 0;
    if (l == 0 && thread == 0) {
        *m.scale_inv = 1.0f / scale;
    }
    u32 greatest = 0;
    for (u32 y = 0; y < 4; y++) {
        const u32 row = first_row + r + y;
        const u64 at = (u64)row * m.num_columns + first_column + c;
        float value[4] = {};
        if (is_whole) {
            const Vec8 v = *(const Vec8*)(m.x + at);
            for (u32 x = 0; x < 4; x++) {
                value[x] = float_of(x % 2 ? v.word[x / 2] & 0xFFFF0000 : v.word[x / 2] << 16);
            }
        } else {
            for (u32 x = 0; x < 4; x++) {
                value[x] = row < m.num_rows && first_column + c + x < m.num_columns ? float_of((u32)m.x[at + x] << 16) : 0.0f;
            }
        }
        for (u32 x = 0; x < 4; x++) {
            const u32 magnitude = bits_of(value[x]) & 0x7FFFFFFF;
            greatest = magnitude <= 0x7F800000 && magnitude > greatest ? magnitude : greatest;
        }
        const u32 word = narrow_fp8x4<e4m3>(scale * value[0], scale * value[1], scale * value[2], scale * value[3]);
        if (is_whole) {
            *(u32*)(m.row + at) = word;
        }
        for (u32 x = 0; x < 4; x++) {
            tile[(c + x) * PITCH + r + y] = (u8)(word >> x * 8);
            if (!is_whole && row < m.num_rows && first_column + c + x < m.num_columns) {
                m.row[at + x] = (u8)(word >> x * 8);
            }
        }
    }
    greatest = greatest_of_group(greatest);
    if (thread % 32 == 0) {
        greatest_of_groups[thread / 32] = greatest;
    }
    block_barrier();
    if (thread == 0) {
        for (u32 g = 1; g < THREADS / 32; g++) {
            greatest = greatest_of_groups[g] > greatest ? greatest_of_groups[g] : greatest;
        }
        raise(m.amax, (i32)greatest);
    }
    for (u32 y = 0; y < 4; y++) {
        const u32 column = first_column + r + y; // a thread's rows of the transposed tile
        const u64 at = (u64)column * m.num_rows + first_row + c;
        if (is_whole) {
            *(u32*)(m.column + at) = *(const u32*)(tile + (r + y) * PITCH + c);
        } else {
            for (u32 x = 0; x < 4; x++) {
                if (column < m.num_columns && first_row + c + x < m.num_rows) {
                    m.column[at + x] = tile[(r + y) * PITCH + c + x];
                }
            }
        }
    }
}
