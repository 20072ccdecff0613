// Numbers: f16 and bf16 to f32 and back, exp and sigmoid, with the bits of `oracle::float` and `oracle::exp`. Needs platform.cuh.

template <class T> DEVICE float widen(T value);
// To nearest even; NaN stays NaN, f16 and bf16 overflow to infinity.
template <class T> DEVICE T narrow(float value);

template <> DEVICE float widen<f32>(f32 value) {
    return value;
}

template <> DEVICE f32 narrow<f32>(float value) {
    return value;
}

template <> DEVICE float widen<bf16>(bf16 value) {
    return float_of((u32)value.bits << 16);
}

template <> DEVICE bf16 narrow<bf16>(float value) {
#if PLATFORM_AMD
    const u32 bits = bits_of(value);
    // Half a unit less one, and one more when the kept part is odd: ties go to even.
    const u32 rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const u32 nan = bits >> 16 | 0x40; // quiet, also when the payload was in the lower half only
    return {(u16)((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded)};
#else
    return {narrow_bf16_bits(value)};
#endif
}

template <> DEVICE float widen<f16>(f16 value) {
#if PLATFORM_AMD
    return (float)__builtin_bit_cast(_Float16, value.bits);
#else
    return widen_f16_bits(value.bits);
#endif
}

template <> DEVICE f16 narrow<f16>(float value) {
#if PLATFORM_AMD
    return {__builtin_bit_cast(u16, (_Float16)value)};
#else
    return {narrow_f16_bits(value)};
#endif
}

// One element of global memory.
template <class T> DEVICE T load_element(const void* at) {
    if constexpr (sizeof(T) == 4) {
        return float_of(load_u32(at));
    } else {
        return T{load_u16(at)};
    }
}

template <class T> DEVICE void store_element(void* at, T value) {
    if constexpr (sizeof(T) == 4) {
        store_u32(at, bits_of(value));
    } else {
        store_u16(at, value.bits);
    }
}

// Two 16-bit elements, the first in the lower half.
template <class T> DEVICE u32 narrow_pair(float first, float second) {
    return narrow<T>(first).bits | (u32)narrow<T>(second).bits << 16;
}

#if !PLATFORM_AMD
template <> DEVICE u32 narrow_pair<bf16>(float first, float second) {
    return narrow_bf16x2_bits(first, second);
}

template <> DEVICE u32 narrow_pair<f16>(float first, float second) {
    return narrow_f16x2_bits(first, second);
}
#endif

// To T and back: one rounding of a chain.
template <class T> DEVICE float round_to(float value) {
    return widen<T>(narrow<T>(value));
}

// exp(x) as `oracle::exp` states it: at most 1 ulp from the true value.
DEVICE float exponential(float x) {
    constexpr float LOG2_E = 1.44269504088896340736f;
    constexpr float LN2_UPPER = 0x1.62e4p-1f;   // derived: ln 2 cut after 15 bits, so that n * LN2_UPPER is exact
    constexpr float LN2_LOWER = 0x1.7f7d1cp-20f; // derived: ln 2 - LN2_UPPER, rounded
    constexpr float INTEGER = 12582912.0f;       // derived: 1.5 * 2^23, where f32 has steps of 1
    // Comparisons with NaN are false, so NaN stays.
    float clamped = x < -104.0f ? -104.0f : x;
    clamped = clamped > 89.0f ? 89.0f : clamped;
    // The sum rounds to an integer, half to even, and its low bits are that integer. A zero n may have another sign than the oracle's: r is then
    // the other zero at most, and p is 1.
    const float shifted = clamped * LOG2_E + INTEGER;
    const float n = shifted - INTEGER;
    float r = fma_rn(-n, LN2_UPPER, clamped);
    r = fma_rn(-n, LN2_LOWER, r);
    float p = 1.0f / 5040.0f;
    p = fma_rn(p, r, 1.0f / 720.0f);
    p = fma_rn(p, r, 1.0f / 120.0f);
    p = fma_rn(p, r, 1.0f / 24.0f);
    p = fma_rn(p, r, 1.0f / 6.0f);
    p = fma_rn(p, r, 1.0f / 2.0f);
    p = fma_rn(p, r, 1.0f);
    p = fma_rn(p, r, 1.0f);
    // 2^n in two normal factors: a subnormal result is rounded once.
    const int integer = (int)(bits_of(shifted) - bits_of(INTEGER));
    const int first = integer >> 1;
    const int second = integer - first;
    return p * float_of((u32)(first + 127) << 23) * float_of((u32)(second + 127) << 23);
}

RARE float rare_sigmoid(float x) {
    return 1.0f / (1.0f + exponential(-x));
}

// 1 / (1 + exp(-x)): IEEE add and divide. A large negative x gives 0; NaN stays.
DEVICE float sigmoid(float x) {
    // derived: exp(87) < 2^126 - 1. What is tested is known long before the result, so the branch waits for nothing.
    const bool is_rare = x < -87.0f;
    const float common = reciprocal_of_normal(1.0f + exponential(-x));
    return is_rare ? rare_sigmoid(x) : common;
}
