//! Load of experts and ranks under a routing.
#![forbid(unsafe_code)]

use super::placement::Placement;
use super::routes::Routes;
use crate::id::{Expert, Rank};

/// Routes and rows, counted.
///
/// A route counts unless it is masked: negative, beyond the placement's experts, or a repetition of an expert within its token. A row is a distinct
/// (token, rank): what dispatch sends.
///
/// ```
/// use moe_kernels::routing::{Load, Placement, Routes};
/// let routes = Routes { topk_idx: vec![0, 1, 0, 3], topk_weights: vec![0.5; 4], num_tokens: 2, k: 2 };
/// let load = Load::new(&routes, &Placement::blocks(4, 2)?);
/// assert_eq!(load.routes_per_expert, [2, 1, 0, 1]);
/// assert_eq!((&load.routes_per_rank[..], &load.rows_per_rank[..]), (&[3, 1][..], &[2, 1][..]));
/// assert_eq!(load.ranks_per_token(), 1.5);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Load {
    /// Routes to each expert.
    pub routes_per_expert: Vec<u64>,
    /// Routes to the experts of each rank.
    pub routes_per_rank: Vec<u64>,
    /// Distinct tokens that each rank receives.
    pub rows_per_rank: Vec<u64>,
    /// Routes that go nowhere.
    pub num_masked: u64,
    /// Tokens.
    pub num_tokens: usize,
}

impl Load {
    /// Counts `routes` under `placement`.
    pub fn new(routes: &Routes, placement: &Placement) -> Self {
        let mut load = Load {
            routes_per_expert: vec![0; placement.num_experts()],
            routes_per_rank: vec![0; placement.world()],
            rows_per_rank: vec![0; placement.world()],
            num_masked: 0,
            num_tokens: routes.num_tokens,
        };
        // The last token, plus one, that went to each rank: no reset between tokens, any world size.
        let mut last_token = vec![0usize; placement.world()];
        for token in 0..routes.num_tokens {
            let row = routes.idx_of(token);
            for (j, &id) in row.iter().enumerate() {
                let expert = u32::try_from(id).ok().map(Expert);
                let owner = expert.and_then(|e| placement.rank_of(e)).filter(|_| !row[..j].contains(&id));
                let (Some(expert), Some(rank)) = (expert, owner) else {
                    load.num_masked += 1;
                    continue;
                };
                load.routes_per_expert[expert.index()] += 1;
                load.routes_per_rank[rank.index()] += 1;
                if std::mem::replace(&mut last_token[rank.index()], token + 1) != token + 1 {
                    load.rows_per_rank[rank.index()] += 1;
                }
            }
        }
        load
    }

    /// Routes that go to an expert.
    pub fn num_routes(&self) -> u64 {
        self.routes_per_expert.iter().sum()
    }

    /// Rows that all ranks receive.
    pub fn num_rows(&self) -> u64 {
        self.rows_per_rank.iter().sum()
    }

    /// Largest over mean of the routes per rank; 1 is even.
    pub fn route_imbalance(&self) -> f64 {
        imbalance(&self.routes_per_rank)
    }

    /// Largest over mean of the rows per rank.
    pub fn row_imbalance(&self) -> f64 {
        imbalance(&self.rows_per_rank)
    }

    /// Largest over mean of the routes per expert.
    pub fn expert_imbalance(&self) -> f64 {
        imbalance(&self.routes_per_expert)
    }

    /// Distinct ranks of a token, on average over all tokens; 0 without tokens.
    pub fn ranks_per_token(&self) -> f64 {
        if self.num_tokens == 0 { 0.0 } else { self.num_rows() as f64 / self.num_tokens as f64 }
    }

    /// The expert with the most routes, the lowest of equals, and its share of all routes (0 when there are none).
    pub fn top_expert(&self) -> (Expert, f64) {
        let (e, most) = first_largest(&self.routes_per_expert);
        (Expert(e as u32), most as f64 / self.num_routes().max(1) as f64)
    }

    /// Routes of the least used expert.
    pub fn fewest_routes(&self) -> u64 {
        self.routes_per_expert.iter().copied().min().unwrap_or(0)
    }

    /// The rank that receives the most rows, the lowest of equals, and how many.
    pub fn fullest_rank(&self) -> (Rank, u64) {
        let (rank, rows) = first_largest(&self.rows_per_rank);
        (Rank(rank as u32), rows)
    }
}

/// Largest over mean; 1 when nothing was counted.
pub fn imbalance(counts: &[u64]) -> f64 {
    let sum: u64 = counts.iter().sum();
    let largest = counts.iter().copied().max().unwrap_or(0);
    if sum == 0 { 1.0 } else { largest as f64 * counts.len() as f64 / sum as f64 }
}

fn first_largest(counts: &[u64]) -> (usize, u64) {
    counts.iter().copied().enumerate().fold((0, 0), |best, (i, n)| if n > best.1 { (i, n) } else { best })
}
