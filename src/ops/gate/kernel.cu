// Computes   the five forms of `ops::gate`, each in one launch: g = activation(x . w + bias + addend) * scale and what is multiplied with it, or
//            s * sigmoid(g). The order of the sum and every rounding are those of `oracle::gate`.
// Layout     x [T, K], w [K], bias [1], addend [T], s [T, N], out [T] or [T, N], idx [T]: addresses of row 0 and bytes from row to row, as the caller
//            owns them. For gate_append_topk, idx and out point at the last column. Only out and idx are written.
// Work       A team is 32 lanes; lane l of a team holds, of w = first_w .. first_w + VECTORS, the eight elements e of (w, l). A row has TEAMS_PER_ROW
//            teams in one block, or in each of the CLUSTER blocks of a cluster; a block has ROWS_PER_BLOCK rows. So the pairs over e and the low
//            bits of w are added in registers, the high bits of w after one exchange through shared memory (of each block that needs the gate), and
//            the bits of l across lanes. Grid x walks rows; grid y splits the columns of s, and each of its blocks makes the same gate again.
// Shared     partial[team of the cluster][l], written once.
// Sync       One barrier (of the block, or of the cluster) between the stores to partial and the loads. Remote stores come after every block of the
//            cluster has started; a block reads only its own shared memory afterwards, so it may end without a further barrier.
// Requires   elements of one row: k <= 256 * VECTORS * TEAMS_PER_ROW * CLUSTER if ONE_PASS, else that product is 8192 (all of w). With ALIGNED_DOT x, its
//            rows and w lie at 16 bytes and k is a multiple of 8; with ALIGNED_ROWS the same holds for s, out and n. out does not overlap
//            itself. ROWS_PER_BLOCK is 1 unless TEAMS_PER_ROW is.

constexpr int LANES = 32; // spec (order of the sum): values of l
constexpr int EIGHT = 8;  // spec: values of e
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

// Of elements of x and w in their rows: 32 bits are enough for what one pass takes.
template <bool SMALL> struct IndexOf {
    using Type = u32;
};
template <> struct IndexOf<false> {
    using Type = u64;
};
using Index = IndexOf<ONE_PASS>::Type;

// What is computed.
enum Form { GATE, GATE_MUL, GATE_MUL_ADD, SIGMOID_MUL, SIGMOID_MUL_EACH };
constexpr bool HAS_DOT = FORM <= GATE_MUL_ADD;
constexpr bool HAS_ROWS = FORM != GATE;

// Bits of Parameters::flags.
constexpr u32 CONSTANT_WEIGHTS = 1; // w may be read before the launches that this one depends on have ended
constexpr u32 LINEAR = 2;           // no sigmoid
constexpr u32 FRAMEWORK = 4;        // Rounding::Framework
constexpr u32 HAS_BIAS = 8;
constexpr u32 BIAS_F32 = 16; // bias is f32, else X
constexpr u32 HAS_ADDEND = 32;
constexpr u32 ADDEND_F32 = 64; // addend is f32, else X
constexpr u32 OUT_F32 = 128;   // the result of GATE is f32, else X
constexpr u32 HAS_IDX = 256;
constexpr u32 IDX_I64 = 512; // idx is i64, else i32

// What every call needs comes first: each 64 bytes that are touched are a miss of the constant cache.
struct Parameters {
    const char* x;
    const char* w; // of the sigmoid forms: g
    u64 k;
    u32 flags;
    float scale;
    char* out;
    u64 num_tokens;

    u64 x_stride;
    u64 out_stride;
    const char* bias;
    const char* addend;
    u64 addend_stride;
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

    u64 columns_per_block; // a multiple of 8
    u64 w_stride;          // of the sigmoid forms
};

// Eight neighbours of a row.
template <class T> struct Eight {
    Vec16 vec[sizeof(T) / 2];
};

template <class T> DEVICE float element(const Eight<T>& eight, int e) {
    if constexpr (sizeof(T) == 4) {
        return float_of(eight.vec[e / 4].word[e % 4]);
    } else {
        const u32 word = eight.vec[0].word[e / 2];
        return widen<T>(T{(u16)(e % 2 == 0 ? word : word >> 16)});
    }
}

template <class T> DEVICE void set_element(Eight<T>& eight, int e, T value) {
    if constexpr (sizeof(T) == 4) {
        eight.vec[e / 4].word[e % 4] = bits_of(value);
    } else {
        u32& word = eight.vec[0].word[e / 2];
        word = e % 2 == 0 ? (word & 0xFFFF0000u) | value.bits : (word & 0xFFFFu) | (u32)value.bits << 16;
    }
}

enum class Reuse { CONSTANT, KEPT, ONCE };

// Elements i .. i + 8 of a row of k; those that it lacks are +0.
template <class T, bool ALIGNED, Reuse REUSE, class I> DEVICE Eight<T> load_eight(const char* row, I i, I k) {
    Eight<T> eight = {};
    if constexpr (ALIGNED) {
        if (i < k) {
#pragma unroll
            for (int v = 0; v < (int)(sizeof(T) / 2); v++) {
                const char* at = row + (u64)i * sizeof(T) + 16 * v;
                eight.vec[v] = REUSE == Reuse::CONSTANT ? load_constant(at) : REUSE == Reuse::KEPT ? load(at) : load_once(at);
            }
        }
    } else {
#pragma unroll
        for (int e = 0; e < EIGHT; e++) {
            if (i + e < k) set_element<T>(eight, e, ((const T*)row)[i + e]);
        }
    }
    return eight;
}

// What a lane holds of BATCH passes over a row of k, from its element i on.
template <class T, Reuse REUSE> DEVICE void load_batch(Eight<T> (&to)[BATCH][VECTORS], const char* row, Index i, Index k) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) to[b][v] = load_eight<T, ALIGNED_DOT, REUSE>(row, i + b * PASS + v * (LANES * EIGHT), k);
    }
}

template <class T, bool ALIGNED> DEVICE void store_eight(char* row, u64 i, u64 n, const float (&value)[EIGHT]) {
    if constexpr (ALIGNED) {
        if (i < n) {
#pragma unroll
            for (int v = 0; v < (int)(sizeof(T) / 2); v++) {
                Vec16 vec;
#pragma unroll
                for (int word = 0; word < 4; word++) {
                    if constexpr (sizeof(T) == 4) {
                        vec.word[word] = bits_of(value[4 * v + word]);
                    } else {
                        vec.word[word] = narrow_pair<T>(value[2 * word], value[2 * word + 1]);
                    }
                }
                store(row + i * sizeof(T) + 16 * v, vec);
            }
        }
    } else {
#pragma unroll
        for (int e = 0; e < EIGHT; e++) {
            if (i + e < n) ((T*)row)[i + e] = narrow<T>(value[e]);
        }
    }
}

// One element of type X, or f32.
DEVICE float load_x_or_f32(const char* at, bool is_f32) {
    return is_f32 ? *(const float*)at : widen<X>(*(const X*)at);
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
    if constexpr (FINAL == 0) {
        float term[PARTIALS];
#pragma unroll
        for (int w = 0; w < PARTIALS; w++) term[w] = partial[w][lane];
        return sum_of_lanes<1>(sum_of_pairs<PARTIALS>(term));
    } else {
        // Eight lanes take four neighbours of l each, so that two of the bits of l are added in registers; GROUPS groups of eight take equal ranges of w.
        constexpr int GROUPS = FINAL == 2 && PARTIALS >= 4 ? 4 : 1;
        constexpr int NUM = PARTIALS / GROUPS;
        float quad[4];
        float term[4][NUM];
#pragma unroll
        for (int w = 0; w < NUM; w++) {
            const Vec16 vec = *(const Vec16*)&partial[(GROUPS == 1 ? 0 : lane / 8 * NUM) + w][lane % 8 * 4];
#pragma unroll
            for (int l = 0; l < 4; l++) term[l][w] = float_of(vec.word[l]);
        }
#pragma unroll
        for (int l = 0; l < 4; l++) {
            quad[l] = sum_of_pairs<NUM>(term[l]);
            if constexpr (GROUPS == 4) quad[l] = sum_of_lanes<8>(quad[l]);
        }
        float sum = sum_of_pairs<4>(quad);
        sum += shuffle_xor<1>(sum);
        sum += shuffle_xor<2>(sum);
        return sum + shuffle_xor<4>(sum);
    }
}

// From the dot to the gate. Absent bias and addend are -0, which changes no sum.
DEVICE float gate_of(float dot, float bias, float addend, u32 flags, float scale) {
    float v = dot + bias;
    if (!(flags & (FRAMEWORK | LINEAR))) return sigmoid(v + addend) * scale;
    const bool framework = flags & FRAMEWORK;
    if (framework) v = round_to<X>(v);
    v += addend;
    if (framework) v = round_to<X>(v);
    if (!(flags & LINEAR)) v = sigmoid(v);
    if (framework) v = round_to<X>(v);
    v *= scale;
    return framework && !(FORM == GATE && (flags & OUT_F32)) ? round_to<X>(v) : v;
}

constexpr int NUM_KEPT = HAS_ROWS ? KEPT_VECTORS : 1;

// Vectors of s and out that a thread loads before it knows the gate.
struct Kept {
    Eight<S> s[NUM_KEPT];
    Eight<S> out[FORM == GATE_MUL_ADD ? NUM_KEPT : 1];
};

// out = g * s and its kin, for the eight columns from i on.
DEVICE void finish_eight(const Parameters& p, u64 t, float g, u64 i, u64 end, const Eight<S>& s, const Eight<S>& before) {
    float value[EIGHT];
#pragma unroll
    for (int e = 0; e < EIGHT; e++) {
        value[e] = g * element<S>(s, e);
        if constexpr (FORM == GATE_MUL_ADD) {
            if (p.flags & FRAMEWORK) value[e] = round_to<S>(value[e]);
            value[e] = element<S>(before, e) + value[e];
        }
    }
    if constexpr (FORM == SIGMOID_MUL_EACH) {
        const Eight<W> gates = load_eight<W, ALIGNED_DOT, Reuse::ONCE>(p.w + t * p.w_stride, i, end);
#pragma unroll
        for (int e = 0; e < EIGHT; e++) {
            float gate = sigmoid(element<W>(gates, e));
            if (p.flags & FRAMEWORK) gate = round_to<W>(gate);
            value[e] = gate * element<S>(s, e);
        }
    }
    store_eight<S, ALIGNED_ROWS>(p.out + t * p.out_stride, i, end, value);
}

KERNEL(THREADS) gate(PARAMETERS(Parameters) p) {
    const u32 thread = thread_idx();
    const u32 lane = thread % LANES;
    const u32 team = thread / LANES % TEAMS_PER_ROW;
    const u32 row_thread = thread % ROW_THREADS;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const u64 t = (u64)(block_idx_x() / CLUSTER) * ROWS_PER_BLOCK + thread / ROW_THREADS;
    const u32 part = rank * TEAMS_PER_ROW + team;
    const Index first = (Index)part * (LANES * EIGHT * VECTORS) + lane * EIGHT;
    const Index k = (Index)p.k;
    const u32 flags = p.flags;
    const float scale = p.scale;
    const char* x_row = p.x + t * p.x_stride;
    settle(x_row);
    if constexpr (CLUSTER > 1) cluster_arrive_relaxed();

    Eight<W> w[BATCH][VECTORS];
    if constexpr (HAS_DOT) {
        if (flags & CONSTANT_WEIGHTS) load_batch<W, Reuse::CONSTANT>(w, p.w, first, k);
    }
    const bool in_range = t < p.num_tokens;
    wait_for_dependencies();
    launch_dependents();
    if (!in_range) return; // only of a block with several rows, which have no barrier

    Eight<X> x[BATCH][VECTORS];
    float bias = -0.0f, addend = -0.0f;
    if constexpr (HAS_DOT) {
        load_batch<X, Reuse::ONCE>(x, x_row, first, k);
        if (!(flags & CONSTANT_WEIGHTS)) load_batch<W, Reuse::KEPT>(w, p.w, first, k);
        if (flags & HAS_BIAS) bias = load_x_or_f32(p.bias, flags & BIAS_F32);
        if (flags & HAS_ADDEND) addend = load_x_or_f32(p.addend + t * p.addend_stride, flags & ADDEND_F32);
    }

    // The first columns, while the dot is made.
    const char* s_row = p.s + t * p.s_stride;
    const u64 begin = HAS_ROWS ? (u64)(block_idx_y() * CLUSTER + rank) * p.columns_per_block : 0;
    const u64 end = begin + p.columns_per_block < p.n ? begin + p.columns_per_block : p.n;
    Kept kept;
    auto column = [&](u64 v) { return begin + (v * ROW_THREADS + row_thread) * EIGHT; };
    if constexpr (HAS_ROWS) {
#pragma unroll
        for (int v = 0; v < NUM_KEPT; v++) {
            kept.s[v] = load_eight<S, ALIGNED_ROWS, Reuse::ONCE>(s_row, column(v), end);
            if constexpr (FORM == GATE_MUL_ADD) {
                kept.out[v] = load_eight<S, ALIGNED_ROWS, Reuse::ONCE>(p.out + t * p.out_stride, column(v), end);
            }
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
                load_batch<X, Reuse::ONCE>(x, x_row, i, k);
                load_batch<W, Reuse::KEPT>(w, p.w, i, k);
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
                for (u32 to = 0; to < (HAS_ROWS ? CLUSTER : 1); to++) store_to_cluster(&partial[part][lane], to, sum);
                cluster_arrive_release();
                if (!HAS_ROWS && rank != 0) return;
                cluster_wait_acquire();
            }
            if (!HAS_ROWS && team != 0) return;
            sum = sum_of_teams(partial, lane);
        }
        g = gate_of(sum + 0.0f, bias, addend, flags, scale);
    } else if constexpr (FORM == SIGMOID_MUL) {
        g = sigmoid(widen<W>(*(const W*)(p.w + t * p.w_stride)));
        if (flags & FRAMEWORK) g = round_to<W>(g);
    } else {
        g = 1.0f;
    }

    if constexpr (!HAS_ROWS) {
        if (lane != 0) return;
        char* out = p.out + t * p.out_stride;
        if (flags & OUT_F32) {
            *(float*)out = g;
        } else {
            *(X*)out = narrow<X>(g);
        }
        if (flags & HAS_IDX) {
            char* idx = p.idx + t * p.idx_stride;
            if (flags & IDX_I64) {
                *(i64*)idx = (i64)p.shared_expert;
            } else {
                *(i32*)idx = (i32)p.shared_expert;
            }
        }
    } else {
#pragma unroll
        for (int v = 0; v < NUM_KEPT; v++) finish_eight(p, t, g, column(v), end, kept.s[v], kept.out[FORM == GATE_MUL_ADD ? v : 0]);
        for (u64 v = NUM_KEPT; column(v) < end; v++) {
            const Eight<S> s = load_eight<S, ALIGNED_ROWS, Reuse::ONCE>(s_row, column(v), end);
            Eight<S> before = {};
            if constexpr (FORM == GATE_MUL_ADD) before = load_eight<S, ALIGNED_ROWS, Reuse::ONCE>(p.out + t * p.out_stride, column(v), end);
            finish_eight(p, t, g, column(v), end, s, before);
        }
    }
}
