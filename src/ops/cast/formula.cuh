// From a greatest magnitude to a scale, as `oracle::cast` states it. Needs platform and fp8.

// The input type's largest finite value.
template <class T> constexpr float LARGEST_FINITE = 3.402823466385288598e+38f; // spec: binary32
template <> constexpr float LARGEST_FINITE<f16> = 65504.0f;                    // spec: binary16
template <> constexpr float LARGEST_FINITE<bf16> = 0x1.FEp127f;                // spec: bfloat16

// Transformer Engine's: largest / max(amax, epsilon).
DEVICE float te_scale(float amax, float largest, float epsilon, bool power_of_two, float instead_of_infinity) {
    const float m = amax < epsilon ? epsilon : amax;
    const float infinity = float_of(0x7F800000);
    if (m == 0.0f || m == infinity) {
        return 1.0f;
    }
    float scale = largest / m;
    scale = scale == infinity ? instead_of_infinity : scale;
    return power_of_two ? float_of(bits_of(scale) & 0x7F800000) : scale;
}

// A block's scale in the three forms that are needed.
struct Scale {
    float scale;  // what elements are multiplied by
    float stored; // what a GEMM multiplies by
    u32 e8m0;     // the same, when it is a power of two
};

// The least power of two that E8M0 holds and that is not below `x`, or the greatest.
DEVICE Scale power_at_least(float x) {
    const u32 bits = bits_of(x);
    // E8M0's 0 is 2^-127, a subnormal of f32 with bits 0x400000; everything above it rounds up to the next exponent.
    const u32 up = bits <= 0x400000 ? 0 : (bits + 0x7FFFFF) >> 23;
    const u32 e8m0 = up < 0xFE ? up : 0xFE;
    const u32 inverse = 0xFE - e8m0;
    return {float_of(inverse == 0 ? 0x400000 : inverse << 23), float_of(e8m0 == 0 ? 0x400000 : e8m0 << 23), e8m0};
}

enum Formula { TRANSFORMER_ENGINE, DEEP_GEMM, DEEP_GEMM_POWER_OF_TWO, MX };

template <class T, u32 F> DEVICE Scale block_scale(float amax, float largest, float epsilon, bool power_of_two) {
    if constexpr (F == TRANSFORMER_ENGINE) {
        const float scale = te_scale(amax, largest, epsilon, power_of_two, LARGEST_FINITE<T>);
        const float stored = 1.0f / scale;
        return {scale, stored, bits_of(stored) >> 23};
    } else if constexpr (F == MX) {
        return power_at_least(amax / largest);
    } else {
        const float m = amax < 1e-4f ? 1e-4f : amax; // spec: DeepGEMM's least magnitude
        if constexpr (F == DEEP_GEMM_POWER_OF_TWO) {
            return power_at_least(m / largest);
        } else {
            return {largest / m, m / largest, 0};
        }
    }
}
