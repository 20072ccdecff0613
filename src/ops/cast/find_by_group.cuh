// Which part a block casts, found by one group of 32 lanes while the others wait. Needs patch and locate.

// Of one block.
template <bool> struct EntryOf {};
template <> struct EntryOf<true> {
    Entry entry;
};
struct Search : EntryOf<TABLE> {
    u32 has_more; // another part behind the one that was found
    u32 status;
};

DEVICE void add_matrix_to(const Parameters& p, Sums& sums, u32 num_rows) {
    const u32 height = padded(p, num_rows), blocks = blocks_of(height);
    sums.parts += quotient_up(height, GROUP_ROWS); // with block scales parts at the end are no lower
    sums.rows += height;
    sums.blocks += blocks;
    sums.words += quotient_up(blocks, SCALES_OF_WORD);
}

// By the first group. A range of matrices that has the part is cut into 32, a lane each adds up its own, and the one that has the part is the next range. A group has no
// parts when its offsets are not what they must be: nothing is read or written outside of the buffers.
DEVICE void search_group(const Parameters& p, u32 nth, Search& shared, Part& found) {
    const u32 lane = thread_idx() % 32, num_strips = p.num_strips;
    const Matrix& all = p.matrices[0];
    Sums before = {};
    u32 first = 0, num = p.num_matrices, part = NO_PART, start = 0;
    bool is_whole = true;
#pragma unroll 1
    for (;;) {
        const u32 num_own = quotient_up(num, 32), begin = lane * num_own < num ? lane * num_own : num, end = begin + num_own < num ? begin + num_own : num;
        Sums own = {};
        bool is_bad = false;
        i64 at = offset_of(p, first + begin);
        const u32 own_start = (u32)at;
        is_bad = is_whole && lane == 0 && at != 0;
#pragma unroll 8
        for (u32 i = begin; i < end; i++) {
            const i64 next = offset_of(p, first + i + 1);
            is_bad = is_bad || next < at || (u64)next > all.num_rows;
            add_matrix_to(p, own, (u32)(next - at));
            at = next;
        }
        const u32 parts_up_to = sum_up_to(own.parts, lane);
        if (is_whole) {
            is_whole = false;
            const bool is_long = sum_of_group(own.rows) > p.row_capacity || sum_of_group(own.blocks) > p.block_capacity || sum_of_group(own.words) > p.word_capacity;
            const u32 status = greatest_of_group(is_bad) != 0 ? BAD_OFFSETS : is_long ? SHORT_OUTPUTS : 0;
            const Share share = share_of_block(p, value_of(parts_up_to, 31) * num_strips);
            const bool is_there = status == 0 && nth < share.num;
            if (lane == 0) {
                shared.has_more = is_there && nth + 1 < share.num;
                shared.status = status;
            }
            if (!is_there) {
                if (lane == 0) {
                    found.matrix = NO_PART;
                }
                return;
            }
            part = share.first + nth;
        }
        // The first lane behind whose matrices the part is not.
        const u32 behind = (before.parts + parts_up_to) * num_strips;
        const u32 chosen = sum_of_group(behind <= part ? 1 : 0);
        before.parts += value_of(parts_up_to - own.parts, chosen);
        before.rows += sum_of_group(lane < chosen ? own.rows : 0);
        before.blocks += sum_of_group(lane < chosen ? own.blocks : 0);
        before.words += sum_of_group(lane < chosen ? own.words : 0);
        start = value_of(own_start, chosen);
        first += value_of(begin, chosen);
        num = value_of(end - begin, chosen);
        if (num == 1) {
            if (lane == chosen) {
                Part own_part;
                own_part.matrix = first;
                own_part.start = start;
                own_part.before = before.rows;
                own_part.num_valid = (u32)at - start;
                own_part.height = own.rows;
                cut(own_part, part - before.parts * num_strips, parts_of(p, own_part.height, start));
                place_scales(own_part, all, own_part.height, before);
                found = own_part;
            }
            return;
        }
    }
}

// By the first group: the entry of a table in one read. A template, so that other forms are not looked at.
template <class P, class S> DEVICE void read_entry(const P& p, S& shared, Part& found) {
    const u32 lane = thread_idx();
    if (lane < sizeof(Entry) / sizeof(Vec16)) {
        ((Vec16*)&shared.entry)[lane] = ((const Vec16*)(p.parts + block_idx_x()))[lane];
    }
    warp_barrier();
    if (lane == 0) {
        part_of_entry(p, shared.entry, found);
        shared.has_more = 0;
    }
}

// The matrix of the part that was found.
template <class P, class S> DEVICE const Matrix& matrix_of(const P& p, const S& shared, const Part& found) {
    if constexpr (TABLE) {
        return shared.entry.matrix;
    } else {
        return p.matrices[LIST ? found.matrix : 0];
    }
}

// Finds part `nth` of this block; false when there is none. All threads take part; ends with a barrier.
DEVICE bool find_part(const Parameters& p, u32 nth, Search& shared, Part& found) {
    if constexpr (TABLE) {
        if (thread_idx() < 32) {
            read_entry(p, shared, found);
        }
    } else if constexpr (LIST) {
        if (thread_idx() == 0) {
            find_in_list(p, block_idx_x(), found);
            shared.has_more = 0;
        }
    } else if (thread_idx() < 32) {
        search_group(p, nth, shared, found);
    }
    block_barrier();
    return found.matrix != NO_PART;
}
