// Computes   sum over t of dlogit[t] * x[t, k] for every k, and sum over t of dlogit[t], in the order of `oracle::gate_backward`: the gradients of w and of
//            the bias.
// Layout     x [T, K] rows of X, dlogit [T] of f32, dw [K] of S without distance, dbias [1]; addresses of element 0 and bytes from row to row.
// Work       A block takes 32 bytes of x from every row: whole sectors, and as many blocks as there are. Two (f32: one) neighbouring threads take a row's eight
//            columns each and have r = t % 256 of their own; ascending j = t / 256 is the loop, with BATCH rows on their way. The last block sums dlogit
//            alone, as if x were 1. The low bits of r are added across lanes, the high ones through shared memory.
// Shared     partial[warp of 32 lanes][column], written once.
// Sync       One barrier between the stores to partial and the loads.
// Requires   With ALIGNED x and its rows lie at 16 bytes and k is a multiple of 8. k / COLUMNS < 2^31.

constexpr int LANES = 32;
constexpr u32 NUM_R = 256;                           // spec (order of the sum)
constexpr int PARTS = sizeof(X) == 4 ? 1 : 2;        // threads of a row: together 32 bytes, a sector of NVIDIA's caches (spec)
constexpr int COLUMNS = PARTS * EIGHT;               // of a block
constexpr int THREADS = NUM_R * PARTS;
constexpr int ROWS_PER_WARP = LANES / PARTS;         // values of r in 32 lanes
constexpr int NUM_WARPS = NUM_R / ROWS_PER_WARP;
constexpr int BATCH = 8;                             // arbitrary: loads in flight, 128 bytes a thread; measured in docs/gate.md

constexpr u32 DBIAS_F32 = 1; // dbias is f32, else X

struct Parameters {
    const char* x;
    u64 x_stride;
    u64 k; // 0 for no dw
    const char* dlogit;
    u64 dlogit_stride;
    u64 num_tokens;
    char* dw;
    char* dbias; // or null
    u64 flags;
};

// Neighbours over the bits of r that are BIT, 2 * BIT, .. 16 lanes apart.
template <int BIT> DEVICE float sum_of_rows(float sum) {
    if constexpr (BIT < LANES) {
        return sum_of_rows<2 * BIT>(sum + shuffle_xor<BIT>(sum));
    } else {
        return sum;
    }
}

KERNEL(THREADS) token_sums(PARAMETERS(Parameters) p) {
    SHARED alignas(16) float partial[NUM_WARPS][COLUMNS];
    const u32 thread = thread_idx();
    const u32 r = thread / PARTS;
    const u64 column = (u64)block_idx_x() * COLUMNS + thread % PARTS * EIGHT;
    const bool is_bias = (u64)block_idx_x() * COLUMNS >= p.k; // the block behind the last column
    wait_for_dependencies();
    launch_dependents();

    float a[EIGHT] = {};
    for (u64 first = r; first < p.num_tokens; first += (u64)BATCH * NUM_R) {
        Eight<X> x[BATCH] = {};
        float dlogit[BATCH] = {};
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const u64 t = first + b * NUM_R;
            if (t >= p.num_tokens) continue;
            const char* at = p.x + t * p.x_stride + column * sizeof(X);
            load_eight<X, Reuse::ONCE>(x[b], at, column, p.k);
            dlogit[b] = load_element<f32>(p.dlogit + t * p.dlogit_stride);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            // A row that is not there adds +0 * x, which changes at most the sign of a zero.
#pragma unroll
            for (int e = 0; e < EIGHT; e++) {
                a[e] = fma_rn(dlogit[b], is_bias ? 1.0f : element<X>(x[b], e), a[e]);
            }
        }
    }

#pragma unroll
    for (int e = 0; e < EIGHT; e++) {
        const float sum = sum_of_rows<PARTS>(a[e]);
        if (thread % LANES < PARTS) partial[thread / LANES][thread % PARTS * EIGHT + e] = sum;
    }
    block_barrier();
    if (thread >= COLUMNS) return;
    float term[NUM_WARPS];
#pragma unroll
    for (int w = 0; w < NUM_WARPS; w++) term[w] = partial[w][thread];
#pragma unroll
    for (int num = NUM_WARPS / 2; num > 0; num /= 2) {
#pragma unroll
        for (int i = 0; i < NUM_WARPS / 2; i++) {
            if (i < num) term[i] = term[2 * i] + term[2 * i + 1];
        }
    }
    const float sum = term[0] + 0.0f;
    if (!is_bias) {
        const u64 k = (u64)block_idx_x() * COLUMNS + thread;
        if (k < p.k) store_element<S>(p.dw + k * sizeof(S), narrow<S>(sum));
    } else if (thread == 0) {
        if (p.flags & DBIAS_F32) {
            store_element<f32>(p.dbias, sum);
        } else {
            store_element<X>(p.dbias, narrow<X>(sum));
        }
    }
}
