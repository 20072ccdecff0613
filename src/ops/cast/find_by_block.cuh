// Which part a block casts, found by all its threads: for one scale a matrix. Needs patch and locate.

static_assert(!HAS_SCALES, "Scales of blocks take find_by_slot.");

// What 32 threads found of a group's matrices, for each such 32.
struct Found {
    alignas(16) u32 parts[NUM_GROUPS];
    alignas(16) u32 rows[NUM_GROUPS];
    alignas(16) u32 status[NUM_GROUPS];
    // Of the whole search.
    u32 has_more; // another part behind the one that was found
    u32 status_of_all;
};

// Adds a matrix of `num_rows` rows.
DEVICE void add_matrix(const Parameters& p, Sums& sums, u32 num_rows, u32 start) {
    const u32 rows = padded(p, num_rows);
    sums.parts += parts_of(p, rows, start);
    sums.rows += rows;
}

// Finds part `nth` of this block of a group; false when there is none. All threads take part; ends with a barrier.
//
// Each thread looks at one matrix (of more matrices than threads at some neighbours), and the one whose matrix has the part cuts it: what counts is the time
// until the block's first load. A group has no parts when its offsets are not what they must be: nothing is read or written outside of the buffers.
DEVICE bool locate_in_group(const Parameters& p, u32 nth, Found& shared, Part& found) {
    const u32 thread = thread_idx(), lane = thread % 32, group = thread / 32;
    const Matrix& all = p.matrices[0];
    const u32 num_strips = p.num_strips;
    const bool has_sums = p.pad_rows > 1; // without padding the offsets are the sums of rows
    const u32 num_own = p.num_matrices > NUM_THREADS ? quotient_up(p.num_matrices, NUM_THREADS) : 1, first = thread * num_own;
    Sums own = {};
    u32 own_status = 0, start = 0, num_rows = 0; // start and rows of the first
    if (first < p.num_matrices) {
        const u32 end = first + num_own < p.num_matrices ? first + num_own : p.num_matrices;
        // Two loads under way together: of most groups that is all.
        const i64 at = offset_of(p, first);
        i64 next = offset_of(p, first + 1);
        bool is_bad = (first == 0 && at != 0) || next < at || (u64)next > all.num_rows;
        start = (u32)at;
        num_rows = (u32)(next - at);
        add_matrix(p, own, num_rows, start);
#pragma unroll 1
        for (u32 i = first + 1; i < end; i++) {
            const i64 after = offset_of(p, i + 1);
            is_bad = is_bad || after < next || (u64)after > all.num_rows;
            add_matrix(p, own, (u32)(after - next), (u32)next);
            next = after;
        }
        own_status = is_bad ? BAD_OFFSETS : !has_sums && (u64)next > p.row_capacity ? SHORT_OUTPUTS : 0;
    }
    const u32 parts_of_group = sum_of_group(own.parts), status_of_group = greatest_of_group(own_status);
    if (lane == 0) {
        shared.parts[group] = parts_of_group;
        shared.status[group] = status_of_group;
    }
    if (has_sums) {
        const u32 rows = sum_of_group(own.rows);
        if (lane == 0) {
            shared.rows[group] = rows;
        }
    }
    block_barrier();
    // Of all matrices, and of those before this thread's group: by masks, since conditions would take scalar registers of AMD.
    Sums total = {}, sums = {};
    u32 status = 0;
#pragma unroll
    for (u32 g = 0; g < NUM_GROUPS; g++) {
        const u32 parts = shared.parts[g];
        status |= shared.status[g];
        total.parts += parts;
        sums.parts += parts & all_if_less(g, group);
    }
    if (has_sums) {
#pragma unroll
        for (u32 g = 0; g < NUM_GROUPS; g++) {
            total.rows += shared.rows[g];
            sums.rows += shared.rows[g] & all_if_less(g, group);
        }
        status |= total.rows > p.row_capacity ? SHORT_OUTPUTS : 0;
    }
    const Share share = share_of_block(p, total.parts * num_strips);
    const u32 part = status == 0 && nth < share.num ? share.first + nth : NO_PART;
    if (thread == 0) {
        shared.has_more = part != NO_PART && nth + 1 < share.num;
        shared.status_of_all = status & BAD_OFFSETS ? BAD_OFFSETS : status;
    }
    const u32 in_group = part - sums.parts * num_strips;
    if (part != NO_PART && part >= sums.parts * num_strips && in_group < parts_of_group * num_strips) {
        // Not many threads come here: one group of 32.
        const u32 parts_before = sum_up_to(own.parts, lane) - own.parts;
        if (has_sums) {
            sums.rows += sum_up_to(own.rows, lane) - own.rows;
        }
        u32 l = in_group - parts_before * num_strips;
        if (in_group >= parts_before * num_strips && l < own.parts * num_strips) {
            Part own_part;
            u32 i = first;
#pragma unroll 1
            for (;;) {
                own_part.height = padded(p, num_rows);
                const u32 num_down = parts_of(p, own_part.height, start), parts = num_down * num_strips;
                if (l < parts) {
                    cut(own_part, l, num_down);
                    break;
                }
                l -= parts;
                add_matrix(p, sums, num_rows, start);
                i++;
                start += num_rows;
                num_rows = (u32)offset_of(p, i + 1) - start;
            }
            own_part.matrix = i;
            own_part.start = start;
            own_part.before = has_sums ? sums.rows : start;
            own_part.num_valid = num_rows;
            found = own_part;
        }
    }
    block_barrier();
    return part != NO_PART;
}

// A part and the tensors of its matrix.
struct Target {
    Part part;
    Matrix matrix;
};

// The part that was found; of a table each thread reads it for itself: without a barrier a block begins sooner.
// A template, as `locate` is, so that what other forms do is not looked at.
template <class P> DEVICE Target target_of(const P& p, const Part& found) {
    Target target;
    if constexpr (TABLE) {
        constexpr u32 NUM_VECTORS = sizeof(Entry) / sizeof(Vec16);
        union {
            Vec16 vector[NUM_VECTORS];
            Entry entry;
        };
        const Vec16* const at = (const Vec16*)(p.parts + block_of_parts(p));
#pragma unroll
        for (u32 i = 0; i < NUM_VECTORS; i++) {
            vector[i] = at[i];
        }
        target.matrix = entry.matrix;
        target.part.matrix = entry.number;
        target.part.start = 0;
        target.part.before = 0;
        target.part.num_valid = entry.matrix.num_rows;
        target.part.height = padded(p, entry.matrix.num_rows);
        target.part.first_row = entry.first_row;
        target.part.num_rows = entry.num_rows;
        target.part.first_column = entry.first_column;
    } else {
        target.part = found;
        target.matrix = p.matrices[LIST ? found.matrix : 0];
    }
    return target;
}

// Finds part `nth` of this block; false when there is none. All threads take part; ends with a barrier. One scale a matrix and a table: `target_of` finds it.
template <class P> DEVICE bool locate(const P& p, u32 nth, Found& shared, Part& found) {
    if constexpr (TABLE) {
        return nth == 0;
    } else if constexpr (LIST) {
        if (thread_idx() == 0) {
            find_in_list(p, block_of_parts(p), found);
            shared.has_more = 0;
        }
        block_barrier();
        return nth == 0;
    } else {
        return locate_in_group(p, nth, shared, found);
    }
}
