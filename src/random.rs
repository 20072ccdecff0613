//! The one source of pseudo-random numbers: SplitMix64, by counter.
//!
//! The n-th output of SplitMix64 (Steele, Lea, Flood 2014) depends on `seed + (n + 1) * GAMMA` only, so any element of a stream can be made
//! without the ones before it: weights are filled in parallel and sampled tokens are made again alone.

/// The odd constant by which SplitMix64's state advances (spec: Steele, Lea, Flood 2014).
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64: a stream of 64-bit numbers named by its seed.
#[derive(Debug, Clone)]
pub struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// The stream of `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A stream of its own for each `(seed, stream)`.
    pub const fn stream(seed: u64, stream: u64) -> Self {
        Self { state: mix(seed ^ mix(stream.wrapping_add(GAMMA))) }
    }

    /// Output `n` of this stream, without advancing it.
    #[inline]
    pub const fn at(&self, n: u64) -> u64 {
        mix(self.state.wrapping_add(GAMMA.wrapping_mul(n.wrapping_add(1))))
    }

    /// The next 64 bits.
    #[inline]
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GAMMA);
        mix(self.state)
    }

    /// Uniform in `0..bound` (multiply and shift; the bias is below `bound / 2^64`). `bound` of 0 gives 0.
    #[inline]
    pub const fn below(&mut self, bound: u64) -> u64 {
        ((self.next_u64() as u128 * bound as u128) >> 64) as u64
    }

    /// Uniform in `[0, 1)`, 53 bits.
    #[inline]
    pub const fn next_f64(&mut self) -> f64 {
        unit_f64(self.next_u64())
    }

    /// Uniform in `[-1, 1)`, 24 bits.
    #[inline]
    pub const fn next_f32(&mut self) -> f32 {
        symmetric_f32(self.next_u64())
    }
}

/// Uniform in `[0, 1)` from the upper 53 bits.
#[inline]
pub const fn unit_f64(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Uniform in `[-1, 1)` from the upper 24 bits: every value is exact in f32.
#[inline]
pub const fn symmetric_f32(bits: u64) -> f32 {
    ((bits >> 40) as i64 - (1 << 23)) as f32 * (1.0 / (1u32 << 23) as f32)
}

const fn mix(mut z: u64) -> u64 {
    // spec: the finaliser of SplitMix64.
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
