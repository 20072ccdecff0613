//! How launches are shaped: what a caller may set, and rules that phases share. Results do not depend on any of it.
#![forbid(unsafe_code)]

use std::fmt;

use crate::error::{Error, Result};

/// What a caller sets of the launches of an object. The default is chosen by number of tokens, from tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Tuning {
    /// Of dispatch and replay.
    pub dispatch: PhaseTuning,
    /// Of combine.
    pub combine: PhaseTuning,
    /// What combines may be asked for.
    pub sums: Sums,
    /// With programmatic launch and rows `ByToken`: what is launched programmatically behind a dispatch may start while the dispatch still waits for the rows of
    /// peers. A promise of the caller for ranks that share a GPU: that is a combine of rows in place and as they are, or leaves room for the kernels of
    /// the other ranks. Otherwise they stop each other until a wait comes to its bound. Of this the object refuses what it sees: other layouts and wires, and
    /// combines of staged rows or with weights to be folded. A rank alone on its GPU does it always.
    pub early: bool,
    /// Leaves parts of the work out, to measure the rest: results are wrong then.
    #[doc(hidden)]
    pub measure: Measure,
}

/// What a caller sets of one phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct PhaseTuning {
    /// Blocks and threads of a block of the kernel that moves the rows. An object whose largest calls have blocks that wait for peers is refused with more of
    /// them than run at once; where only those of smaller calls wait, these are cut.
    pub geometry: Option<(u32, u32)>,
    /// Most multiprocessors that the phase occupies.
    pub sms: Option<u32>,
}

/// Forms of combine that an object has: kernels are compiled and loaded for these alone. A call that asks for another is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Sums {
    /// Without `add_to`.
    pub plain: bool,
    /// With `add_to` in the type of the result.
    pub add_to: bool,
    /// With `add_to` in f32.
    pub add_to_f32: bool,
    /// With `fold_weights`: also without folding any back.
    pub unfolded: bool,
}

impl Default for Sums {
    /// All.
    fn default() -> Self {
        Sums { plain: true, add_to: true, add_to_f32: true, unfolded: true }
    }
}

impl Sums {
    /// Of an object that only dispatches.
    pub const NONE: Sums = Sums { plain: false, add_to: false, add_to_f32: false, unfolded: false };

    /// Whether there are any.
    pub(crate) fn are_any(&self) -> bool {
        self.plain || self.add_to || self.add_to_f32
    }
}

/// Parts of the work, for measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize)]
pub struct Measure {
    /// Dispatch moves neither rows nor records: what remains is routing and signals.
    pub skip_payload: bool,
    /// Dispatch writes rows and records to this rank's own memory instead of its peers'.
    pub local: bool,
    /// The payload kernel and combine exchange no done and ready words: what remains is the movement of rows.
    pub skip_signals: bool,
}

/// How the kernels of a call that move rows are launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Launches {
    /// Of dispatch: `payload`, or the one kernel of the low-latency form.
    pub dispatch: Launch,
    /// Of combine.
    pub combine: Launch,
}

/// A grid, how it shares out rows, and who chose it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Launch {
    /// Blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Warps that share a row.
    pub parts: u32,
    /// Vectors of 16 bytes that a lane moves at a time.
    pub unroll: u32,
    /// Blocks of the kernel that makes the routes; 0 without one.
    pub route_blocks: u32,
    /// What chose blocks and threads.
    pub chosen_by: ChosenBy,
}

/// What chooses a geometry: the first of these that says anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChosenBy {
    /// [`PhaseTuning::geometry`].
    Caller,
    /// A table that was measured on this GPU's model.
    Table,
    /// The rule for all others.
    Rule,
}

impl fmt::Display for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Launch { blocks, threads, parts, unroll, .. } = self;
        write!(f, "{blocks}x{threads} {parts}/{unroll}")
    }
}

impl Measure {
    /// Whether anything is left out.
    pub(crate) fn is_on(&self) -> bool {
        *self != Self::default()
    }
}

impl Tuning {
    /// # Errors
    /// [`Error::Invalid`] for threads that no kernel can have, or no blocks.
    pub(crate) fn check(&self) -> Result<()> {
        for (phase, name) in [(self.dispatch, "dispatch"), (self.combine, "combine")] {
            if let Some((blocks, threads)) = phase.geometry {
                // 64: a thread for each rank; derived from MAX_RANKS. 1024: spec.
                if blocks == 0 || !threads.is_multiple_of(64) || !(64..=1024).contains(&threads) {
                    let want = "at least 1 block, of 64 to 1024 threads, a multiple of 64";
                    return Err(Error::invalid("ep setup", format!("{name} geometry"), format!("{blocks}x{threads}"), want));
                }
            }
            if phase.sms == Some(0) {
                return Err(Error::invalid("ep setup", format!("{name} sms"), 0, "at least 1"));
            }
        }
        Ok(())
    }
}

/// What the host knows of a call's number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Tokens {
    /// There are not more: a host integer, or the rows behind a device count.
    pub most: u32,
    /// What launches are made for.
    pub likely: u32,
}

impl Tokens {
    /// A number that the host knows.
    pub fn exactly(num_tokens: u32) -> Self {
        Tokens { most: num_tokens, likely: num_tokens }
    }
}

/// Numbers of tokens that are launched alike, but for the number of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Class {
    /// A decoding step: latency is all.
    Few = 0,
    Some = 1,
    /// The memory is busy.
    Many = 2,
}

impl Class {
    pub const ALL: [Class; 3] = [Class::Few, Class::Some, Class::Many];

    /// Most tokens of a class.
    pub fn most(self) -> u32 {
        [16, 512, u32::MAX][self as usize]
    }

    /// The number of tokens that stands for a class.
    pub fn typical(self) -> u32 {
        [1, 128, 4096][self as usize]
    }

    /// Measured (one H200, 7168 bf16, top-8 of 256) at 1, 128 and 4096 tokens; the bounds between them are arbitrary.
    pub fn of(num_tokens: u32) -> Self {
        Self::within(num_tokens, Class::Some.most())
    }

    /// The same where the middle class ends at `most_some` tokens.
    pub fn within(num_tokens: u32, most_some: u32) -> Self {
        match num_tokens {
            0..=16 => Class::Few,
            _ if num_tokens <= most_some => Class::Some,
            _ => Class::Many,
        }
    }
}

/// How a row is shared out: so many warps, so many vectors of a lane at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Split {
    pub parts: u16,
    pub unroll: u16,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.parts, self.unroll)
    }
}

/// Lanes of a warp (NVIDIA: spec).
pub(crate) const LANES: u32 = 32;

impl Split {
    /// About `wanted` parts of a row of `num_vectors`, each of a multiple of `align` vectors (a part alone may have any number), with at most
    /// `max_unroll` vectors of a lane at a time. Parts that all lanes fill in whole steps come first: no vector is tested then.
    pub fn new(num_vectors: u32, wanted: u32, max_unroll: u32, align: u32) -> Self {
        let groups = num_vectors.div_ceil(LANES).max(1);
        let (wanted, max_unroll) = (wanted.clamp(1, groups), max_unroll.max(1));
        let split = |parts: u32| {
            let steps = num_vectors.div_ceil(parts).div_ceil(LANES).max(1);
            // In equal steps, with whole divisors where they are not much smaller.
            let fewest = steps.div_ceil(max_unroll);
            let even = steps.div_ceil(fewest);
            let divisor = (1..=max_unroll.min(steps)).rev().find(|unroll| steps.is_multiple_of(*unroll)).unwrap_or(1);
            let unroll = if 2 * divisor >= even { divisor } else { even };
            let is_whole = num_vectors.is_multiple_of(parts * unroll * LANES);
            let distance = parts.max(wanted) * 100 / parts.min(wanted); // a ratio, in hundredths
            (!is_whole, distance, parts, unroll)
        };
        let is_valid = |parts: &u32| *parts == 1 || num_vectors.div_ceil(*parts).is_multiple_of(align);
        // What is whole is only better while it is near to what is wanted: 4 times is arbitrary.
        let rank = |&(not_whole, distance, parts, _): &(bool, u32, u32, u32)| (not_whole || distance >= 400, distance, parts);
        let best = (1..=groups).filter(is_valid).map(split).min_by_key(rank);
        let (_, _, parts, unroll) = best.unwrap_or((true, 0, 1, 1)); // there is always 1 part
        Split { parts: parts as u16, unroll: unroll as u16 }
    }
}

/// Registers that a thread may have in a block of so many threads (spec: 65536 of a multiprocessor, 255 of a thread).
pub(crate) fn registers(threads: u32) -> u32 {
    (65536 / threads.max(1)).min(255)
}

/// Blocks of `warps` warps for so many items of work, a warp each.
pub(crate) fn blocks_for(num_items: u64, threads: u32) -> u32 {
    u32::try_from(num_items.div_ceil(u64::from(threads / LANES))).unwrap_or(u32::MAX).max(1)
}

/// Each once, in their order.
pub(crate) fn without_repeats<T: PartialEq>(all: Vec<T>) -> Vec<T> {
    let mut unique: Vec<T> = Vec::with_capacity(all.len());
    for one in all {
        if !unique.contains(&one) {
            unique.push(one);
        }
    }
    unique
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_split_evenly() {
        let split = |n, wanted, unroll, align| {
            let Split { parts, unroll } = Split::new(n, wanted, unroll, align);
            (parts, unroll)
        };
        // 7168 bf16: 28 groups of 32 vectors.
        assert_eq!([1, 2, 4, 7, 14, 28].map(|wanted| split(896, wanted, 28, 1)), [(1, 28), (2, 14), (4, 7), (7, 4), (14, 2), (28, 1)]);
        assert_eq!(split(896, 100, 28, 1), (28, 1));
        assert_eq!(split(896, 1, 20, 1), (1, 14));
        assert_eq!(split(896, 3, 28, 1), (4, 7));
        // 2880 bf16: 360 vectors, no whole groups.
        let (parts, unroll) = split(360, 4, 28, 1);
        assert!((3..=5).contains(&parts) && u32::from(unroll) == 360u32.div_ceil(parts.into()).div_ceil(32), "{parts} {unroll}");
        // Blocks of 128 elements stay together.
        for (n, wanted) in [(448, 4), (17, 4), (180, 5), (1, 3), (8, 8)] {
            let (parts, _) = split(n, wanted, 14, 8);
            assert!(parts == 1 || n.div_ceil(u32::from(parts)).is_multiple_of(8), "{n} {wanted}: {parts}");
        }
        assert_eq!(split(0, 4, 28, 1), (1, 1));
        // A prime number of steps above the limit.
        assert_eq!(split(29 * 32, 1, 28, 1).1, 15);
    }

    #[test]
    fn every_vector_has_a_lane() {
        for n in 1..2000 {
            for (wanted, max_unroll, align) in [(1, 28, 1), (4, 14, 8), (28, 1, 32), (7, 2, 1)] {
                let Split { parts, unroll } = Split::new(n, wanted, max_unroll, align);
                assert!((1..=max_unroll as u16).contains(&unroll) && parts >= 1, "{n} {wanted}: {parts} {unroll}");
                assert!(u32::from(parts) <= n.div_ceil(LANES), "{n} {wanted}: {parts}");
            }
        }
    }

    #[test]
    fn what_no_kernel_can_have() {
        let of = |geometry, sms| Tuning { combine: PhaseTuning { geometry, sms }, ..Tuning::default() }.check().is_ok();
        assert!(of(None, None) && of(Some((1, 64)), Some(1)) && of(Some((4096, 1024)), None));
        assert!(!of(Some((0, 64)), None) && !of(Some((1, 96)), None) && !of(Some((1, 2048)), None) && !of(None, Some(0)));
    }

    #[test]
    fn classes() {
        assert_eq!([0, 1, 16, 17, 512, 513, u32::MAX].map(Class::of), {
            use Class::*;
            [Few, Few, Few, Some, Some, Many, Many]
        });
        assert_eq!([16, 64, 65].map(|num_tokens| Class::within(num_tokens, 64)), [Class::Few, Class::Some, Class::Many]);
        assert_eq!(Class::ALL.map(|class| class as usize), [0, 1, 2]);
        assert_eq!((registers(256), registers(512), registers(1024), blocks_for(0, 256), blocks_for(9, 256)), (255, 128, 64, 1, 2));
    }
}
