// Computes   the steps that a framework runs one by one: dot products of rows (y[t] = x[t] . w), sigmoid, a row times its gate, a sum, SiLU(gate) * up;
//            and nothing. Each result is rounded to T. What benchmarks compare the fused operations with.
// Layout     x [rows, columns], w [columns]; contiguous, at 16-byte boundaries. gate_up is [rows, 2 * columns]: gate, then up.
// Work       dot: a block is one row. The others: eight neighbouring elements a thread.
// Shared     dot: one sum of each warp.
// Sync       dot: one barrier.
// Requires   columns is a multiple of 8, but for the sigmoid; a grid that covers all elements.

constexpr u32 EIGHT = 8; // derived: 16 bytes of 16-bit elements

struct Parameters {
    const char* a;
    const char* b;
    char* out;
    u64 num;     // elements of the result; of dot: of a row
    u64 columns; // elements of a row
};

struct Values {
    float value[EIGHT];
};

DEVICE Values load_eight(const char* from, u64 i) {
    const Vec16 vec = *(const Vec16*)((const T*)from + i);
    Values values;
#pragma unroll
    for (u32 e = 0; e < EIGHT; e++) values.value[e] = widen<T>(T{(u16)(e % 2 == 0 ? vec.word[e / 2] : vec.word[e / 2] >> 16)});
    return values;
}

DEVICE void store_eight(char* to, u64 i, const Values& values) {
    Vec16 vec;
#pragma unroll
    for (u32 word = 0; word < EIGHT / 2; word++) vec.word[word] = narrow_pair<T>(values.value[2 * word], values.value[2 * word + 1]);
    *(Vec16*)((T*)to + i) = vec;
}

DEVICE u64 global_idx() {
    return (u64)block_idx_x() * THREADS + thread_idx();
}

KERNEL(THREADS) plain_empty(PARAMETERS(Parameters) p) {
    (void)p;
    wait_for_dependencies();
}

KERNEL(THREADS) plain_dot(PARAMETERS(Parameters) p) {
    constexpr u32 LANES = 32; // shuffles stay in groups of 32 lanes on every architecture
    SHARED float of_warp[THREADS / LANES];
    const char* row = p.a + (u64)block_idx_x() * p.num * sizeof(T);
    float sum = 0;
    for (u64 i = thread_idx() * EIGHT; i < p.num; i += THREADS * EIGHT) {
        const Values x = load_eight(row, i), w = load_eight(p.b, i);
#pragma unroll
        for (u32 e = 0; e < EIGHT; e++) sum += x.value[e] * w.value[e];
    }
    auto over_lanes = [](float value) {
        value += shuffle_xor<1>(value);
        value += shuffle_xor<2>(value);
        value += shuffle_xor<4>(value);
        value += shuffle_xor<8>(value);
        return value + shuffle_xor<16>(value);
    };
    sum = over_lanes(sum);
    if (thread_idx() % LANES == 0) of_warp[thread_idx() / LANES] = sum;
    block_barrier();
    if (thread_idx() >= LANES) return;
    sum = over_lanes(thread_idx() < THREADS / LANES ? of_warp[thread_idx()] : 0.0f);
    if (thread_idx() == 0) ((T*)p.out)[block_idx_x()] = narrow<T>(sum);
}

KERNEL(THREADS) plain_sigmoid(PARAMETERS(Parameters) p) {
    const u64 i = global_idx();
    if (i < p.num) ((T*)p.out)[i] = narrow<T>(sigmoid(widen<T>(((const T*)p.a)[i])));
}

// a: the gates [rows], b: rows.
KERNEL(THREADS) plain_scale(PARAMETERS(Parameters) p) {
    const u64 i = global_idx() * EIGHT;
    if (i >= p.num) return;
    const float gate = widen<T>(((const T*)p.a)[i / p.columns]);
    Values values = load_eight(p.b, i);
#pragma unroll
    for (u32 e = 0; e < EIGHT; e++) values.value[e] *= gate;
    store_eight(p.out, i, values);
}

KERNEL(THREADS) plain_add(PARAMETERS(Parameters) p) {
    const u64 i = global_idx() * EIGHT;
    if (i >= p.num) return;
    const Values a = load_eight(p.a, i), b = load_eight(p.b, i);
    Values sum;
#pragma unroll
    for (u32 e = 0; e < EIGHT; e++) sum.value[e] = a.value[e] + b.value[e];
    store_eight(p.out, i, sum);
}

KERNEL(THREADS) plain_silu_mul(PARAMETERS(Parameters) p) {
    const u64 i = global_idx() * EIGHT;
    if (i >= p.num) return;
    const u64 gate_idx = i / p.columns * (2 * p.columns) + i % p.columns;
    const Values gate = load_eight(p.a, gate_idx), up = load_eight(p.a, gate_idx + p.columns);
    Values result;
#pragma unroll
    for (u32 e = 0; e < EIGHT; e++) {
        const float g = gate.value[e];
        result.value[e] = round_to<T>(g / (1.0f + exponential(-g))) * up.value[e];
    }
    store_eight(p.out, i, result);
}
