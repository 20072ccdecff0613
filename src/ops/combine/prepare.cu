// Computes   rows as peers read them (8): y, or the sum of a token's rows on this rank in ascending expert id (weighted: w * y, then fma), rounded once
//            to the type that travels; oracle::combine.
// Layout     y rows y_stride bytes apart, 16-byte aligned; out rows OUT_ROW_BYTES apart in this rank's bank; received: as arrange.cu wrote it. SUMS may
//            write in place: an arrival's sum takes the place of its first row, which no other arrival reads.
// Work       a warp takes a part of a row, 16 elements a lane. Any grid; nobody waits.
// Shared     nothing.
// Sync       none: the kernel before this one has ended (waited for); the combine kernel publishes what is written here.
// Requires   parts are whole blocks of 128 elements.

constexpr u32 NUM_WARPS = THREADS / WARP;
constexpr u32 UNITS = (HIDDEN + 15) / 16;                                                  // of 16 elements
constexpr u32 PART_UNITS = ((UNITS + PARTS - 1) / PARTS + BLOCK_LANES - 1) / BLOCK_LANES * BLOCK_LANES;
constexpr u32 UNIT_VECTORS = VALUE_BYTES;                                                  // of y in a unit: 16 elements * VALUE_BYTES / 16 bytes
constexpr u32 VECTOR_SIZE = Vector<Value>::SIZE;
constexpr bool WEIGHS = WEIGHTED && SUMS; // otherwise the weights are for who adds
constexpr u32 Y_VECTORS = Y_ROW_BYTES / 16;

struct PrepareParameters {
    const BankHead* arrival;
    const char* y;
    u64 y_stride;
    char* out;
    const u32* primary; // SUMS
    const u32* slots;
    const float* weights;
    const float* row_weights; // null, or f32 [rows, ROW_K] to be folded back
    u64 row_weight_stride;    // elements
    float* fold;              // [rows, ROW_K] in this rank's bank
    u32 rows;                 // 0: as many as arrived; otherwise of a layout with fixed segments
    u32 spare;
    Rank me;
};
static_assert(sizeof(PrepareParameters) == 88 + sizeof(Rank), "The host fills in the same struct.");

DEVICE void load_unit(const char* row, u32 unit, float (&values)[16]) {
#pragma unroll
    for (u32 i = 0; i < UNIT_VECTORS; i++) {
        const u32 at = unit * UNIT_VECTORS + i;
        const Vec16 v = at < Y_VECTORS ? load16(row + 16ull * at) : Vec16{};
        Vector<Value>::widen_all(v, values + i * VECTOR_SIZE);
    }
}

DEVICE void store_unit(char* row, u32 unit, u32 lane, const float (&values)[16]) {
    if constexpr (BLOCK_SCALES || sizeof(Wire) == 1) {
        Vec16 bytes;
        if constexpr (BLOCK_SCALES) {
            const Quantized q = quantize<false>(values);
            bytes = q.bytes;
            if (lane % BLOCK_LANES == 0 && unit < UNITS) ((u32*)(row + WIRE_SCALES))[unit / BLOCK_LANES] = q.scale;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++) bytes.word[i] = narrow_fp8x4<e4m3>(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (unit * 16 + 4 * i < HIDDEN) ((u32*)row)[unit * 4 + i] = bytes.word[i];
        }
    } else {
        constexpr u32 SIZE = Vector<Wire>::SIZE;
#pragma unroll
        for (u32 i = 0; i < 16 / SIZE; i++) {
            if (unit * 16 + i * SIZE < HIDDEN) store16(row + 16ull * (unit * (16 / SIZE) + i), Vector<Wire>::narrow_all(values + i * SIZE));
        }
    }
}

KERNEL_UNROUNDED(THREADS) prepare(PARAMETERS(PrepareParameters) p) {
    const u32 lane = thread_idx() % WARP;
    const u32 stride = grid_blocks() * NUM_WARPS, first_item = (block_idx_x() * THREADS + thread_idx()) / WARP;
    wait_for_dependencies();
    const u32 num_rows = p.arrival->is_valid == 0 ? 0 : p.rows != 0 ? p.rows : p.arrival->num_rows;
    const u32 num_items = (SUMS ? p.arrival->num_arrivals : num_rows) * PARTS;
    for (u32 item = first_item; WITH_ROWS && item < num_items; item += stride) {
        const u32 row = item / PARTS, part = item % PARTS;
        u32 slot = row, to = row, num = 1, weight = 0;
        if (SUMS) {
            to = p.primary[row];
            if (to == NONE) continue;
            slot = lane < K ? p.slots[(u64)row * K + lane] : NONE;
            weight = lane < K && slot != NONE ? bits_of(p.weights[(u64)row * K + lane]) : 0;
            num = num_bits(lanes_where(slot != NONE));
        }
        const u32 begin = part * PART_UNITS;
        const u32 end = begin + PART_UNITS < UNITS ? begin + PART_UNITS : UNITS;
        // Lanes beyond the end take part in the maximum of a block with zeros.
        for (u32 start = begin; start < end; start += WARP) {
            const u32 unit = start + lane < end ? start + lane : UNITS;
            float sum[16];
            for (u32 i = 0; i < num; i++) {
                float values[16];
                load_unit(p.y + (SUMS ? from_lane(slot, i) : slot) * p.y_stride, unit, values);
                const float w = WEIGHS ? float_of(from_lane(weight, i)) : 1.0f;
#pragma unroll
                for (u32 j = 0; j < 16; j++) {
                    if (WEIGHS) {
                        sum[j] = i == 0 ? w * values[j] : fma_rn(w, values[j], sum[j]);
                    } else {
                        sum[j] = i == 0 ? values[j] : sum[j] + values[j];
                    }
                }
            }
            store_unit(p.out + (u64)to * OUT_ROW_BYTES, unit, lane, sum);
        }
    }
    if (p.row_weights == nullptr) return;
    for (u64 i = block_idx_x() * THREADS + thread_idx(); i < (u64)num_rows * ROW_K; i += grid_blocks() * THREADS) {
        p.fold[i] = p.row_weights[i / ROW_K * p.row_weight_stride + i % ROW_K];
    }
}
