//! Which rank owns which expert.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::id::{Expert, Rank};

/// Most experts, and most ranks, that a placement takes. Arbitrary: far above any model, and small enough that the tables of a hostile
/// configuration stay below a few MiB.
pub const MAX_EXPERTS: usize = 65536;
/// See [`MAX_EXPERTS`].
pub const MAX_WORLD: usize = 65536;

const OP: &str = "placement";

/// Every expert's owner and its id there. Local ids ascend with global ids.
///
/// ```
/// use moe_kernels::{Expert, Rank, routing::Placement};
/// let placement = Placement::blocks(60, 8)?; // 60 does not divide by 8: ranks own 7 or 8
/// assert_eq!(placement.rank_of(Expert(8)), Some(Rank(1)));
/// assert_eq!(placement.local_of(Expert(8)), Some(0));
/// assert_eq!((placement.num_local(Rank(0)), placement.num_local(Rank(1))), (8, 7));
/// assert_eq!(placement.rank_of(Expert(60)), None);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Placement {
    owner: Vec<Rank>,
    local: Vec<u32>,
    /// All experts, by rank, ascending inside each.
    by_rank: Vec<Expert>,
    /// Where a rank's experts start in `by_rank`; `world + 1` entries.
    start: Vec<u32>,
}

impl Placement {
    /// The default: expert `e` lives on rank `floor(e * world / num_experts)`, so every rank owns contiguous ids, and counts differ by at most 1.
    ///
    /// # Errors
    /// [`Error::Invalid`] when an argument is 0 or too large, or when there are more ranks than experts.
    pub fn blocks(num_experts: usize, world: usize) -> Result<Self> {
        check_sizes(num_experts, world)?;
        if world > num_experts {
            return Err(Error::invalid(OP, "world", world, format!("at most num_experts, {num_experts}, unless a map is given")));
        }
        // Both are at most 65536 (checked), so the product fits in 64 bits and the quotient in 32.
        let owner = (0..num_experts as u64).map(|e| Rank((e * world as u64 / num_experts as u64) as u32)).collect();
        Ok(Self::from_owner(owner, world))
    }

    /// Expert `e` lives on rank `map[e]`. A rank may own no expert.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the map is empty, the world is 0, either is too large, or an entry is no rank of the world.
    pub fn from_map(map: &[Rank], world: usize) -> Result<Self> {
        check_sizes(map.len(), world)?;
        if let Some(e) = map.iter().position(|rank| rank.index() >= world) {
            return Err(Error::invalid(OP, format!("map[{e}]"), format!("rank {}", map[e]), format!("a rank below world, {world}")));
        }
        Ok(Self::from_owner(map.to_vec(), world))
    }

    fn from_owner(owner: Vec<Rank>, world: usize) -> Self {
        let mut start = vec![0u32; world + 1];
        let mut local = Vec::with_capacity(owner.len());
        for rank in &owner {
            let count = &mut start[rank.index() + 1];
            local.push(*count);
            *count += 1;
        }
        for rank in 0..world {
            start[rank + 1] += start[rank];
        }
        let mut by_rank = vec![Expert(0); owner.len()];
        for (e, rank) in owner.iter().enumerate() {
            by_rank[(start[rank.index()] + local[e]) as usize] = Expert(e as u32);
        }
        Self { owner, local, by_rank, start }
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.start.len() - 1
    }

    /// Experts of all ranks.
    pub fn num_experts(&self) -> usize {
        self.owner.len()
    }

    /// The owner of `expert`; `None` for an id beyond the model's experts.
    #[inline]
    pub fn rank_of(&self, expert: Expert) -> Option<Rank> {
        self.owner.get(expert.index()).copied()
    }

    /// The id of `expert` on its owner; `None` for an id beyond the model's experts.
    #[inline]
    pub fn local_of(&self, expert: Expert) -> Option<usize> {
        self.local.get(expert.index()).map(|&local| local as usize)
    }

    /// The owner of every expert, by global id.
    pub fn owners(&self) -> &[Rank] {
        &self.owner
    }

    /// The experts of `rank`, ascending: its local ids in order. Empty for a rank outside the world.
    pub fn experts_of(&self, rank: Rank) -> &[Expert] {
        let Some(&[first, end]) = self.start.get(rank.index()..).and_then(|s| s.first_chunk()) else { return &[] };
        &self.by_rank[first as usize..end as usize]
    }

    /// Experts that `rank` owns.
    pub fn num_local(&self, rank: Rank) -> usize {
        self.experts_of(rank).len()
    }
}

fn check_sizes(num_experts: usize, world: usize) -> Result<()> {
    for (what, got, most) in [("num_experts", num_experts, MAX_EXPERTS), ("world", world, MAX_WORLD)] {
        if !(1..=most).contains(&got) {
            return Err(Error::invalid(OP, what, got, format!("1 to {most}")));
        }
    }
    Ok(())
}
