//! The vectors that the dot product is written over: one type for each instruction set, the same bits from all of them.
//!
//! A vector is a row of 128-bit lanes of four f32. Elements arrive in *pairs*: `load_*` reads `2 * LANES` neighbours and gives the even ones in
//! one vector and the odd ones in another, so that the first step of the sum (bit 0 of the index) is one addition without a shuffle.

/// A vector of f32.
///
/// # Safety
/// Every unsafe method requires that the instruction set of the type is enabled where it is called (it is inlined into a function with the
/// features), and every pointer that it may be read for the bytes named.
pub(super) trait Vector: Copy {
    /// Number of f32; a multiple of 4.
    const LANES: usize;
    /// 32 f32 in as many vectors as that takes.
    type All: Copy + AsRef<[Self]> + AsMut<[Self]>;

    /// 32 times +0.
    unsafe fn zeros() -> Self::All;
    unsafe fn zero() -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// In each 128-bit lane `[a0 + a1, a2 + a3, b0 + b1, b2 + b3]`.
    unsafe fn add_pairs(a: Self, b: Self) -> Self;
    /// `LANES` values to `target`.
    unsafe fn store(self, target: *mut f32);
    /// Even and odd ones of `2 * LANES` bf16.
    unsafe fn load_bf16(source: *const u8) -> (Self, Self);
    /// Even and odd ones of `2 * LANES` f16.
    unsafe fn load_f16(source: *const u8) -> (Self, Self);
    /// Even and odd ones of `2 * LANES` f32.
    unsafe fn load_f32(source: *const u8) -> (Self, Self);
    /// Asks for the cache line of an address, into the second-level cache. Never faults, whatever the address.
    unsafe fn prefetch(address: *const u8);
}

/// Four f32 in an array: whatever the compilation target has (SSE2 on x86-64, NEON on AArch64).
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 4]);

impl Vector for Portable {
    const LANES: usize = 4;
    type All = [Self; 8];

    #[inline(always)]
    unsafe fn zeros() -> Self::All {
        [Portable([0.0; 4]); 8]
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        Portable([0.0; 4])
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i] + other.0[i]))
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i] * other.0[i]))
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], addend.0[i])))
    }

    #[inline(always)]
    unsafe fn add_pairs(Portable(a): Self, Portable(b): Self) -> Self {
        Portable([a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]])
    }

    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: the caller's `target` takes LANES = 4 values.
        unsafe { target.cast::<[f32; 4]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u8) -> (Self, Self) {
        // SAFETY: the caller's `source` has 8 elements of 2 bytes.
        let pairs = unsafe { source.cast::<[u32; 4]>().read_unaligned() };
        // The lower half of each word is the even element on a little-endian machine.
        (Portable(pairs.map(|p| f32::from_bits(p.to_le() << 16))), Portable(pairs.map(|p| f32::from_bits(p.to_le() & 0xFFFF_0000))))
    }

    #[inline(always)]
    unsafe fn load_f16(source: *const u8) -> (Self, Self) {
        // SAFETY: the caller's `source` has 8 elements of 2 bytes.
        let pairs = unsafe { source.cast::<[u32; 4]>().read_unaligned() };
        let half = |bits: u32| crate::cpu::float::f32_from_f16(bits as u16);
        (Portable(pairs.map(|p| half(p.to_le()))), Portable(pairs.map(|p| half(p.to_le() >> 16))))
    }

    #[inline(always)]
    unsafe fn load_f32(source: *const u8) -> (Self, Self) {
        // SAFETY: the caller's `source` has 8 elements of 4 bytes.
        let v = unsafe { source.cast::<[u32; 8]>().read_unaligned() }.map(|bits| f32::from_bits(bits.to_le()));
        (Portable([v[0], v[2], v[4], v[6]]), Portable([v[1], v[3], v[5], v[7]]))
    }

    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Vector;

    /// Eight f32 with AVX2, FMA and F16C.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256);

    impl Vector for Avx2 {
        const LANES: usize = 8;
        type All = [Self; 4];

        #[inline(always)]
        unsafe fn zeros() -> Self::All {
            // SAFETY: AVX2 is enabled (the trait's contract).
            [unsafe { Self::zero() }; 4]
        }

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: AVX2 is enabled (the trait's contract).
            Avx2(unsafe { _mm256_setzero_ps() })
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: AVX2 is enabled (the trait's contract).
            Avx2(unsafe { _mm256_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: AVX2 is enabled (the trait's contract).
            Avx2(unsafe { _mm256_mul_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: FMA is enabled (the trait's contract).
            Avx2(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
        }

        #[inline(always)]
        unsafe fn add_pairs(a: Self, b: Self) -> Self {
            // SAFETY: AVX2 is enabled (the trait's contract).
            unsafe {
                let even = _mm256_shuffle_ps::<0b10_00_10_00>(a.0, b.0);
                let odd = _mm256_shuffle_ps::<0b11_01_11_01>(a.0, b.0);
                Avx2(_mm256_add_ps(even, odd))
            }
        }

        #[inline(always)]
        unsafe fn store(self, target: *mut f32) {
            // SAFETY: AVX2 is enabled, and the caller's `target` takes LANES = 8 values.
            unsafe { _mm256_storeu_ps(target, self.0) }
        }

        #[inline(always)]
        unsafe fn load_bf16(source: *const u8) -> (Self, Self) {
            // SAFETY: AVX2 is enabled, and the caller's `source` has 16 elements of 2 bytes.
            unsafe {
                let pairs = _mm256_loadu_si256(source.cast());
                let even = _mm256_slli_epi32::<16>(pairs);
                let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000u32 as i32));
                (Avx2(_mm256_castsi256_ps(even)), Avx2(_mm256_castsi256_ps(odd)))
            }
        }

        #[inline(always)]
        unsafe fn load_f16(source: *const u8) -> (Self, Self) {
            // SAFETY: AVX2 and F16C are enabled, and the caller's `source` has 16 elements of 2 bytes.
            unsafe {
                // Four even ones, then four odd ones, of each half.
                let order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
                let lower = _mm_shuffle_epi8(_mm_loadu_si128(source.cast()), order);
                let upper = _mm_shuffle_epi8(_mm_loadu_si128(source.add(16).cast()), order);
                let even = _mm256_cvtph_ps(_mm_unpacklo_epi64(lower, upper));
                let odd = _mm256_cvtph_ps(_mm_unpackhi_epi64(lower, upper));
                (Avx2(even), Avx2(odd))
            }
        }

        #[inline(always)]
        unsafe fn load_f32(source: *const u8) -> (Self, Self) {
            // SAFETY: AVX2 is enabled, and the caller's `source` has 16 elements of 4 bytes.
            unsafe {
                let quarter = |i: usize| _mm_loadu_ps(source.add(16 * i).cast());
                // Elements 0..4 and 8..12, 4..8 and 12..16: the shuffles within 128 bits then leave the pairs in order.
                let a = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(quarter(0)), quarter(2));
                let b = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(quarter(1)), quarter(3));
                let even = _mm256_shuffle_ps::<0b10_00_10_00>(a, b);
                let odd = _mm256_shuffle_ps::<0b11_01_11_01>(a, b);
                (Avx2(even), Avx2(odd))
            }
        }

        #[inline(always)]
        unsafe fn prefetch(address: *const u8) {
            // SAFETY: a prefetch of any address is allowed.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
        }
    }

    /// Sixteen f32 with AVX-512 F and BW.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512);

    impl Vector for Avx512 {
        const LANES: usize = 16;
        type All = [Self; 2];

        #[inline(always)]
        unsafe fn zeros() -> Self::All {
            // SAFETY: AVX-512 is enabled (the trait's contract).
            [unsafe { Self::zero() }; 2]
        }

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: AVX-512 is enabled (the trait's contract).
            Avx512(unsafe { _mm512_setzero_ps() })
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: AVX-512 is enabled (the trait's contract).
            Avx512(unsafe { _mm512_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: AVX-512 is enabled (the trait's contract).
            Avx512(unsafe { _mm512_mul_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: AVX-512 is enabled (the trait's contract).
            Avx512(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
        }

        #[inline(always)]
        unsafe fn add_pairs(a: Self, b: Self) -> Self {
            // SAFETY: AVX-512 is enabled (the trait's contract).
            unsafe {
                let even = _mm512_shuffle_ps::<0b10_00_10_00>(a.0, b.0);
                let odd = _mm512_shuffle_ps::<0b11_01_11_01>(a.0, b.0);
                Avx512(_mm512_add_ps(even, odd))
            }
        }

        #[inline(always)]
        unsafe fn store(self, target: *mut f32) {
            // SAFETY: AVX-512 is enabled, and the caller's `target` takes LANES = 16 values.
            unsafe { _mm512_storeu_ps(target, self.0) }
        }

        #[inline(always)]
        unsafe fn load_bf16(source: *const u8) -> (Self, Self) {
            // SAFETY: AVX-512 is enabled, and the caller's `source` has 32 elements of 2 bytes.
            unsafe {
                let pairs = _mm512_loadu_si512(source.cast());
                let even = _mm512_slli_epi32::<16>(pairs);
                let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF_0000u32 as i32));
                (Avx512(_mm512_castsi512_ps(even)), Avx512(_mm512_castsi512_ps(odd)))
            }
        }

        #[inline(always)]
        unsafe fn load_f16(source: *const u8) -> (Self, Self) {
            // SAFETY: AVX-512 F and BW are enabled, and the caller's `source` has 32 elements of 2 bytes.
            unsafe {
                let order = _mm512_loadu_si512(EVEN_THEN_ODD_16.as_ptr().cast());
                let sorted = _mm512_permutexvar_epi16(order, _mm512_loadu_si512(source.cast()));
                let even = _mm512_cvtph_ps(_mm512_castsi512_si256(sorted));
                let odd = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(sorted));
                (Avx512(even), Avx512(odd))
            }
        }

        #[inline(always)]
        unsafe fn load_f32(source: *const u8) -> (Self, Self) {
            // SAFETY: AVX-512 is enabled, and the caller's `source` has 32 elements of 4 bytes.
            unsafe {
                let lower = _mm512_loadu_ps(source.cast());
                let upper = _mm512_loadu_ps(source.add(64).cast());
                let even = _mm512_loadu_si512(EVEN_32.as_ptr().cast());
                let odd = _mm512_loadu_si512(ODD_32.as_ptr().cast());
                (Avx512(_mm512_permutex2var_ps(lower, even, upper)), Avx512(_mm512_permutex2var_ps(lower, odd, upper)))
            }
        }

        #[inline(always)]
        unsafe fn prefetch(address: *const u8) {
            // SAFETY: a prefetch of any address is allowed.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
        }
    }

    /// 0, 2, .., 30, 1, 3, .., 31.
    static EVEN_THEN_ODD_16: [u16; 32] = {
        let mut order = [0; 32];
        let mut i = 0;
        while i < 32 {
            order[i] = (2 * (i % 16) + i / 16) as u16;
            i += 1;
        }
        order
    };
    /// 0, 2, .., 30.
    static EVEN_32: [u32; 16] = every_second(0);
    /// 1, 3, .., 31.
    static ODD_32: [u32; 16] = every_second(1);

    const fn every_second(first: u32) -> [u32; 16] {
        let mut order = [0; 16];
        let mut i = 0;
        while i < 16 {
            order[i] = 2 * i as u32 + first;
            i += 1;
        }
        order
    }
}
