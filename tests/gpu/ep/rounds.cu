// Rounds of dispatch and combine whose input, expected rows and expected sums are functions of (rank, round), computed on the device: nothing is copied,
// so rounds can be queued one after the other, and recorded into graphs. They use no source of the library, so they know nothing of how it is done.
//
// Constants: WORLD, NUM_EXPERTS, K, HIDDEN, ALIGN (rows to whose multiple a segment is padded; 0: by token), MAX_TOKENS, FULL (every rank has all of its
// tokens in every round), IS_F32 (else bf16).

typedef unsigned u32;
typedef unsigned long long u64;

constexpr u32 NONE = 0xFFFFFFFF;

static __device__ u32 mix(u32 a) {
    a ^= a >> 16;
    a *= 0x7FEB352Du;
    a ^= a >> 15;
    a *= 0x846CA68Bu;
    return a ^ a >> 16;
}

static __device__ u32 hash(u32 a, u32 b, u32 c, u32 d) { return mix(mix(mix(mix(a * 0x9E3779B9u + 1) + b) + c) + d); }

// In some rounds a rank has no tokens, in some one, in some all that it can have.
static __device__ u32 num_tokens(u32 rank, u32 round) {
    const u32 bits = hash(1, rank, round, 0);
    if (FULL) return MAX_TOKENS;
    switch (bits & 7) {
        case 0: return 0;
        case 1: return 1;
        case 2: return MAX_TOKENS;
        default: return (bits >> 3) % (u32)(MAX_TOKENS + 1);
    }
}

// The expert of a route, -1 where it is masked. In some rounds all of a rank's routes lead to one expert.
static __device__ int expert(u32 rank, u32 round, u32 token, u32 route) {
    if (!FULL && (hash(2, rank, round, 0) & 7) == 0) return 5 % NUM_EXPERTS;
    return (int)(hash(3, rank, round, token * K + route) % (u32)(NUM_EXPERTS + 1)) - 1;
}

static __device__ u32 owner(int e) { return (u32)((u64)e * WORLD / NUM_EXPERTS); }

// Small enough that every sum of at most 36 times a value is exact.
static __device__ u32 value(u32 rank, u32 round, u32 token, u32 h) {
    const u32 bits = (hash(4, rank, round, token) + h * 0x9E3779B9u) >> 7;
    return IS_F32 ? bits & 0xFFFF : bits & 7;
}

struct Bits16 {
    unsigned short bits;
};

template <bool F32> struct Element { typedef float type; };
template <> struct Element<false> { typedef Bits16 type; };
typedef Element<IS_F32>::type Value;

static __device__ float widen(float v) { return v; }
static __device__ float widen(Bits16 v) { return __uint_as_float((u32)v.bits << 16); }
static __device__ void narrow(float v, float& to) { to = v; }
// Exact: the lower half of these numbers is 0.
static __device__ void narrow(float v, Bits16& to) { to.bits = (unsigned short)(__float_as_uint(v) >> 16); }

struct Report {
    u32 num_wrong;
    u32 what; // 1 number of rows, 2 source, 3 payload, 4 sum, 5 a row that is not there
    u32 round;
    u32 place;
    u32 element;
    u32 got;
    u32 want;
};

static __device__ void wrong(Report* report, u32 what, u32 round, u32 place, u32 element, u32 got, u32 want) {
    if (atomicAdd(&report->num_wrong, 1) != 0) return;
    report->what = what;
    report->round = round;
    report->place = place;
    report->element = element;
    report->got = got;
    report->want = want;
}

struct Fill {
    Value* x;
    int* ids;
    u32* count;
    const u32* round;
    u32 rank;
};

// A rank's input of the round.
extern "C" __global__ void fill(const __grid_constant__ Fill p) {
    const u32 round = *p.round, tokens = num_tokens(p.rank, round);
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    if (thread == 0) *p.count = tokens;
    for (u32 i = thread; i < tokens * K; i += stride) p.ids[i] = expert(p.rank, round, i / K, i % K);
    for (u64 i = thread; i < (u64)tokens * HIDDEN; i += stride) narrow((float)value(p.rank, round, (u32)(i / HIDDEN), (u32)(i % HIDDEN)), p.x[i]);
}

struct Expect {
    u64* slots; // source rank << 32 | token, all ones in padding
    u32* end;
    const u32* round;
    u32 rank;
    u32 max_slots;
};

// What a rank must receive, in its order. One block.
extern "C" __global__ void expect(const __grid_constant__ Expect p) {
    __shared__ u32 of_warp[32];
    const u32 round = *p.round, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 next = 0;
    const u32 first = ALIGN ? (u32)(((u64)p.rank * NUM_EXPERTS + WORLD - 1) / WORLD) : 0;
    const u32 groups = ALIGN ? (u32)(((u64)(p.rank + 1) * NUM_EXPERTS + WORLD - 1) / WORLD) - first : 1;
    for (u32 g = 0; g < groups; g++) {
        for (u32 source = 0; source < WORLD; source++) {
            const u32 tokens = num_tokens(source, round);
            for (u32 base = 0; base < tokens; base += blockDim.x) {
                const u32 token = base + thread;
                bool comes = false;
                for (u32 r = 0; token < tokens && r < K; r++) {
                    const int e = expert(source, round, token, r);
                    comes |= e >= 0 && (ALIGN ? (u32)e == first + g : owner(e) == p.rank);
                }
                const u32 those = __ballot_sync(0xFFFFFFFF, comes);
                if (lane == 0) of_warp[warp] = __popc(those);
                __syncthreads();
                u32 at = next + __popc(those & ((1u << lane) - 1)), total = 0;
                for (u32 w = 0; w < blockDim.x / 32; w++) {
                    if (w < warp) at += of_warp[w];
                    total += of_warp[w];
                }
                if (comes && at < p.max_slots) p.slots[at] = (u64)source << 32 | token;
                next += total;
                __syncthreads();
            }
        }
        if (ALIGN) {
            const u32 padded = (next + ALIGN - 1) / (ALIGN ? ALIGN : 1) * ALIGN;
            for (u32 at = next + thread; at < padded && at < p.max_slots; at += blockDim.x) p.slots[at] = ~0ull;
            next = padded;
        }
    }
    if (thread == 0) *p.end = next;
}

struct Rows {
    const u64* slots;
    const u32* end;
    const u32* num_rows;
    const Value* x;
    const int* source;
    u64 source_stride; // words
    const u32* round;
    Report* report;
    u32 max_slots;
};

// Received rows against those expected.
extern "C" __global__ void check_rows(const __grid_constant__ Rows p) {
    const u32 round = *p.round, lane = threadIdx.x % 32;
    const u32 end = *p.end < p.max_slots ? *p.end : p.max_slots;
    if (blockIdx.x == 0 && threadIdx.x == 0 && *p.num_rows != *p.end) wrong(p.report, 1, round, 0, 0, *p.num_rows, *p.end);
    const u32 warps = gridDim.x * blockDim.x / 32;
    for (u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32; row < end; row += warps) {
        const u64 slot = p.slots[row];
        const bool is_padding = slot == ~0ull;
        const u32 rank = (u32)(slot >> 32), token = (u32)slot;
        if (lane < 2) {
            const int got = p.source[row * p.source_stride + lane], want = (int)(lane == 0 ? rank : token);
            if (got != want) wrong(p.report, 2, round, row, lane, (u32)got, (u32)want);
        }
        for (u32 h = lane; h < HIDDEN; h += 32) {
            const float got = widen(p.x[(u64)row * HIDDEN + h]), want = is_padding ? 0.0f : (float)value(rank, round, token, h);
            if (got != want) wrong(p.report, 3, round, row, h, __float_as_uint(got), __float_as_uint(want));
        }
    }
}

struct Experts {
    const Value* x;
    Value* y;
    const u32* num_rows;
    u32 factor;
};

// The experts of a rank multiply.
extern "C" __global__ void experts(const __grid_constant__ Experts p) {
    const u64 num = (u64)*p.num_rows * HIDDEN;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < num; i += gridDim.x * blockDim.x) narrow(widen(p.x[i]) * (float)p.factor, p.y[i]);
}

struct Sums {
    const Value* out;
    const u32* round;
    Report* report;
    u32 rank;
    u32 rows; // of out, poisoned behind the last token
};

// Each distinct rank of a token (by expert: each distinct expert) has brought value * (rank + 1).
extern "C" __global__ void check_sums(const __grid_constant__ Sums p) {
    const u32 round = *p.round, lane = threadIdx.x % 32, tokens = num_tokens(p.rank, round);
    const u32 warps = gridDim.x * blockDim.x / 32;
    for (u32 token = (blockIdx.x * blockDim.x + threadIdx.x) / 32; token < p.rows; token += warps) {
        u32 factor = 0;
        const int mine = lane < K && token < tokens ? expert(p.rank, round, token, lane) : -1;
        const u32 key = mine < 0 ? NONE : ALIGN ? (u32)mine : owner(mine);
        for (u32 r = 0; r < K; r++) {
            const u32 other = __shfl_sync(0xFFFFFFFF, key, r);
            bool is_first = other != NONE;
            for (u32 before = 0; before < r; before++) is_first &= __shfl_sync(0xFFFFFFFF, key, before) != other;
            if (is_first) factor += (ALIGN ? owner((int)other) : other) + 1;
        }
        for (u32 h = lane; h < HIDDEN; h += 32) {
            const Value at = p.out[(u64)token * HIDDEN + h];
            const u32 got = __float_as_uint(widen(at));
            if (token < tokens) {
                const u32 want = __float_as_uint((float)(value(p.rank, round, token, h) * factor));
                if (got != want) wrong(p.report, 4, round, token, h, got, want);
            } else if (got != (IS_F32 ? 0xFFFFFFFF : 0xFFFF0000)) {
                wrong(p.report, 5, round, token, h, got, 0xFFFFFFFF);
            }
        }
    }
}

// The next round.
extern "C" __global__ void advance(const __grid_constant__ Experts p) {
    if (threadIdx.x == 0 && blockIdx.x == 0) *(u32*)p.num_rows += p.factor;
}
