//! Pseudo-random tokens, routes and rows with fixed seeds.

use half::{bf16, f16};

use crate::ep::Config;
use crate::oracle::dispatch::Tokens;
use crate::random::{SplitMix64, symmetric_f32};
use crate::tensor::DType;

/// How the experts of a token are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ids {
    /// K distinct experts.
    Distinct,
    /// Any ids: duplicates, negative, out of range.
    Messy,
    /// The same, and ids that are experts only in their lower 32 bits.
    Wide,
    /// Every route masked.
    Masked,
    /// One unmasked route, always to this expert.
    AllTo(usize),
}

/// What to draw for every rank.
#[derive(Debug, Clone)]
pub struct Draw {
    /// Everything else follows from it.
    pub seed: u64,
    /// T of each rank.
    pub tokens: Vec<usize>,
    /// Routes.
    pub ids: Ids,
    /// With router weights.
    pub weights: bool,
    /// NaN, infinities, -0 and subnormals among the values.
    pub specials: bool,
}

/// Every rank's tokens.
pub fn draw(config: &Config, d: &Draw) -> Vec<Tokens> {
    d.tokens.iter().enumerate().map(|(rank, &num_tokens)| draw_rank(config, d, rank, num_tokens)).collect()
}

fn draw_rank(config: &Config, d: &Draw, rank: usize, num_tokens: usize) -> Tokens {
    let mut random = SplitMix64::stream(d.seed, rank as u64);
    let x = elements(&mut random, config.dtype, num_tokens * config.hidden, d.specials);
    let topk_idx = (0..num_tokens).flat_map(|_| token_ids(&mut random, config, d.ids)).collect();
    let weight =
        |random: &mut SplitMix64| f32::from_le_bytes(elements(random, DType::F32, 1, d.specials)[..4].try_into().expect("4 bytes"));
    let topk_weights = d.weights.then(|| (0..num_tokens * config.k).map(|_| weight(&mut random)).collect());
    let scales = (0..num_tokens * config.scale_bytes).map(|_| random.next_u64() as u8).collect();
    Tokens { num_tokens, x, topk_idx, topk_weights, scales }
}

fn token_ids(random: &mut SplitMix64, config: &Config, ids: Ids) -> Vec<i64> {
    let (k, experts) = (config.k, config.num_experts as u64);
    match ids {
        Ids::Distinct => {
            let mut chosen = Vec::new();
            while chosen.len() < k {
                let id = random.below(experts) as i64;
                if !chosen.contains(&id) {
                    chosen.push(id);
                }
            }
            chosen
        }
        Ids::Messy | Ids::Wide => {
            let mut row: Vec<i64> = Vec::new();
            for _ in 0..k {
                let id = random.below(experts) as i64;
                row.push(match random.below(8) {
                    0 => -1 - id,
                    1 => experts as i64 + id,
                    2 | 3 if !row.is_empty() => row[random.below(row.len() as u64) as usize],
                    4 if ids == Ids::Wide => (1 << 32) + id,
                    5 if ids == Ids::Wide => [i64::MIN, i64::MAX, i64::MIN + id][random.below(3) as usize],
                    _ => id,
                });
            }
            row
        }
        Ids::Masked => (0..k).map(|i| [-1, experts as i64, i32::MAX as i64, i32::MIN as i64][i % 4]).collect(),
        Ids::AllTo(expert) => {
            let at = random.below(k as u64) as usize;
            (0..k).map(|i| if i == at { expert as i64 } else { -1 }).collect()
        }
    }
}

/// `count` elements of `dtype`: values of mixed magnitude, or any bytes for types that are only moved. Of every 128 values in a row (a scale
/// block) all may be 0, or so small that the least scale counts.
pub fn elements(random: &mut SplitMix64, dtype: DType, count: usize, specials: bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(count * dtype.size());
    let mut block_factor = 1.0;
    for i in 0..count {
        let bits = random.next_u64();
        if i.is_multiple_of(128) {
            block_factor = [0.0, 1e-6, 1e-6, 1.0, 1.0, 1.0, 1.0, 1.0][(bits >> 12 & 7) as usize]; // 1e-6: times 16 still below 1e-4
        }
        let mut value = symmetric_f32(bits) * ((bits & 7) as f32 - 3.0).exp2() * block_factor;
        // One value in 64 is special (arbitrary: enough in a row, and most sums stay finite).
        if specials && bits >> 3 & 63 == 0 {
            let pick = (bits >> 9 & 7) as usize;
            value = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, 1e-40, 3e38, -6e-8][pick];
        }
        match dtype {
            DType::F32 => bytes.extend(value.to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            _ => bytes.extend(&(bits >> 20).to_le_bytes()[..dtype.size()]),
        }
    }
    bytes
}
