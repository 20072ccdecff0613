//! Synthetic routing for benchmarks, the same on every machine for a given seed.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use super::placement::MAX_EXPERTS;
use super::routes::{MAX_K, Routes};
use crate::error::{Error, Result};
use crate::random::SplitMix64;

const OP: &str = "synthetic routing";

/// How experts are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Each token draws k distinct experts, every set and order as likely as any other.
    Uniform,
    /// Every expert gets the same number of routes, the first `num_tokens * k % num_experts` experts one more.
    Even,
    /// Experts drawn without replacement with weights 1 / (i + 1)^S, i a random rank of the expert that all streams of a seed share. 0.7 is the usual skew.
    Zipf(f64),
    /// Expert 0 gets one route of every token; the other k - 1 are masked.
    One,
}

/// Largest S of [`Kind::Zipf`] (arbitrary: far beyond any measured skew; there the second expert has a thousandth of the first one's weight).
const MAX_SKEW: f64 = 10.0;

impl FromStr for Kind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let kind = match text {
            "uniform" => Some(Kind::Uniform),
            "even" => Some(Kind::Even),
            "one" => Some(Kind::One),
            _ => text.strip_prefix("zipf:").and_then(|s| s.parse().ok()).filter(|s| is_skew(*s)).map(Kind::Zipf),
        };
        kind.ok_or_else(|| {
            Error::invalid(
                OP,
                "kind",
                format!("`{text}`"),
                format!("uniform, even, one, or zipf:S with S from 0 to {MAX_SKEW}, for example zipf:0.7"),
            )
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Uniform => f.pad("uniform"),
            Kind::Even => f.pad("even"),
            Kind::Zipf(s) => f.pad(&format!("zipf:{s}")),
            Kind::One => f.pad("one"),
        }
    }
}

fn is_skew(s: f64) -> bool {
    (0.0..=MAX_SKEW).contains(&s)
}

/// What to draw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Synthetic {
    /// How experts are drawn.
    pub kind: Kind,
    /// Experts of the model.
    pub num_experts: usize,
    /// Experts of one token.
    pub k: usize,
    /// Names the routing, with the stream.
    pub seed: u64,
    /// The rank that the tokens belong to, or any other number: streams of one seed differ, and agree on which experts are popular.
    pub stream: u64,
}

/// Purposes of the streams of numbers inside one (seed, stream).
const POPULARITY: u64 = 0;
const EXPERTS: u64 = 1;
const WEIGHTS: u64 = 2;

impl Synthetic {
    /// Draws routes for `num_tokens` tokens. Each token's weights are random, positive, and sum to 1 up to k roundings; a masked route has weight 0.
    ///
    /// The numbers come from [`SplitMix64`]; experts and weights have streams of their own, so the weights do not depend on the kind. `Uniform`, `Zipf` and
    /// `One` draw token by token: fewer tokens are a prefix of more.
    ///
    /// # Errors
    /// [`Error::Invalid`] when an expert cannot be chosen k times distinctly, or a size or the skew is out of range.
    ///
    /// ```
    /// use moe_kernels::routing::synthetic::{Kind, Synthetic};
    /// let even = Synthetic { kind: "even".parse()?, num_experts: 8, k: 2, seed: 1, stream: 0 };
    /// let routes = even.routes(9)?; // 18 routes: 2 each, and one more for experts 0 and 1
    /// assert_eq!(routes.topk_idx.iter().filter(|&&id| id == 1).count(), 3);
    /// # Ok::<(), moe_kernels::Error>(())
    /// ```
    pub fn routes(&self, num_tokens: usize) -> Result<Routes> {
        self.check(num_tokens)?;
        let mut routes = Routes::masked(num_tokens, self.k);
        let rows = routes.topk_idx.chunks_exact_mut(self.k);
        let mut random = self.random(EXPERTS);
        match self.kind {
            Kind::Uniform => uniform(self.num_experts, rows, &mut random),
            Kind::Even => even(self.num_experts, self.k, &mut routes.topk_idx, &mut random),
            Kind::Zipf(s) => Popularity::new(self.num_experts, s, SplitMix64::stream(self.seed, POPULARITY)).draw(rows, &mut random),
            Kind::One => rows.for_each(|row| row[0] = 0),
        }
        let mut random = self.random(WEIGHTS);
        for (idx, weights) in routes.topk_idx.chunks_exact(self.k).zip(routes.topk_weights.chunks_exact_mut(self.k)) {
            weigh(idx, weights, &mut random);
        }
        Ok(routes)
    }

    fn check(&self, num_tokens: usize) -> Result<()> {
        let Self { kind, num_experts, k, .. } = *self;
        if !(1..=MAX_EXPERTS).contains(&num_experts) {
            return Err(Error::invalid(OP, "num_experts", num_experts, format!("1 to {MAX_EXPERTS}")));
        }
        let most = MAX_K.min(num_experts);
        if !(1..=most).contains(&k) {
            return Err(Error::invalid(OP, "k", k, format!("1 to {most} (at most {MAX_K}, at most num_experts)")));
        }
        if num_tokens > MAX_TOKENS {
            return Err(Error::invalid(OP, "num_tokens", num_tokens, format!("at most {MAX_TOKENS}")));
        }
        match kind {
            Kind::Zipf(s) if !is_skew(s) => Err(Error::invalid(OP, "skew", s, format!("0 to {MAX_SKEW}"))),
            _ => Ok(()),
        }
    }

    fn random(&self, purpose: u64) -> SplitMix64 {
        SplitMix64::stream(SplitMix64::stream(self.seed, self.stream.wrapping_add(1)).at(0), purpose)
    }
}

/// Most tokens of one routing: 64 times what one rank may dispatch (arbitrary: at k = 32 the tables are 8 GiB).
const MAX_TOKENS: usize = 64 * 524_288;

/// Partial Fisher-Yates over one table that is put back after each token.
fn uniform<'a>(num_experts: usize, rows: impl Iterator<Item = &'a mut [i32]>, random: &mut SplitMix64) {
    let mut table: Vec<i32> = (0..num_experts as i32).collect();
    for row in rows {
        let mut swaps = [0usize; MAX_K];
        for j in 0..row.len() {
            swaps[j] = j + random.below((num_experts - j) as u64) as usize;
            table.swap(j, swaps[j]);
            row[j] = table[j];
        }
        for j in (0..row.len()).rev() {
            table.swap(j, swaps[j]);
        }
    }
}

/// Deals the experts round robin, which makes the counts exact and, because k <= num_experts, the experts of a token distinct; then exchanges routes
/// between tokens at random wherever both stay distinct.
fn even(num_experts: usize, k: usize, topk_idx: &mut [i32], random: &mut SplitMix64) {
    for (i, id) in topk_idx.iter_mut().enumerate() {
        *id = (i % num_experts) as i32;
    }
    for a in 0..topk_idx.len() {
        let b = random.below(topk_idx.len() as u64) as usize;
        let (row_a, row_b) = (a / k * k, b / k * k);
        let (id_a, id_b) = (topk_idx[a], topk_idx[b]);
        if !topk_idx[row_a..][..k].contains(&id_b) && !topk_idx[row_b..][..k].contains(&id_a) {
            topk_idx.swap(a, b);
        }
    }
}

/// Weights of the experts, as integers: sums are exact and the same on every machine.
struct Popularity {
    /// Weight of all experts before this one, `num_experts + 1` entries.
    start: Vec<u64>,
}

/// Scale of the integer weights: 2^40 times 65536 experts stays below 2^63, and a weight has 40 bits (derived).
const WEIGHT_ONE: f64 = (1u64 << 40) as f64;
/// Draws from the whole before the remaining experts are scanned (arbitrary: bounds the cost when a few experts hold nearly all the weight).
const MAX_REJECTIONS: usize = 16;

impl Popularity {
    fn new(num_experts: usize, skew: f64, mut random: SplitMix64) -> Self {
        let mut place: Vec<usize> = (0..num_experts).collect();
        for i in (1..num_experts).rev() {
            place.swap(i, random.below(i as u64 + 1) as usize);
        }
        // At least 1, so that every expert can be drawn.
        let weight = |i: usize| ((WEIGHT_ONE / ((i + 1) as f64).powf(skew)).round() as u64).max(1);
        let mut start = vec![0u64];
        for &i in &place {
            start.push(start[start.len() - 1] + weight(i));
        }
        Self { start }
    }

    fn draw<'a>(&self, rows: impl Iterator<Item = &'a mut [i32]>, random: &mut SplitMix64) {
        for row in rows {
            for j in 0..row.len() {
                let (drawn, rest) = row.split_at_mut(j);
                rest[0] = self.next(drawn, random);
            }
        }
    }

    /// One expert that is not in `drawn`, each with its weight over the weight of those not drawn: by rejection, which has just this distribution, and
    /// after too many by a scan.
    fn next(&self, drawn: &[i32], random: &mut SplitMix64) -> i32 {
        let total = self.start[self.start.len() - 1];
        for _ in 0..MAX_REJECTIONS {
            let at = random.below(total);
            let id = (self.start.partition_point(|&s| s <= at) - 1) as i32;
            if !drawn.contains(&id) {
                return id;
            }
        }
        let weight = |id: i32| self.start[id as usize + 1] - self.start[id as usize];
        let mut at = random.below(total - drawn.iter().map(|&id| weight(id)).sum::<u64>());
        let mut id = 0;
        for left in (0..self.start.len() as i32 - 1).filter(|id| !drawn.contains(id)) {
            id = left;
            if at < weight(id) {
                break; // reached: `at` is below the weight of all that are left, and k <= num_experts leaves one
            }
            at -= weight(id);
        }
        id
    }
}

/// Each unmasked route a 24-bit integer above 0, over their sum: positive and exact up to one rounding.
fn weigh(idx: &[i32], weights: &mut [f32], random: &mut SplitMix64) {
    let mut parts = [0u64; MAX_K];
    let parts = &mut parts[..idx.len()];
    for (part, &id) in parts.iter_mut().zip(idx) {
        let drawn = (random.next_u64() >> 40) + 1; // the upper 24 bits (derived: what f32 holds)
        *part = if id < 0 { 0 } else { drawn };
    }
    let sum = parts.iter().sum::<u64>() as f64;
    for (weight, &part) in weights.iter_mut().zip(parts.iter()) {
        *weight = (part as f64 / sum) as f32;
    }
}
