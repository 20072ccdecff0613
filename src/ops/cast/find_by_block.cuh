// Which part a block casts, found by all its threads: for one scale a matrix. Needs patch and locate.

static_assert(!HAS_SCALES, "Scales of blocks take find_by_slot.");

// What 32 threads found of a group's matrices, for each such 32.
struct Found {
    alignas(16) u32 parts[NUM_GROUPS]; // and in the highest bits what is wrong
    alignas(16) u32 rows[NUM_GROUPS];
    // Of the whole search.
    u32 has_more; // another part behind the one that was found
    u32 status_of_all;
};

// Above any number of parts.
constexpr u32 STATUS_SHIFT = 30;
static_assert(BAD_OFFSETS == 1 && SHORT_OUTPUTS == 2, "Two bits.");

// Offset `i` of a group in 32 bits, which hold all that are good, by one code for both types.
DEVICE u32 low_offset(const Parameters& p, u32 i) {
    static_assert(OFFSETS_ARE_64_BITS == 2, "Bit 1: from 4 bytes to 8.");
    return *(const u32*)((const u8*)p.offsets + ((u64)i << (2 + (p.flags >> 1 & 1))));
}
// What of it the low half does not say: 0 of a good one.
DEVICE u32 high_offset(const Parameters& p, u32 i) {
    return p.flags & OFFSETS_ARE_64_BITS ? ((const u32*)p.offsets)[2 * i + 1] : 0;
}

// Finds part `nth` of this block of a group; false when there is none. All threads take part; ends with a barrier.
//
// Each thread looks at one matrix (of more matrices than threads at some neighbours), and the one whose matrix has the part cuts it. What counts is the time until the
// block's first load: all that a thread needs to know its matrix's first part is summed before the first barrier. A group has no parts when its offsets are not
// what they must be: nothing is read or written outside of the buffers.
DEVICE bool locate_in_group(const Parameters& p, u32 nth, Found& shared, Part& found) {
    const u32 thread = thread_idx(), lane = thread % 32, group = thread / 32;
    const bool has_sums = p.pad_rows > 1; // without padding the offsets are the sums of rows
    const u32 num_matrices = p.num_matrices, limit = p.matrices[0].num_rows;
    const u32 num_own = num_matrices > NUM_THREADS ? quotient_up(num_matrices, NUM_THREADS) : 1;
    // Behind the last matrix there are others without rows.
    const u32 first = thread * num_own < num_matrices ? thread * num_own : num_matrices;
    u32 behind = first < num_matrices ? first + 1 : first;
    // Loads under way together: of most groups that is all.
    const u32 start = low_offset(p, first), high = high_offset(p, behind), high_of_all = high_offset(p, 0);
    u32 next = low_offset(p, behind);
    bool is_bad = (high | high_of_all) != 0 || next > limit || next < start || (thread == 0 && start != 0);
    const u32 num_rows = next - start, height = padded(p, num_rows);
    u32 parts = parts_of(p, height, start), rows = height;
#pragma unroll 1
    while (behind < first + num_own && behind < num_matrices) {
        behind++;
        const u32 after = low_offset(p, behind), height = padded(p, after - next);
        is_bad = is_bad || high_offset(p, behind) != 0 || after > limit || after < next;
        parts += parts_of(p, height, next);
        rows += height;
        next = after;
    }
    const bool is_short = !has_sums && next > p.row_capacity;
    const u32 status_of_group = greatest_of_group(is_bad ? (u32)BAD_OFFSETS : is_short ? (u32)SHORT_OUTPUTS : 0);
    const u32 parts_up_to = sum_up_to(parts, lane);
    u32 rows_up_to = 0;
    if (has_sums) {
        rows_up_to = sum_up_to(rows, lane);
    }
    if (lane == 31) {
        shared.parts[group] = status_of_group != 0 ? status_of_group << STATUS_SHIFT : parts_up_to;
        shared.rows[group] = rows_up_to;
    }
    block_barrier();
    // Of all matrices, and of those before this thread's group: by masks, since conditions would take scalar registers of AMD.
    u32 total = 0, before = parts_up_to - parts, all = 0;
#pragma unroll
    for (u32 g = 0; g < NUM_GROUPS; g++) {
        const u32 word = shared.parts[g];
        all |= word;
        total += word;
        before += word & all_if_less(g, group);
    }
    u32 status = all >> STATUS_SHIFT;
    u32 rows_before = start;
    if (has_sums) {
        u32 total_rows = 0;
        rows_before = rows_up_to - rows;
#pragma unroll
        for (u32 g = 0; g < NUM_GROUPS; g++) {
            total_rows += shared.rows[g];
            rows_before += shared.rows[g] & all_if_less(g, group);
        }
        status |= total_rows > p.row_capacity ? SHORT_OUTPUTS : 0;
    }
    const Share share = share_of_block(p, total);
    const u32 part = status == 0 && nth < share.num ? share.first + nth : NO_PART;
    if (thread == 0) {
        shared.has_more = part != NO_PART && nth + 1 < share.num;
        shared.status_of_all = status & BAD_OFFSETS ? BAD_OFFSETS : status;
    }
    u32 l = part - before;
    if (part != NO_PART && part >= before && l < parts) {
        Part own_part;
        own_part.matrix = first;
        own_part.start = start;
        own_part.num_valid = num_rows;
        own_part.before = rows_before;
        own_part.height = height;
        u32 num = parts_of(p, height, start);
#pragma unroll 1
        while (l >= num) {
            l -= num;
            own_part.matrix++;
            own_part.start += own_part.num_valid;
            own_part.before += own_part.height;
            own_part.num_valid = low_offset(p, own_part.matrix + 1) - own_part.start;
            own_part.height = padded(p, own_part.num_valid);
            num = parts_of(p, own_part.height, own_part.start);
        }
        const bool is_tail = is_in_tail(p, own_part.start);
        cut(own_part, l, down_of(own_part.height, is_tail), stack_of(own_part.height, is_tail));
        found = own_part;
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
        part_of_entry(p, entry, target.part);
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
