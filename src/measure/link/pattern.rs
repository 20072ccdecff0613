//! Who moves what when links are measured, and in which grids.
#![forbid(unsafe_code)]

use super::copies::THREADS;

/// GPUs between which links are measured at most (arbitrary: those of one host).
pub const MAX_GPUS: usize = 8;

/// Blocks of a multiprocessor that are tried (measured: 2 x H200, one direction: 64 blocks of 512 threads write 370 GB/s, 4224 no more; both at once: 64
/// write 362, 132 and more 366).
const BLOCKS_PER_SM: [u32; 3] = [1, 2, 4];

/// Who sends to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// The first GPU to the second.
    Alone,
    /// Each to all others.
    Together,
}

/// Some vectors of a call, from one GPU to the same place on another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    pub from: usize,
    pub to: usize,
    pub at: u64,
    pub num: u64,
}

impl Pattern {
    /// What one GPU moves when each sends `num_vectors`: what it sends, or, with `pulls`, what it receives. Together, part i of each GPU goes to the one that is
    /// i + 1 further, so at every moment each sends to one and receives from one; parts differ by one vector at most.
    pub fn moves(self, gpu: usize, num_gpus: usize, num_vectors: u64, pulls: bool) -> Vec<Move> {
        match self {
            Pattern::Alone if gpu == usize::from(pulls) => vec![Move { from: 0, to: 1, at: 0, num: num_vectors }],
            Pattern::Alone => Vec::new(),
            Pattern::Together => {
                let num_parts = num_gpus as u64 - 1;
                let (least, num_longer) = (num_vectors / num_parts, num_vectors % num_parts);
                let part = |i: u64| {
                    let further = i as usize + 1;
                    let (from, to) = if pulls { ((gpu + num_gpus - further) % num_gpus, gpu) } else { (gpu, (gpu + further) % num_gpus) };
                    Move { from, to, at: i * least + i.min(num_longer), num: least + u64::from(i < num_longer) }
                };
                (0..num_parts).map(part).collect()
            }
        }
    }
}

/// Blocks of each of `num_pieces` pieces, of which the longest has `most_vectors`, in the grids that are tried.
pub fn grids(num_sms: u32, num_pieces: usize, most_vectors: u64) -> Vec<u32> {
    let enough = most_vectors.div_ceil(u64::from(THREADS));
    let mut grids = BLOCKS_PER_SM.map(|blocks| (u64::from(blocks * num_sms) / num_pieces as u64).clamp(1, enough.max(1)) as u32).to_vec();
    grids.dedup();
    grids
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pattern: Pattern, num_gpus: usize, num_vectors: u64, pulls: bool) -> Vec<Move> {
        let mut moves: Vec<Move> = (0..num_gpus).flat_map(|gpu| pattern.moves(gpu, num_gpus, num_vectors, pulls)).collect();
        moves.sort_by_key(|m| (m.from, m.to));
        moves
    }

    #[test]
    fn every_pair_of_gpus_gets_the_same() {
        for num_gpus in 2..=MAX_GPUS {
            let num_parts = num_gpus as u64 - 1;
            for num_vectors in [num_parts, num_parts + 1, 100 * num_parts - 1, 4096, 4097, 99_991] {
                let moves = all(Pattern::Together, num_gpus, num_vectors, false);
                assert_eq!(moves, all(Pattern::Together, num_gpus, num_vectors, true), "what is sent is what is received");
                let pairs: Vec<_> = moves.iter().map(|m| (m.from, m.to)).collect();
                let want: Vec<_> = (0..num_gpus).flat_map(|a| (0..num_gpus).map(move |b| (a, b))).filter(|(a, b)| a != b).collect();
                assert_eq!(pairs, want, "each pair once");
                let (least, most) = (moves.iter().map(|m| m.num).min().unwrap(), moves.iter().map(|m| m.num).max().unwrap());
                assert!(least > 0 && most - least == u64::from(num_vectors % num_parts != 0), "{least} to {most} of {num_vectors}");
                for gpu in 0..num_gpus {
                    for end in [|m: &Move| m.from, |m: &Move| m.to] {
                        let mut own: Vec<_> = moves.iter().filter(|m| end(m) == gpu).collect();
                        own.sort_by_key(|m| m.at);
                        let last = own.iter().fold(0, |at, m| {
                            assert_eq!(m.at, at, "no gap and no overlap");
                            at + m.num
                        });
                        assert_eq!(last, num_vectors);
                    }
                }
            }
        }
    }

    #[test]
    fn no_link_is_hot_at_any_moment() {
        for num_gpus in 2..=MAX_GPUS {
            for part in 0..num_gpus - 1 {
                for pulls in [false, true] {
                    let now: Vec<Move> = (0..num_gpus).map(|gpu| Pattern::Together.moves(gpu, num_gpus, 1000, pulls)[part]).collect();
                    for end in [|m: &Move| m.from, |m: &Move| m.to] {
                        let mut ends: Vec<usize> = now.iter().map(end).collect();
                        ends.sort_unstable();
                        assert_eq!(ends, (0..num_gpus).collect::<Vec<_>>(), "{num_gpus} GPUs, part {part}, pulls {pulls}");
                    }
                }
            }
        }
    }

    #[test]
    fn one_direction_is_one_move() {
        for pulls in [false, true] {
            assert_eq!(all(Pattern::Alone, 4, 1000, pulls), [Move { from: 0, to: 1, at: 0, num: 1000 }]);
            // The sender's kernel writes, the receiver's reads.
            assert_eq!(Pattern::Alone.moves(usize::from(!pulls), 4, 1000, pulls), []);
        }
    }

    #[test]
    fn grids_have_work_for_each_block() {
        assert_eq!(grids(132, 1, 1 << 20), [132, 264, 528]);
        assert_eq!(grids(132, 7, 1 << 20), [18, 37, 75]);
        assert_eq!(grids(132, 1, 4096), [16]);
        assert_eq!(grids(132, 1, 257 * 200), [132, 201]);
        assert_eq!(grids(4, 7, 1), [1]);
    }
}
