//! exp, sigmoid and SiLU, with the same bits everywhere.

/// exp(x), at most 1 ulp from the true value.
///
/// 1. x is clamped to `[-104, 89]`: outside, the result is 0 or infinity.
/// 2. n = round-half-even(x * log2(e)), one f32 product.
/// 3. r = fma(-n, 0x1.62e4p-1, x); r = fma(-n, 0x1.7f7d1cp-20, r): the two constants add up to ln 2.
/// 4. p = Horner over 1/7!, 1/6!, 1/5!, 1/4!, 1/3!, 1/2!, 1, 1 (each rounded to f32), one fma a step.
/// 5. exp(x) = (p * 2^floor(n / 2)) * 2^(n - floor(n / 2)), so that a subnormal result is rounded once.
pub fn exp(x: f32) -> f32 {
    if x.is_nan() {
        return f32::NAN;
    }
    let x = x.clamp(-104.0, 89.0);
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    // 0x1.62e4p-1 and 0x1.7f7d1cp-20 (derived: ln 2 cut after 15 bits, and the rest rounded).
    let ln2_upper = 0x162E4 as f32 / (1u32 << 17) as f32;
    let ln2_lower = 0x17F7D1C as f32 / (1u64 << 44) as f32;
    let r = f32::mul_add(-n, ln2_upper, x);
    let r = f32::mul_add(-n, ln2_lower, r);
    let mut p = 1.0f32 / 5040.0;
    for factorial in [720.0f32, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0] {
        p = f32::mul_add(p, r, 1.0 / factorial);
    }
    let lower_half = (n / 2.0).floor();
    p * 2f32.powi(lower_half as i32) * 2f32.powi((n - lower_half) as i32)
}

/// 1 / (1 + exp(-x)): IEEE add and divide. A large negative x gives 0; NaN stays.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x / (1 + exp(-x)): IEEE add and divide.
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_one_ulp_of_f64() {
        let mut worst = 0.0f64;
        // 1999 is arbitrary, odd, so that mantissas vary; about two million inputs of both signs.
        for bits in (0..=0x42D0_0000u32).step_by(1999).flat_map(|b| [b, b | 0x8000_0000]) {
            let x = f32::from_bits(bits);
            let (got, want) = (exp(x), (x as f64).exp());
            if want > f32::MAX as f64 {
                continue; // may round to the largest or to infinity
            }
            let ulp = (want as f32).next_up() as f64 - want as f32 as f64;
            worst = worst.max((got as f64 - want).abs() / ulp);
        }
        assert!(worst <= 1.0, "worst error {worst} ulp");
        assert!(worst > 0.5, "{worst}: no f32 polynomial rounds correctly everywhere; the test does not look");
    }

    #[test]
    fn exp_at_the_ends() {
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-200.0), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(sigmoid(-1e30), 0.0);
        assert_eq!(sigmoid(1e30), 1.0);
        assert_eq!(sigmoid(0.0), 0.5);
    }
}
