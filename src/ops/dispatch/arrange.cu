// Computes   expert layouts, at the receiver: the slots of every arrival, its row at each of them, their records and scales; zero rows as padding (7,
//            oracle::dispatch).
// Layout     this rank's bank: x [rows, ROW_BYTES], records [rows, RECORD_BYTES], transit [arrivals, TRANSIT_BYTES], scale matrix; received [arrivals]
//            and [arrivals, K] in the routing: slots in ascending expert id then NONE, kept for combine and replay.
// Work       a warp takes a part of an arrival: PARTS parts of a row; then padding rows, a part a warp. Any grid; nobody waits.
// Shared     nothing.
// Sync       none: the payload kernel of this epoch has ended (waited for), the bank is this rank's alone.
// Requires   payload.cu with the same layout.

constexpr u32 NUM_WARPS = THREADS / WARP;
constexpr u32 ROW_VECTORS = ROW_BYTES / 16;
constexpr u32 PART_VECTORS = (ROW_VECTORS + PARTS - 1) / PARTS;
constexpr u32 TRANSIT_WORDS = 2 + 3 * K; // before the scales
constexpr u32 NUM_SCALE_BYTES = SCALES ? SCALE_BYTES : 1;
constexpr u32 SCALE_WORDS = (NUM_SCALE_BYTES + 3) / 4;
static_assert(BY_EXPERT != 0, "By token every row already has its place.");

struct ArrangeParameters {
    const BankHead* arrival;
    const Place* arriving; // [WORLD, local experts]
    const u32* expert_rows;
    const u32* segment_start;
    char* x;
    char* records;
    const char* transit;
    u32* scales; // column-major: [groups, SCALE_WORDS, scale_rows]
    u64 scale_rows;
    u32* primary;   // received
    u32* slots;
    u32* experts;
    float* weights;
    u32 segment_align;
    u32 rows_per_expert;
    Rank me;
};
static_assert(sizeof(ArrangeParameters) == 112 + sizeof(Rank), "The host fills in the same struct.");

// The words of a slot in a column-major matrix; null is all zeros. All lanes take part.
DEVICE void put_column_scales(const ArrangeParameters& p, u32 slot, const u8* bytes, u32 lane) {
    const u32 group = BY_EXPERT == 2 ? slot / p.rows_per_expert : 0;
    const u32 row = BY_EXPERT == 2 ? slot % p.rows_per_expert : slot;
    for (u32 g = lane; g < SCALE_WORDS; g += WARP) {
        u32 word = 0;
        for (u32 i = 0; i < 4 && 4 * g + i < NUM_SCALE_BYTES; i++) word |= bytes ? (u32)bytes[4 * g + i] << 8 * i : 0;
        p.scales[((u64)group * SCALE_WORDS + g) * p.scale_rows + row] = word;
    }
}

DEVICE void put_row_scales(char* record, const u8* bytes, u32 lane) {
    for (u32 i = lane; i < NUM_SCALE_BYTES; i += WARP) ((u8*)record)[16 + i] = bytes ? bytes[i] : 0; // 16: source, id and weight
}

KERNEL_UNROUNDED(THREADS) arrange(PARAMETERS(ArrangeParameters) p) {
    const Rank& me = p.me;
    const u32 lane = thread_idx() % WARP;
    const u32 stride = grid_blocks() * NUM_WARPS, first_item = (block_idx_x() * THREADS + thread_idx()) / WARP;
    wait_for_dependencies();
    const u32 num_arrivals = p.arrival->num_arrivals;
    const u32 first_expert = first_expert_of(me, me.rank), num_local = first_expert_of(me, me.rank + 1) - first_expert;
    for (u32 item = first_item; item < num_arrivals * PARTS; item += stride) {
        const u32 arrival = item / PARTS, part = item % PARTS;
        const u32* transit = (const u32*)(p.transit + (u64)arrival * TRANSIT_BYTES);
        u32 sender = 0;
        for (u32 s = lane; s < (WORLD + WARP - 1) / WARP * WARP; s += WARP) sender += num_bits(lanes_where(s < WORLD && p.arrival->arrival_start[s + 1] <= arrival));
        // Lane r has route r.
        u32 slot = NONE, id = NONE, weight = 0;
        if (lane < K) {
            id = transit[2 + lane];
            weight = transit[2 + K + lane];
            if (id != NONE) {
                const Place place = p.arriving[sender * num_local + local_of(me, id)];
                const u32 position = transit[2 + 2 * K + lane];
                if (position < place.room) slot = place.slot + position;
            }
        }
        const u64 kept = lanes_where(slot != NONE);
        u32 index = 0; // among the kept, by expert
        for (u32 r = 0; r < K; r++) {
            const u32 other = from_lane(id, r);
            if (kept >> r & 1 && other < id) index++;
        }
        const u32 primary = kept != 0 ? from_lane(slot, lowest_bit((u32)kept)) : NONE;
        if (part == 0 && !REPLAY) {
            if (lane == 0) p.primary[arrival] = primary;
            if (lane < K && lane >= num_bits(kept)) p.slots[(u64)arrival * K + lane] = NONE;
            if (slot != NONE) {
                p.slots[(u64)arrival * K + index] = slot;
                p.experts[(u64)arrival * K + index] = id;
                p.weights[(u64)arrival * K + index] = float_of(weight);
            }
        }
        if (part == 0) {
            if (slot != NONE) {
                const u32 shown = LOCAL_IDS ? local_of(me, id) : id;
                store16(p.records + (u64)slot * RECORD_BYTES, Vec16{{transit[0], transit[1], shown, weight}});
            }
            if constexpr (SCALES != 0) {
                const u8* bytes = (const u8*)(transit + TRANSIT_WORDS);
                for (u32 rest = (u32)kept; rest != 0; rest &= rest - 1) {
                    const u32 to = from_lane(slot, lowest_bit(rest));
                    if (SCALES == 1) {
                        put_row_scales(p.records + (u64)to * RECORD_BYTES, bytes, lane);
                    } else {
                        put_column_scales(p, to, bytes, lane);
                    }
                }
            }
        }
        const u32 others = (u32)kept & ((u32)kept - 1); // all but the first
        if (others == 0) continue;
        const char* from = p.x + (u64)primary * ROW_BYTES;
        const u32 begin = part * PART_VECTORS;
        const u32 end = begin + PART_VECTORS < ROW_VECTORS ? begin + PART_VECTORS : ROW_VECTORS;
        for (u32 start = begin; start < end; start += UNROLL * WARP) {
            Vec16 v[UNROLL];
#pragma unroll
            for (u32 u = 0; u < UNROLL; u++) {
                if (start + u * WARP + lane < end) v[u] = load16_once(from + 16ull * (start + u * WARP + lane));
            }
            for (u32 rest = others; rest != 0; rest &= rest - 1) {
                char* to = p.x + (u64)from_lane(slot, lowest_bit(rest)) * ROW_BYTES;
#pragma unroll
                for (u32 u = 0; u < UNROLL; u++) {
                    if (start + u * WARP + lane < end) store16(to + 16ull * (start + u * WARP + lane), v[u]);
                }
            }
        }
    }
    if (BY_EXPERT != 1 || p.arrival->is_valid == 0) return;
    // Rows between the end of a segment and the start of the next.
    const u32 most = p.segment_align - 1;
    for (u32 item = first_item; item < num_local * most; item += stride) {
        const u32 local = item / most;
        const u32 slot = p.segment_start[local] + p.expert_rows[local] + item % most;
        if (slot >= p.segment_start[local + 1]) continue;
        for (u32 at = lane; at < ROW_VECTORS; at += WARP) store16(p.x + (u64)slot * ROW_BYTES + 16ull * at, Vec16{});
        char* record = p.records + (u64)slot * RECORD_BYTES;
        if (lane == 0) store16(record, Vec16{{NONE, NONE, NONE, 0}});
        if (SCALES == 1) put_row_scales(record, nullptr, lane);
        if (SCALES == 2) put_column_scales(p, slot, nullptr, lane);
    }
}
