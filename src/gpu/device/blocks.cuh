// Blocks of 128 elements that share one scale, as e4m3: 16 elements a lane, 8 lanes a block. Needs platform.cuh, float.cuh, fp8.cuh.

constexpr u32 SCALE_BLOCK = 128;       // spec (DESIGN 3.2): 1x128
constexpr u32 BLOCK_LANES = 8;         // derived: SCALE_BLOCK / 16
constexpr float LARGEST_E4M3 = 448.0f; // spec: OCP FP8 E4M3
constexpr float SMALLEST_AMAX = 1e-4f; // spec (DESIGN 3.2)

// 16 bytes of a lane and the scale of its block: the bits of an f32, or an E8M0 byte.
struct Quantized {
    Vec16 bytes;
    u32 scale;
};

// All lanes of the block take part; elements that are not there are 0. NaN takes no part in the maximum.
template <bool POWER_OF_TWO> DEVICE Quantized quantize(const float (&values)[16]) {
    float amax = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        const float magnitude = float_of(bits_of(values[i]) & 0x7FFFFFFF);
        amax = magnitude > amax ? magnitude : amax;
    }
    const float one = shuffle_xor<1>(amax);
    amax = one > amax ? one : amax;
    const float two = shuffle_xor<2>(amax);
    amax = two > amax ? two : amax;
    const float four = shuffle_xor<4>(amax);
    amax = four > amax ? four : amax;
    const float m = amax > SMALLEST_AMAX ? amax : SMALLEST_AMAX;
    Quantized q;
    float factor;
    if constexpr (POWER_OF_TWO) {
        // The exponent of m / 448, rounded up; infinity gives the largest.
        const u32 bits = bits_of(m / LARGEST_E4M3);
        const u32 biased = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
        q.scale = biased < 254 ? biased : 254;               // spec (E8M0): bias 127, 255 is NaN
        const u32 inverse = 254 - q.scale;                   // of 2^-e
        factor = float_of(inverse == 0 ? 1u << 22 : inverse << 23); // 2^-127 is a subnormal f32
    } else {
        q.scale = bits_of(m / LARGEST_E4M3);
        factor = LARGEST_E4M3 / m;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        q.bytes.word[i] = narrow_fp8x4<e4m3>(values[4 * i] * factor, values[4 * i + 1] * factor, values[4 * i + 2] * factor, values[4 * i + 3] * factor);
    }
    return q;
}

DEVICE float widen_e4m3(u32 byte) {
    const float value = float_of((byte & 0x7F) << 20 | (byte & 0x80) << 24) * 0x1p120f; // derived: biases 127 and 7; subnormals are exact
    return (byte & 0x7F) == 0x7F ? float_of(0x7FC00000) : value;
}

// N elements in words, as f32. One byte is e4m3.
template <class T, u32 N> DEVICE void widen_words(const u32* words, float* out) {
#pragma unroll
    for (u32 i = 0; i < N; i++) {
        if constexpr (sizeof(T) == 4) {
            out[i] = float_of(words[i]);
        } else if constexpr (sizeof(T) == 2) {
            out[i] = widen(T{(u16)(words[i / 2] >> i % 2 * 16)});
        } else {
            out[i] = widen_e4m3(words[i / 4] >> i % 4 * 8 & 0xFF);
        }
    }
}

// Elements of a vector of 16 bytes.
template <class T> struct Vector {
    static constexpr u32 SIZE = 16 / sizeof(T);
    static DEVICE void widen_all(Vec16 v, float* out) {
        widen_words<T, SIZE>(v.word, out);
    }
    // One rounding.
    static DEVICE Vec16 narrow_all(const float* values) {
        Vec16 v;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if constexpr (sizeof(T) == 4) {
                v.word[i] = bits_of(values[i]);
            } else if constexpr (sizeof(T) == 2) {
                v.word[i] = narrow_pair<T>(values[2 * i], values[2 * i + 1]);
            } else {
                v.word[i] = narrow_fp8x4<e4m3>(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
            }
        }
        return v;
    }
};
