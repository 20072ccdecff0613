// cast, a scale a matrix from its own greatest magnitude, in one launch.
//
// Computes   scale from the greatest |x| of a matrix, row = round(scale * x), column = its transpose, amax raised to that magnitude, scale_inv = 1 / scale
//            (oracle::cast::cast, oracle::cast::raised)
// Layout     as tile.cu
// Work       a block has some tiles of TILE_ROWS x TILE_COLUMNS, one behind the other. It measures all, a thread a patch of 8 x 8 of each. The last SLOTS + 1 stay on
//            the chip, in shared memory and in registers; when all blocks have measured it casts those, and then the others, which it reads again, from the last
//            to the first
// Shared     patches of SLOTS tiles, later the transposed tile in their place; where the tiles are; a word for each 32 threads
// Sync       one barrier of the grid, so all blocks run at once; greatest magnitudes by atomic maximum, one for the tiles of one matrix in a block
// Requires   as tile.cu with ALIGNED; MAX_TILES tiles a block and MAX_MEASURED matrices at most; every launch fills the device, so that two of different streams
//            do not run beside each other
//
// Constants: those of tile.cu with CURRENT, and SLOTS, MAX_TILES, MAX_MEASURED.

#if PLATFORM_AMD
extern __attribute__((shared)) u64 shared_tile[];
#else
extern __shared__ __align__(16) u64 shared_tile[];
#endif

// Of the program, from one launch to the next. A launch adds TURN to the arrivals. Launches take turns with the sets: each leaves the next one zero, before its barrier.
// A launch of another stream can begin while blocks of one before it still cast, but all of those have passed their barrier; so three sets would be enough, and
// four let the turns pass 2^32.
constexpr u32 TURN = 1 << 10, NUM_SETS = 4; // at least as many as blocks: arbitrary
DEVICE_MEMORY u32 arrivals;
DEVICE_MEMORY i32 measured[NUM_SETS][MAX_MEASURED];

constexpr u32 UNITS = TILE_ROWS * OUT / 8; // of a column of the shared tile

// A tile of this block.
struct Tile {
    u32 matrix;
    u32 start;
    u32 before;
    u32 num_valid;
    u32 height;
    u32 first_row;
    u32 num_rows;
    u32 first_column;
};

// What 32 threads found of a group's matrices, for each such 32.
struct Finding {
    alignas(16) u32 tiles[NUM_GROUPS];
    alignas(16) u32 rows[NUM_GROUPS];
    alignas(16) u32 states[NUM_GROUPS];
};

// Of those before `end`.
DEVICE u32 sum_of(const u32 (&values)[NUM_GROUPS], u32 end) {
    u32 sum = 0;
#pragma unroll
    for (u32 g = 0; g < NUM_GROUPS; g++) {
        sum += values[g] & all_if_less(g, end);
    }
    return sum;
}

DEVICE u32 tiles_down(u32 height) {
    return quotient_up(height, TILE_ROWS);
}

// Tiles of this block: which of all, and how many.
struct Run {
    u32 begin;
    u32 num;
    u32 status;
};

template <class P> DEVICE Run run_of(const P& p, u32 total, u32 status) {
    const u32 least = total / p.num_blocks, larger = total % p.num_blocks, block = block_idx_x();
    return {block * least + (block < larger ? block : larger), status == 0 ? least + (block < larger) : 0, status};
}

// Finds the tiles of this block of a group. All threads take part, a matrix each (of more matrices than threads some neighbours).
template <class P> DEVICE Run find_in_group(const P& p, Finding& shared, Tile (&tiles)[MAX_TILES]) {
    const u32 thread = thread_idx(), lane = thread % 32, group = thread / 32;
    const u32 num_own = quotient_up(p.num_matrices, NUM_THREADS), first = thread * num_own;
    const u32 end = first + num_own < p.num_matrices ? first + num_own : first < p.num_matrices ? p.num_matrices : first;
    u32 own_tiles = 0, own_rows = 0;
    i64 at = first < p.num_matrices ? offset_of(p, first) : 0;
    const u32 own_start = (u32)at;
    bool is_bad = first == 0 && at != 0;
    for (u32 i = first; i < end; i++) {
        const i64 next = offset_of(p, i + 1);
        is_bad = is_bad || next < at || (u64)next > p.matrices[0].num_rows;
        const u32 height = padded(p, (u32)(next - at));
        own_tiles += quotient_up(height, TILE_ROWS) * p.num_strips;
        own_rows += height;
        at = next;
    }
    const u32 tiles_up_to = sum_up_to(own_tiles, lane), rows_up_to = sum_up_to(own_rows, lane), state = greatest_of_group(is_bad);
    if (lane == 31) {
        shared.tiles[group] = tiles_up_to;
        shared.rows[group] = rows_up_to;
        shared.states[group] = state;
    }
    block_barrier();
    const u32 status = sum_of(shared.states, NUM_GROUPS) != 0 ? BAD_OFFSETS : sum_of(shared.rows, NUM_GROUPS) > p.row_capacity ? SHORT_OUTPUTS : 0;
    const Run run = run_of(p, sum_of(shared.tiles, NUM_GROUPS), status);
    const u32 run_end = run.begin + run.num;
    u32 tile = sum_of(shared.tiles, group) + tiles_up_to - own_tiles, before = sum_of(shared.rows, group) + rows_up_to - own_rows, start = own_start;
    if (tile < run_end && tile + own_tiles > run.begin) {
        for (u32 i = first; i < end; i++) {
            const u32 num_rows = (u32)offset_of(p, i + 1) - start, height = padded(p, num_rows), down = quotient_up(height, TILE_ROWS), here = down * p.num_strips;
            if (tile < run_end && tile + here > run.begin) {
                const u32 from = tile < run.begin ? run.begin - tile : 0, to = run_end - tile < here ? run_end - tile : here;
                u32 strip = from / down, k = from % down;
                for (u32 l = from; l < to; l++) {
                    const u32 row = k * TILE_ROWS, left = height - row;
                    tiles[tile + l - run.begin] = Tile{i, start, before, num_rows, height, row, left < TILE_ROWS ? left : (u32)TILE_ROWS, strip * (u32)TILE_COLUMNS};
                    k++;
                    if (k == down) {
                        k = 0;
                        strip++;
                    }
                }
            }
            tile += here;
            before += height;
            start += num_rows;
        }
    }
    return run;
}

// The same of a list: a thread a tile.
template <class P> DEVICE Run find_tiles_of_list(const P& p, Tile (&tiles)[MAX_TILES]) {
    const Run run = run_of(p, p.num_parts, 0);
    if (thread_idx() < run.num) {
        Part part;
        find_in_list(p, run.begin + thread_idx(), part);
        tiles[thread_idx()] = Tile{part.matrix, 0, 0, part.num_valid, part.height, part.first_row, part.num_rows, part.first_column};
    }
    return run;
}

template <class P> DEVICE const Matrix& matrix_of(const P& p, u32 matrix) {
    return p.matrices[LIST ? matrix : 0];
}

DEVICE void load_tile(Patch& patch, const Matrix& m, const Tile& tile) {
    const u32 thread = thread_idx(), across = thread % ACROSS, down = thread / ACROSS;
    // Where there is nothing, something that is there: it is not stored.
    const u32 column = tile.first_column + across * PATCH, last = m.num_columns - PATCH;
    const u8* const x = m.x + (u64)tile.start * (u32)m.x_stride + (column < last ? column : last) * IN;
    load_patch_of(patch, x, (u32)m.x_stride, tile.first_row + down * PATCH, tile.num_valid);
}

DEVICE u32 greatest_of(const Patch& patch, u32 greatest) {
#pragma unroll
    for (u32 r = 0; r < PATCH; r++) {
#pragma unroll
        for (u32 w = 0; w < IN_WORDS; w++) {
            greatest = greater<FROM>(greatest, patch.word[r][w]);
        }
    }
    return greatest;
}

// A thread's own: vectors of all threads beside each other.
DEVICE void keep(u64* slot, const Patch& patch) {
    Vec16* const to = (Vec16*)slot + thread_idx();
#pragma unroll
    for (u32 r = 0; r < PATCH; r++) {
        to[r * NUM_THREADS] = Vec16{patch.word[r][0], patch.word[r][1], patch.word[r][2], patch.word[r][3]};
    }
}
DEVICE void take(Patch& patch, const u64* slot) {
    const Vec16* const from = (const Vec16*)slot + thread_idx();
#pragma unroll
    for (u32 r = 0; r < PATCH; r++) {
        const Vec16 v = from[r * NUM_THREADS];
#pragma unroll
        for (u32 w = 0; w < 4; w++) {
            patch.word[r][w] = v.word[w];
        }
    }
}

template <class P> DEVICE void cast_tile_of(const P& p, const Patch& patch, const Matrix& m, const Tile& tile, float scale) {
    const u32 thread = thread_idx(), across = thread % ACROSS, down = thread / ACROSS;
    const u32 column = tile.first_column + across * PATCH, first = tile.first_row + down * PATCH, end = tile.first_row + tile.num_rows;
    u8* to = m.row + (u64)(tile.before + first) * (u32)m.row_stride + column * OUT;
    u32 narrowed[PATCH][OUT_WORDS];
#pragma unroll
    for (u32 r = 0; r < PATCH; r++) {
        narrow_row(patch.word[r], [&](u32) { return scale; }, narrowed[r]);
        // Padding is zero whatever the scale is.
        const u32 valid = all_if_less(first + r, tile.num_valid);
#pragma unroll
        for (u32 w = 0; w < OUT_WORDS; w++) {
            narrowed[r][w] &= valid;
        }
        if (ROW && first + r < end && column < m.num_columns) {
            store_pieces(to, narrowed[r], PATCH * OUT, 16);
        }
        to += (u32)m.row_stride;
    }
    if (COLUMN) {
        put_patch(shared_tile, narrowed, across * PATCH, down, UNITS);
        const u32 length = tile.num_rows * OUT, left = m.num_columns - tile.first_column;
        const u64 stride = LIST ? m.column_stride : (u64)tile.height * OUT;
        u8* const columns = m.column + (u64)tile.before * (m.num_columns * OUT) + tile.first_column * stride + tile.first_row * OUT;
        const Walk walk = walk_of(columns, length);
        block_barrier();
        store_columns(columns, stride, shared_tile, length, left < TILE_COLUMNS ? left : TILE_COLUMNS, UNITS, walk);
        block_barrier();
    }
}

// Of each matrix, when all have measured.
template <class P> DEVICE void finish_matrices(const P& p, const i32* of_matrices) {
    for (u32 i = thread_idx(); i < p.num_matrices; i += NUM_THREADS) {
        const Matrix& m = matrix_of(p, i);
        const u32 at = LIST ? 0 : i;
        const i32 bits = (i32)load_changing((const u32*)of_matrices + i);
        const bool is_empty = m.num_columns == 0 || (LIST ? m.num_rows == 0 : offset_of(p, i + 1) <= offset_of(p, i));
        if (m.amax != nullptr) {
            const i32 old = p.flags & RESET_AMAX ? 0 : m.amax[at];
            m.amax[at] = !is_empty && bits > old ? bits : old;
        }
        const float greatest = float_of((u32)bits);
        m.scale_inv[at] = 1.0f / scale_of(p, &greatest, 0);
    }
}

KERNEL_FITTING(NUM_THREADS, BLOCKS) cast_resident(PARAMETERS(Parameters) p) {
    SHARED Finding finding;
    SHARED Tile tiles[MAX_TILES];
    SHARED u32 scratch[NUM_GROUPS];
    SHARED u32 shared_turn;
    wait_for_dependencies();
    if (is_noop(p)) {
        return;
    }
    constexpr u32 SLOT = NUM_THREADS * PATCH * PATCH * IN / 8;
    static_assert(SLOTS * SLOT * 8 >= TILE_ROWS * TILE_COLUMNS * OUT, "The transposed tile takes the place of patches.");
    if (thread_idx() == 0) {
        // Until this block has arrived the turn is not over.
        shared_turn = load_changing(&arrivals) / TURN;
    }
    Run run;
    if constexpr (LIST) {
        run = find_tiles_of_list(p, tiles);
    } else {
        run = find_in_group(p, finding, tiles);
    }
    block_barrier();
    const u32 turn = shared_turn, num = run.num;
    i32* const own_set = measured[turn % NUM_SETS];
    for (u32 i = block_idx_x() * NUM_THREADS + thread_idx(); i < MAX_MEASURED; i += p.num_blocks * NUM_THREADS) {
        measured[(turn + 1) % NUM_SETS][i] = 0;
    }
    // The last tile stands in registers, those before it in shared memory.
    const u32 num_kept = num > SLOTS ? SLOTS : num > 0 ? num - 1 : 0, num_streamed = num > 0 ? num - num_kept - 1 : 0;
    Patch patch, next;
    if (num > 0) {
        u32 greatest = 0;
        load_tile(next, matrix_of(p, tiles[0].matrix), tiles[0]);
#pragma unroll 1
        for (u32 t = 0; t < num; t++) {
            patch = next;
            if (t + 1 < num) {
                load_tile(next, matrix_of(p, tiles[t + 1].matrix), tiles[t + 1]);
            }
            greatest = greatest_of(patch, greatest);
            if (t >= num_streamed && t + 1 < num) {
                keep(shared_tile + (t - num_streamed) * SLOT, patch);
            }
            if (t + 1 == num || tiles[t + 1].matrix != tiles[t].matrix) {
                const u32 bits = greatest_of_block(greatest_bits<FROM>(greatest), scratch);
                if (thread_idx() == 0) {
                    raise(own_set + tiles[t].matrix, (i32)bits);
                }
                block_barrier();
                greatest = 0;
            }
        }
    }
    block_barrier();
    if (thread_idx() == 0) {
        arrive(&arrivals, block_idx_x() == 0 ? TURN + 1 - p.num_blocks : 1);
        wait_for_arrivals(&arrivals, (turn + 1) * TURN);
    }
    block_barrier();
    // By a block that has no more tiles than others.
    if (block_idx_x() == p.num_blocks - 1) {
        finish_matrices(p, own_set);
        if (!LIST && thread_idx() == 0 && p.status != nullptr) {
            *p.status = run.status;
        }
    }
    const auto tile_of = [&](u32 step) -> const Tile& { return tiles[step > 0 && step <= num_kept ? num_streamed + step - 1 : num - 1 - step]; };
    const auto fetch = [&](u32 step) {
        if (step <= num_kept) {
            take(next, shared_tile + (step - 1) * SLOT);
        } else {
            load_tile(next, matrix_of(p, tile_of(step).matrix), tile_of(step));
        }
    };
    if (num > 1) {
        fetch(1);
    }
    // The transposed tile takes the place of the patches that were fetched.
    block_barrier();
    float scale = 1.0f;
    u32 of_scale = NO_PART;
#pragma unroll 1
    for (u32 step = 0; step < num; step++) {
        const Tile& tile = tile_of(step);
        if (tile.matrix != of_scale) {
            of_scale = tile.matrix;
            const float greatest = float_of(load_changing((const u32*)own_set + of_scale));
            scale = scale_of(p, &greatest, 0);
        }
        cast_tile_of(p, patch, matrix_of(p, tile.matrix), tile, scale);
        patch = next;
        if (step + 2 < num) {
            fetch(step + 2);
        }
    }
}
