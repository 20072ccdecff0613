// Computes   to[i] = from[i] for i in 0 .. num_vectors: the plainest fast copy, to know what the memory can do.
// Layout     from, to: num_vectors vectors of 16 bytes each, at 16-byte boundaries, without overlap; each read or written once.
// Work       A block copies THREADS * VECTORS neighbouring vectors, the last block what is left. A thread has VECTORS loads in flight before its first
//            store; neighbouring threads take neighbouring vectors. No block takes a second piece: grids that loop were slower.
// Shared     None.
// Sync       None; starts after the kernels that it depends on have ended.
// Requires   A grid of ceil(num_vectors / (THREADS * VECTORS)) blocks of THREADS threads.

constexpr u32 PIECE = THREADS * VECTORS;

struct Parameters {
    const Vec16* from;
    Vec16* to;
    u64 num_vectors;
};
static_assert(sizeof(Parameters) == 24, "The host's struct has three words of 64 bits.");

DEVICE Vec16 read(const Vec16* at) {
    return STREAMING ? load_streaming(at) : *at;
}

DEVICE void write(Vec16* at, Vec16 v) {
    if (STREAMING) {
        store_streaming(at, v);
    } else {
        *at = v;
    }
}

KERNEL(THREADS) measure_copy(PARAMETERS(Parameters) p) {
    wait_for_dependencies();
    const u64 piece = (u64)block_idx_x() * PIECE;
    const u64 first = piece + thread_idx();
    if (piece + PIECE <= p.num_vectors) {
        Vec16 vector[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++) vector[i] = read(p.from + first + i * THREADS);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) write(p.to + first + i * THREADS, vector[i]);
    } else {
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if (first + i * THREADS < p.num_vectors) write(p.to + first + i * THREADS, read(p.from + first + i * THREADS));
    }
}
