// FP8: f32 to the four formats, with the bits of `oracle::float`. Needs platform.cuh.
//
// To nearest even; saturates at the largest value (infinities too); NaN of either sign is 0x7F, FNUZ 0x80; FNUZ has no -0.

// By integer arithmetic, on every architecture.
template <class T> DEVICE u32 narrow_fp8_portable(float value) {
    constexpr u32 SHIFT = 23 - T::MANTISSA;              // spec: binary32 has 23 mantissa bits
    constexpr u32 SMALLEST_NORMAL = (127 - T::BIAS + 1) << 23; // derived: its bits as f32
    constexpr u32 MAGIC = (127 - T::BIAS + 1 + SHIFT) << 23; // derived: a power of two whose last place is T's smallest step
    const u32 bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
    const u32 capped = magnitude < bits_of(T::LARGEST_VALUE) ? magnitude : bits_of(T::LARGEST_VALUE);
    // Half a unit less one, and one more when the kept part is odd: ties go to even.
    const u32 normal = ((capped + (1u << (SHIFT - 1)) - 1 + (capped >> SHIFT & 1)) >> SHIFT) - ((127 - T::BIAS) << T::MANTISSA);
    // The adder rounds.
    const u32 subnormal = bits_of(float_of(capped) + float_of(MAGIC)) - MAGIC;
    const u32 rounded = capped < SMALLEST_NORMAL ? subnormal : normal;
    const u32 sign = T::FNUZ && rounded == 0 ? 0 : bits >> 24 & 0x80;
    return magnitude > 0x7F800000 ? T::NAN_BITS : sign | rounded;
}

#if !PLATFORM_AMD && defined(__CUDA_ARCH__)
#define FP8_NATIVE_OCP (__CUDA_ARCH__ >= 890) // spec: PTX, cvt.e4m3x2 and e5m2x2 need sm_89
#define FP8_NATIVE_FNUZ 0
#elif defined(__gfx942__)
#define FP8_NATIVE_OCP 0
#define FP8_NATIVE_FNUZ 1
#elif defined(__gfx950__) || defined(__gfx1200__) || defined(__gfx1201__)
#define FP8_NATIVE_OCP 1
#define FP8_NATIVE_FNUZ 0
#else
#define FP8_NATIVE_OCP 0
#define FP8_NATIVE_FNUZ 0
#endif

// Four values as the bytes of a word, the first lowest.
template <class T> DEVICE u32 narrow_fp8x4(float a, float b, float c, float d) {
#if !PLATFORM_AMD && FP8_NATIVE_OCP
    if constexpr (!T::FNUZ) {
        u16 low, high;
        if constexpr (T::MANTISSA == 3) {
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
        } else {
            asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
            asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
        }
        return low | (u32)high << 16;
    }
#endif
#if PLATFORM_AMD && (FP8_NATIVE_OCP || FP8_NATIVE_FNUZ)
    if constexpr (T::FNUZ == (FP8_NATIVE_FNUZ == 1)) {
        // The instruction does not saturate, and what it makes of a NaN's sign is not relied on.
        if (a == a && b == b && c == c && d == d) {
            const auto capped = [](float value) { return __builtin_amdgcn_fmed3f(value, T::LARGEST_VALUE, -T::LARGEST_VALUE); };
            int word = 0;
            if constexpr (T::MANTISSA == 3) {
                word = __builtin_amdgcn_cvt_pk_fp8_f32(capped(a), capped(b), word, false);
                word = __builtin_amdgcn_cvt_pk_fp8_f32(capped(c), capped(d), word, true);
            } else {
                word = __builtin_amdgcn_cvt_pk_bf8_f32(capped(a), capped(b), word, false);
                word = __builtin_amdgcn_cvt_pk_bf8_f32(capped(c), capped(d), word, true);
            }
            return (u32)word;
        }
    }
#endif
    return narrow_fp8_portable<T>(a) | narrow_fp8_portable<T>(b) << 8 | narrow_fp8_portable<T>(c) << 16 | narrow_fp8_portable<T>(d) << 24;
}

template <class T> DEVICE T narrow_fp8(float value) {
    return {(u8)narrow_fp8x4<T>(value, 0.0f, 0.0f, 0.0f)};
}
