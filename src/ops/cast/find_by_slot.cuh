// Which tile a block casts, where blocks of a matrix have scales of their own. Needs patch and locate.
//
// Each block of a group has a slot and a strip of columns. A matrix that begins at row s of all and is number i has the slots from s / TILE_ROWS + i on, of which its tiles
// from top to bottom take the first; one may be left, since the quotient of a sum is at least the sum of the quotients. So whose a slot is depends on two
// offsets alone: a thread looks at a matrix, and the one whose matrix has the slot says so. The sums over the matrices before, by which copies and scales are placed, and
// whether all offsets are good, wait until the tile's loads are under way (measured: H200, matrices of 96 to 160 rows, 0.816 of the copy against 0.796).

static_assert(GROUP_ROWS == TILE_ROWS && STACK == 1, "A part is a tile.");

template <bool> struct EntryOf {};
template <> struct EntryOf<true> {
    Entry entry;
};
// Of one block; the sums of a group's matrices.
struct Search : EntryOf<TABLE> {
    u32 blocks;
    u32 words;
    u32 rows;
    u32 num_there[NUM_GROUPS];
    u32 num_bad[NUM_GROUPS];
};

// What a thread has seen of a group's matrices: of all, and of those before the slot.
struct Seen {
    bool is_bad;
    u32 blocks;
    u32 blocks_before;
    u32 words;
    u32 words_before;
    u32 rows;
    u32 rows_before;
};

// For how many threads `value` is true; a barrier. `scratch` holds a word for each group of lanes.
DEVICE u32 count_in_block(bool value, u32* scratch) {
#if PLATFORM_AMD
    const u32 of_group = sum_of_group(value);
    if (thread_idx() % 32 == 0) {
        scratch[thread_idx() / 32] = of_group;
    }
    block_barrier();
    u32 count = 0;
#pragma unroll
    for (u32 g = 0; g < NUM_GROUPS; g++) {
        count += scratch[g];
    }
    return count;
#else
    return (u32)__syncthreads_count(value);
#endif
}

// Looks at matrix i of a group, which has the rows from `start` on and ends before `end`; whether the slot is one of its tiles.
DEVICE bool look_at(const Parameters& p, u32 i, i64 start, i64 end, u32 slot, Search& shared, Seen& seen, Part& found) {
    const u32 first = (u32)start, num_rows = (u32)end - first, height = padded(p, num_rows);
    const u32 first_slot = first / TILE_ROWS + i, first_row = (slot - first_slot) * TILE_ROWS;
    const bool is_before = (u32)end / TILE_ROWS + i + 1 <= slot, is_last = i + 1 == p.num_matrices;
    seen.is_bad = seen.is_bad || end < start || (i == 0 && start != 0) || (is_last && (u64)end > p.matrices[0].num_rows);
    const u32 blocks = blocks_of(height);
    seen.blocks += blocks;
    seen.blocks_before += is_before ? blocks : 0;
    if constexpr (STORED == PACKED) {
        const u32 words = quotient_up(blocks, SCALES_OF_WORD);
        seen.words += words;
        seen.words_before += is_before ? words : 0;
    }
    // Without padding the offsets are the sums of rows.
    if (p.pad_rows > 1) {
        seen.rows += height;
        seen.rows_before += is_before ? height : 0;
    } else if (is_last) {
        shared.rows = (u32)end;
    }
    // Nothing outside of x is read, whatever offsets are bad.
    if (is_before || first_slot > slot || first_row >= height || end < start || start < 0 || (u64)end > p.matrices[0].num_rows) {
        return false;
    }
    found.matrix = i;
    found.start = first;
    found.num_valid = num_rows;
    found.height = height;
    found.first_row = first_row;
    found.num_rows = height - first_row < TILE_ROWS ? height - first_row : TILE_ROWS;
    if (p.pad_rows == 1) {
        found.before = first;
    }
    return true;
}

// By all threads; ends with a barrier.
DEVICE bool look_for_slot(const Parameters& p, Search& shared, Part& found, Seen& seen) {
    const u32 slot = block_idx_x() / p.num_strips;
    seen = {};
    bool is_there = false;
    // Seldom more than once (derived: 256 threads).
#pragma unroll 1
    for (u32 i = thread_idx(); i < p.num_matrices; i += NUM_THREADS) {
        is_there = look_at(p, i, offset_of(p, i), offset_of(p, i + 1), slot, shared, seen, found) || is_there;
    }
    if (thread_idx() == 0) {
        found.first_column = (block_idx_x() - slot * p.num_strips) * TILE_COLUMNS;
        found.blocks_before = 0;
        found.words_before = 0;
        if (p.pad_rows > 1) {
            found.before = 0;
            shared.rows = 0;
        }
        shared.blocks = 0;
        shared.words = 0;
    }
    // Of bad offsets there may be two.
    return count_in_block(is_there, shared.num_there) == 1;
}

// Adds up what all threads have seen: the group's status, by which it is cast or not. All threads take part; ends with a barrier.
DEVICE u32 status_of_group(const Parameters& p, Search& shared, Part& found, const Seen& seen) {
    const u32 lane = thread_idx() % 32;
    const auto add = [&](u32& before, u32& all, u32 own_before, u32 own) {
        const u32 of_before = sum_of_group(own_before), of_all = sum_of_group(own);
        if (lane == 0) {
            add_shared(&before, of_before);
            add_shared(&all, of_all);
        }
    };
    add(found.blocks_before, shared.blocks, seen.blocks_before, seen.blocks);
    if constexpr (STORED == PACKED) {
        add(found.words_before, shared.words, seen.words_before, seen.words);
    }
    if (p.pad_rows > 1) {
        add(found.before, shared.rows, seen.rows_before, seen.rows);
    }
    const u32 num_bad = count_in_block(seen.is_bad, shared.num_bad);
    const bool is_short = shared.blocks > p.block_capacity || shared.words > p.word_capacity || shared.rows > p.row_capacity;
    const u32 status = num_bad > 0 ? BAD_OFFSETS : is_short ? SHORT_OUTPUTS : 0;
    if (block_idx_x() == 0 && thread_idx() == 0 && p.status != nullptr) {
        *p.status = status;
    }
    return status;
}

// A list's part by the first thread, a table's entry by a few in one read; ends with a barrier. Templates, so that other forms are not looked at.
template <class P, class S> DEVICE void find_listed(const P& p, S& shared, Part& found) {
    if constexpr (TABLE) {
        const u32 thread = thread_idx();
        if (thread < sizeof(Entry) / sizeof(Vec16)) {
            ((Vec16*)&shared.entry)[thread] = ((const Vec16*)(p.parts + block_idx_x()))[thread];
        }
    } else if (thread_idx() == 0) {
        find_in_list(p, block_idx_x(), found);
    }
    block_barrier();
}

// The part of the entry that was read.
template <class P, class S> DEVICE void read_part(const P& p, const S& shared, Part& part) {
    if constexpr (TABLE) {
        part_of_entry(p, shared.entry, part);
    }
}

// The matrix of a part.
template <class P, class S> DEVICE const Matrix& matrix_of(const P& p, const S& shared, const Part& part) {
    if constexpr (TABLE) {
        return shared.entry.matrix;
    } else {
        return p.matrices[LIST ? part.matrix : 0];
    }
}
