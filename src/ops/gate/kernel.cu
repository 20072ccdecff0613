// Computes   the five forms of `ops::gate`, each in one launch: g = activation(x . w + bias + addend) * scale and what is multiplied with it, or
//            s * sigmoid(g); and what their backward makes row by row. The order of the sum and every rounding are those of `oracle::gate` and
//            `oracle::gate_backward`.
// Layout     x [T, K], w [K], bias [1], addend [T], s [T, N], out [T] or [T, N], idx [T], dg [T], dlogit [T]: addresses of row 0 and bytes from row to row,
//            as the caller owns them. For gate_append_topk, idx and out point at the last column. Only out, idx and dlogit are written.
// Work       A team is 32 lanes; lane l of a team holds, of w = first_w .. first_w + VECTORS, the eight elements e of (w, l). A row has TEAMS_PER_ROW
//            teams in one block, or in each of the CLUSTER blocks of a cluster; a block has ROWS_PER_BLOCK rows. So the pairs over e and the low
//            bits of w are added in registers, the high bits of w after one exchange through shared memory (of each block that needs the gate), and
//            the bits of l across lanes. Grid x walks rows; grid y splits the columns of s, and each of its blocks makes the same gate again.
// Shared     partial[team of the cluster][l], written once.
// Sync       One barrier (of the block, or of the cluster) between the stores to partial and the loads. Remote stores come after every block of the
//            cluster has started; a block reads only its own shared memory afterwards, so it may end without a further barrier.
// Requires   elements of one row: k <= 256 * VECTORS * TEAMS_PER_ROW * CLUSTER if ONE_PASS, else that product is 8192 (all of w). With ALIGNED x, its
//            rows and w lie at 16 bytes and k is a multiple of 8, and the same holds for s, out and n. out does not overlap
//            itself. ROWS_PER_BLOCK is 1 unless TEAMS_PER_ROW is.

constexpr int LANES = 32; // spec (order of the sum): values of l
constexpr int ROW_THREADS = LANES * TEAMS_PER_ROW;
constexpr int THREADS = ROW_THREADS * ROWS_PER_BLOCK;
constexpr int PARTIALS = TEAMS_PER_ROW * CLUSTER; // teams of a row
// What a lane holds at a time: VECTORS neighbouring values of w and, once these are all that the row has, BATCH neighbouring values of j.
constexpr int VECTORS = ELEMENTS_PER_LANE / EIGHT < LANES / PARTIALS ? ELEMENTS_PER_LANE / EIGHT : LANES / PARTIALS;
constexpr int BATCH = ELEMENTS_PER_LANE / EIGHT / VECTORS;
constexpr u32 PASS = LANES * EIGHT * VECTORS * PARTIALS; // elements of one value of j
static_assert((BATCH == 1 && ONE_PASS) || PASS == 8192, "A second value of j comes after all 32 values of w.");
static_assert(ROWS_PER_BLOCK == 1 || PARTIALS == 1, "Teams that share a row use the shared memory and the barrier of the whole block.");
static_assert((VECTORS & (VECTORS - 1)) == 0 && (PARTIALS & (PARTIALS - 1)) == 0, "Pairs over w are pairs of equal ranges.");
static_assert(ELEMENTS_PER_LANE == EIGHT * VECTORS * BATCH, "Each lane holds the same number of whole vectors.");

// What is computed.
enum Form {
    GATE,             // out = g; for gate_append_topk idx too
    GATE_MUL,         // out = g * s
    GATE_MUL_ADD,     // out = out + g * s
    SIGMOID_MUL,      // out = s * sigmoid(w), one w for each row
    SIGMOID_MUL_EACH, // the same, one w for each element
    PAIR_DOT,         // out = x . w, a row of w for each row of x
    DLOGIT,           // out = the gradient of the logit, from dg
    DLOGIT_MUL,       // dlogit is that, and out = dlogit * s, where s is w
};
constexpr bool HAS_DOT = FORM != SIGMOID_MUL && FORM != SIGMOID_MUL_EACH;
constexpr bool HAS_ROWS = HAS_DOT ? FORM == GATE_MUL || FORM == GATE_MUL_ADD || FORM == DLOGIT_MUL : true;
constexpr bool HAS_DLOGIT = FORM == DLOGIT || FORM == DLOGIT_MUL;

template <bool CONDITION, class A, class B> struct Choice {
    using Type = A;
};
template <class A, class B> struct Choice<false, A, B> {
    using Type = B;
};
// The type of s; that of the result is S.
using R = Choice<FORM == DLOGIT_MUL, W, S>::Type;

// Of elements of x and w in their rows: 32 bits are enough for what one pass takes.
using Index = Choice<ONE_PASS, u32, u64>::Type;

// Bits of Parameters::flags, which are all 0 without WITH_OPTIONS.
constexpr u32 LINEAR = 2;    // no sigmoid
constexpr u32 FRAMEWORK = 4; // Rounding::Framework
constexpr u32 HAS_BIAS = 8;
constexpr u32 BIAS_F32 = 16; // bias is f32, else X
constexpr u32 HAS_ADDEND = 32;
constexpr u32 ADDEND_F32 = 64; // addend is f32, else X
constexpr u32 SCALED = 128;    // scale is not 1
constexpr u32 HAS_IDX = 256;
constexpr u32 IDX_I64 = 512; // idx is i64, else i32
constexpr u32 DG_F32 = 1024; // dg is f32, else X
constexpr u32 OPTIONS = LINEAR | FRAMEWORK | HAS_BIAS | HAS_ADDEND | SCALED;

// What every call needs comes first: each 64 bytes that are touched are a miss of the constant cache (spec: parameters start at 0x210, so the first
// 48 bytes are one line).
struct Parameters {
    const char* x;
    const char* w; // of the sigmoid forms: g
    u64 x_stride;
    u64 k;
    u32 flags;
    float scale;
    char* out;

    u64 num_tokens;
    u64 out_stride;
    union {
        const char* s; // of the forms with rows
        char* idx;     // of GATE
    };
    union {
        u64 s_stride;
        u64 idx_stride;
    };
    union {
        u64 n;
        u64 shared_expert;
    };
    u64 columns_per_block; // a multiple of 8, below 2^31
    u64 w_stride;          // of the sigmoid forms and of PAIR_DOT
    const char* bias;

    const char* addend;
    u64 addend_stride;
    const char* dg;
    u64 dg_stride;
    char* dlogit;
    u64 dlogit_stride;
};

template <class T> DEVICE void bitwise_or(Eight<T>& eight, u32 bits) {
#pragma unroll
    for (int v = 0; v < (int)(sizeof(T) / 2); v++) {
#pragma unroll
        for (int i = 0; i < 4; i++) eight.vec[v].word[i] |= bits;
    }
}

// What a lane holds of BATCH passes over a row of k, from its element i on, which lies at `at`.
template <class T, Reuse REUSE> DEVICE void load_batch(Eight<T> (&to)[BATCH][VECTORS], const char* at, Index i, Index k) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            const u32 distance = b * PASS + v * (LANES * EIGHT);
            load_eight<T, REUSE>(to[b][v], at + distance * sizeof(T), i + distance, k);
        }
    }
}

// One element of type X, or f32.
DEVICE float load_x_or_f32(const char* at, bool is_f32) {
    return is_f32 ? load_element<f32>(at) : widen<X>(load_element<X>(at));
}

// Pairs of neighbours, as often as the number of terms halves to 1.
template <int NUM> DEVICE float sum_of_pairs(const float (&term)[NUM]) {
    if constexpr (NUM == 1) {
        return term[0];
    } else {
        float half[NUM / 2];
#pragma unroll
        for (int i = 0; i < NUM / 2; i++) half[i] = term[2 * i] + term[2 * i + 1];
        return sum_of_pairs<NUM / 2>(half);
    }
}

// The pairs over the bits of l that are BIT, 2 * BIT, .. 16 lanes apart; every lane gets the sum.
template <int BIT> DEVICE float sum_of_lanes(float sum) {
    sum += shuffle_xor<BIT>(sum);
    if constexpr (BIT < 16) {
        return sum_of_lanes<2 * BIT>(sum);
    } else {
        return sum;
    }
}

// The whole dot from the sums of all teams: high bits of w, then l. Every lane of every team gets it.
DEVICE float sum_of_teams(const float (&partial)[PARTIALS][LANES], u32 lane) {
    float term[PARTIALS];
#pragma unroll
    for (int w = 0; w < PARTIALS; w++) term[w] = partial[w][lane];
    return sum_of_lanes<1>(sum_of_pairs<PARTIALS>(term));
}

// From the dot to the gate with any option. An absent bias or addend is -0, which changes no sum.
RARE float gate_with_options(float dot, float bias, float addend, u32 flags, float scale) {
    const bool framework = flags & FRAMEWORK;
    float v = dot + bias;
    if (framework) v = round_to<X>(v);
    v += addend;
    if (framework) v = round_to<X>(v);
    if (!(flags & LINEAR)) v = sigmoid(v);
    if (framework) v = round_to<X>(v);
    v *= scale;
    return framework && HAS_ROWS ? round_to<X>(v) : v; // a gate that is the result is rounded once, to the type of the result, by its store
}

// From the gradient of the gate to that of the logit, as `oracle::gate_backward` states it.
DEVICE float dlogit_of(float dot, float bias, float addend, float dg, u32 flags, float scale) {
    const bool framework = flags & FRAMEWORK;
    const float d = dg * scale;
    const float dactivation = framework ? round_to<X>(d) : d;
    if (flags & LINEAR) return dactivation;
    const float s = gate_with_options(dot, bias, addend, flags, 1.0f);
    const float rest = framework ? round_to<X>(1.0f - s) : 1.0f - s;
    const float product = framework ? round_to<X>(dactivation * rest) : dactivation * rest;
    return framework ? round_to<X>(product * s) : product * s;
}

constexpr int NUM_KEPT = HAS_ROWS ? KEPT_VECTORS : 1;

// out = g * s and its kin, for the eight columns from i on, of `end`.
DEVICE void finish_eight(u32 flags, float g, char* out_at, const char* g_at, u32 i, u32 end, const Eight<R>& s, const Eight<S>& before) {
    float value[EIGHT];
    Eight<W> gates = {};
    if constexpr (FORM == SIGMOID_MUL_EACH) load_eight<W, Reuse::ONCE>(gates, g_at + (u64)i * sizeof(W), i, end);
#pragma unroll
    for (int e = 0; e < EIGHT; e++) {
        if constexpr (FORM == SIGMOID_MUL_EACH) {
            g = sigmoid(element<W>(gates, e));
            if (flags & FRAMEWORK) g = round_to<W>(g);
        }
        value[e] = g * element<R>(s, e);
        if constexpr (FORM == GATE_MUL_ADD) {
            if (flags & FRAMEWORK) value[e] = round_to<S>(value[e]);
            value[e] = element<S>(before, e) + value[e];
        }
    }
    store_eight<S>(out_at + (u64)i * sizeof(S), i, end, value);
}

KERNEL(THREADS) gate(PARAMETERS(Parameters) p) {
    const u32 thread = thread_idx();
    const u32 lane = thread % LANES;
    const u32 team = thread / LANES % (u32)TEAMS_PER_ROW;
    const u32 row_thread = thread % ROW_THREADS;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const u32 t = block_idx_x() / (u32)CLUSTER * (u32)ROWS_PER_BLOCK + thread / ROW_THREADS;
    const u32 part = rank * (u32)TEAMS_PER_ROW + team;
    const Index first = (Index)part * (LANES * EIGHT * VECTORS) + lane * EIGHT;
    const Index k = (Index)p.k;
    const u32 flags = WITH_OPTIONS ? p.flags : 0;
    if constexpr (CLUSTER > 1) cluster_arrive_relaxed();

    Eight<W> w[BATCH][VECTORS] = {};
    Eight<X> x[BATCH][VECTORS] = {};
    const char* w_at = p.w + first * sizeof(W);
    if constexpr (FORM == PAIR_DOT) w_at += t * p.w_stride;
    if constexpr (HAS_DOT && WEIGHTS_AT_ONCE) load_batch<W, Reuse::CONSTANT>(w, w_at, first, k);
    // The address is made before the wait, and the weights are on their way: an instruction may move across the wait, but not across a branch.
    const char* x_at = p.x + t * p.x_stride + first * sizeof(X);
    char* out_row = p.out + t * p.out_stride;
    settle(x_at);
    if constexpr (!HAS_ROWS) settle(out_row);
    if (t >= p.num_tokens) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }
    wait_for_dependencies();
    launch_dependents();

    if constexpr (HAS_DOT) {
        load_batch<X, Reuse::ONCE>(x, x_at, first, k);
        if constexpr (!WEIGHTS_AT_ONCE) load_batch<W, Reuse::KEPT>(w, w_at, first, k);
    }
    float bias = -0.0f, addend = -0.0f;
    if (HAS_DOT && flags & HAS_BIAS) bias = load_x_or_f32(p.bias, flags & BIAS_F32);
    float dg = 0.0f;
    if constexpr (HAS_DLOGIT) dg = load_x_or_f32(p.dg + t * p.dg_stride, flags & DG_F32);
    if (HAS_DOT && flags & HAS_ADDEND) addend = load_x_or_f32(p.addend + t * p.addend_stride, flags & ADDEND_F32);

    // The columns of this block; the first of them are read while the dot is made.
    const u64 begin = HAS_ROWS ? (u64)(block_idx_y() * (u32)CLUSTER + rank) * (u32)p.columns_per_block : 0;
    const u32 end = begin >= p.n ? 0 : p.n - begin < p.columns_per_block ? (u32)(p.n - begin) : (u32)p.columns_per_block;
    const char* s_at = p.s + t * p.s_stride + begin * sizeof(R);
    char* out_at = out_row + begin * sizeof(S);
    const char* g_at = p.w + t * p.w_stride + begin * sizeof(W);
    Eight<R> s[NUM_KEPT] = {};
    Eight<S> before[NUM_KEPT] = {};
    auto load_columns = [&](u32 i, Eight<R>& s, Eight<S>& before) {
        load_eight<R, FORM == DLOGIT_MUL ? Reuse::KEPT : Reuse::ONCE>(s, s_at + (u64)i * sizeof(R), i, end);
        if constexpr (FORM == GATE_MUL_ADD) load_eight<S, Reuse::ONCE>(before, out_at + (u64)i * sizeof(S), i, end);
    };
    auto column = [&](u32 v) { return (v * ROW_THREADS + row_thread) * EIGHT; };
    if constexpr (HAS_ROWS) {
#pragma unroll
        for (int v = 0; v < NUM_KEPT; v++) load_columns(column(v), s[v], before[v]);
    }
    // Everything is on its way before anything is used: without a branch arithmetic would be put between the loads and wait there. No launch takes it:
    // the host chose ONE_PASS by the same comparison. Measured (docs/gate.md): up to two vectors that are there early are better left to the compiler.
    if constexpr (HAS_DOT && (VECTORS * BATCH > 2 || !WEIGHTS_AT_ONCE || FORM == GATE_MUL_ADD)) {
        if ((k <= BATCH * PASS) != ONE_PASS) return;
    }
    // What no branch holds back is held back by an operand: the address of the columns (and their number where there are two loads), of whose
    // highest bits (spec: an address has 57 at most; Requires) zero is made.
    if constexpr (HAS_DOT && HAS_ROWS) {
        const u32 zero = (u32)((u64)s_at >> 60) | (FORM == GATE_MUL_ADD ? end >> 31 : 0);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++) bitwise_or(x[b][v], zero);
        }
    }

    float g;
    if constexpr (HAS_DOT) {
        float a[VECTORS][EIGHT] = {};
        auto multiply = [&] {
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
#pragma unroll
                    for (int e = 0; e < EIGHT; e++) a[v][e] = fma_rn(element<X>(x[b][v], e), element<W>(w[b][v], e), a[v][e]);
                }
            }
        };
        multiply();
        if constexpr (!ONE_PASS) {
            for (u64 i = first + BATCH * PASS; i - first < k; i += BATCH * PASS) {
#pragma unroll
                for (int b = 0; b < BATCH; b++) {
#pragma unroll
                    for (int v = 0; v < VECTORS; v++) x[b][v] = {}, w[b][v] = {};
                }
                load_batch<X, Reuse::ONCE>(x, x_at + (i - first) * sizeof(X), i, k);
                load_batch<W, Reuse::KEPT>(w, w_at + (i - first) * sizeof(W), i, k);
                multiply();
            }
        }
        float over_e[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) over_e[v] = sum_of_pairs<EIGHT>(a[v]);
        float sum = sum_of_pairs<VECTORS>(over_e);

        if constexpr (PARTIALS == 1) {
            sum = sum_of_lanes<1>(sum);
        } else {
            SHARED alignas(16) float partial[PARTIALS][LANES];
            if constexpr (CLUSTER == 1) {
                partial[part][lane] = sum;
                block_barrier();
            } else {
                cluster_wait_acquire(); // all blocks have started
                // Who needs the gate: every block has columns, but one number is written once.
                for (u32 to = 0; to < (HAS_ROWS ? (u32)CLUSTER : 1); to++) store_to_cluster(&partial[part][lane], to, sum);
                cluster_arrive_release();
                if (!HAS_ROWS && rank != 0) return;
                cluster_wait_acquire();
            }
            if (!HAS_ROWS && team != 0) return;
            sum = sum_of_teams(partial, lane);
        }
        sum += 0.0f;
        if constexpr (FORM == PAIR_DOT) {
            g = sum;
        } else if constexpr (HAS_DLOGIT) {
            g = dlogit_of(sum, bias, addend, dg, flags, p.scale);
        } else {
            g = flags & OPTIONS ? gate_with_options(sum, bias, addend, flags, p.scale) : sigmoid(sum);
        }
    } else if constexpr (FORM == SIGMOID_MUL) {
        g = sigmoid(widen<W>(load_element<W>(p.w + t * p.w_stride)));
        if (flags & FRAMEWORK) g = round_to<W>(g);
    } else {
        g = 1.0f;
    }

    if constexpr (!HAS_ROWS) {
        if (lane != 0) return;
        store_element<S>(out_row, narrow<S>(g));
        if (flags & HAS_IDX) {
            char* idx = p.idx + t * p.idx_stride;
            if (flags & IDX_I64) {
                store_u64(idx, p.shared_expert);
            } else {
                store_u32(idx, (u32)p.shared_expert);
            }
        }
    } else {
        if constexpr (FORM == DLOGIT_MUL) {
            if (row_thread == 0 && begin == 0) store_element<f32>(p.dlogit + t * p.dlogit_stride, g);
        }
#pragma unroll
        for (int v = 0; v < NUM_KEPT; v++) finish_eight(flags, g, out_at, g_at, column(v), end, s[v], before[v]);
        for (u32 i = column(NUM_KEPT); i < end; i += ROW_THREADS * EIGHT) {
            Eight<R> s = {};
            Eight<S> before = {};
            load_columns(i, s, before);
            finish_eight(flags, g, out_at, g_at, i, end, s, before);
        }
    }
}
