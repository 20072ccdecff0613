// Computes   to[i] = from[i] for i in 0 .. num_vectors, of each piece: the plainest fast copy between GPUs, to know what their links can do.
// Layout     a piece: num_vectors vectors of 16 bytes from here to another GPU's memory, or from there to here, at 16-byte boundaries, without overlap.
// Work       blocks take turns on the pieces, so that all links are busy from the first block on; the blocks of a piece take neighbouring vectors, then
//            those a whole step of all of them further. A thread has VECTORS loads in flight before its first store.
// Shared     None.
// Sync       None; starts after the kernels that it depends on have ended. The end of the kernel completes its stores on the other GPU.
// Requires   blocks_of_piece * num_pieces blocks of THREADS threads; 1 to MAX_PIECES pieces.

struct Piece {
    const Vec16* from;
    Vec16* to;
    u64 num_vectors;
};

struct Parameters {
    Piece pieces[MAX_PIECES];
    u32 num_pieces;
    u32 blocks_of_piece;
};
static_assert(sizeof(Parameters) == 24 * MAX_PIECES + 8, "The host's struct has three words of 64 bits a piece and two of 32.");

KERNEL(THREADS) measure_link_copy(PARAMETERS(Parameters) p) {
    wait_for_dependencies();
    const u32 which = block_idx_x() % p.num_pieces;
    const Vec16* const from = p.pieces[which].from;
    Vec16* const to = p.pieces[which].to;
    const u64 num_vectors = p.pieces[which].num_vectors;
    const u64 step = (u64)p.blocks_of_piece * THREADS;
    for (u64 first = (u64)(block_idx_x() / p.num_pieces) * THREADS + thread_idx(); first < num_vectors; first += step * VECTORS) {
        Vec16 vector[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if (first + i * step < num_vectors) vector[i] = load_streaming(from + first + i * step);
#pragma unroll
        for (int i = 0; i < VECTORS; i++)
            if (first + i * step < num_vectors) store_streaming(to + first + i * step, vector[i]);
    }
}
