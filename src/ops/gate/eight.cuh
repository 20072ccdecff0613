// Eight neighbouring elements of a row: what one lane takes at a time. Needs float.cuh, and ALIGNED: every row lies at 16 bytes and its length is a
// multiple of 8. Without it elements are taken one by one.

constexpr int EIGHT = 8; // spec (order of the sum): values of e

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

// Elements i .. i + 8 of a row of k, of which `at` is element i; what the row lacks stays as it is in `eight`.
template <class T, Reuse REUSE, class I> DEVICE void load_eight(Eight<T>& eight, const char* at, I i, I k) {
    if constexpr (ALIGNED) {
#pragma unroll
        for (int v = 0; v < (int)(sizeof(T) / 2); v++) {
            if constexpr (REUSE == Reuse::CONSTANT) {
                load_constant(eight.vec[v], at + 16 * v, i < k);
            } else if constexpr (REUSE == Reuse::KEPT) {
                load(eight.vec[v], at + 16 * v, i < k);
            } else {
                load_once(eight.vec[v], at + 16 * v, i < k);
            }
        }
    } else {
#pragma unroll
        for (int e = 0; e < EIGHT; e++) {
            if (i + e < k) set_element<T>(eight, e, load_element<T>(at + e * sizeof(T)));
        }
    }
}

// Elements i .. i + 8 of a row of n, of which `at` is element i.
template <class T> DEVICE void store_eight(char* at, u32 i, u32 n, const float (&value)[EIGHT]) {
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
                store(at + 16 * v, vec);
            }
        }
    } else {
#pragma unroll
        for (int e = 0; e < EIGHT; e++) {
            if (i + e < n) store_element<T>(at + e * sizeof(T), narrow<T>(value[e]));
        }
    }
}
