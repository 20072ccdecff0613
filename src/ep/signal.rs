//! The words that peers poll, and the only code that reads or writes them.
//!
//! Everything here is generic over [`Memory`], so that the same functions run on the atomics of the machine and on those of a model checker.
//! Words are read and written relaxed; order comes from the two fences alone, as on a GPU: a rank that publishes issues [`Memory::release`]
//! once and then stores to all its peers, a rank that waited issues [`Memory::acquire`] once after all its polls succeeded.
#![forbid(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Atomic memory as the protocol uses it.
#[doc(hidden)]
pub trait Memory {
    /// A 64-bit word with one writer.
    type Word: Word;

    /// What this thread wrote becomes visible to whoever reads a word stored after this.
    fn release();

    /// What was written before the stores of the words that this thread has read becomes visible to it.
    fn acquire();
}

/// A word, read and written relaxed.
#[doc(hidden)]
pub trait Word {
    /// A word of value 0: epochs start at 1.
    fn zero() -> Self;
    /// Relaxed load.
    fn load(&self) -> u64;
    /// Relaxed store.
    fn store(&self, value: u64);
}

/// The atomics of the machine.
#[derive(Debug)]
#[doc(hidden)]
pub struct Machine;

impl Memory for Machine {
    type Word = AtomicU64;

    fn release() {
        fence(Ordering::Release);
    }

    fn acquire() {
        fence(Ordering::Acquire);
    }
}

impl Word for AtomicU64 {
    fn zero() -> Self {
        AtomicU64::new(0)
    }

    fn load(&self) -> u64 {
        AtomicU64::load(self, Ordering::Relaxed)
    }

    fn store(&self, value: u64) {
        AtomicU64::store(self, value, Ordering::Relaxed);
    }
}

/// Bits of the fields of a count word (from DESIGN 5): epoch 40, count 20, bank 1, invalid 1, kind 2.
const COUNT_BITS: u32 = 20;
const EPOCH_SHIFT: u32 = COUNT_BITS + 4;
/// Largest count that a word carries.
pub(crate) const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

/// Which call a count word belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub enum Kind {
    /// `dispatch`.
    Dispatch = 1,
    /// `replay`.
    Replay = 2,
}

/// A count word, unpacked. The word is at the same time the credit: its sender lets the reader write into the bank that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub struct CountWord {
    /// Call number, from 1; 40 bits last 34 years at a call every millisecond.
    pub epoch: u64,
    /// Rows, at most 2^20 - 1.
    pub count: u64,
    /// Bank of the sender that may be written.
    pub bank: u64,
    /// The sender has more tokens than `max_tokens`; the counts are then the bits of that number.
    pub invalid: bool,
    /// Bits of the sender's [`Kind`].
    pub kind: u64,
}

impl CountWord {
    /// Packs the fields.
    pub fn pack(self) -> u64 {
        self.epoch << EPOCH_SHIFT | (self.count & COUNT_MASK) << 4 | self.bank << 3 | u64::from(self.invalid) << 2 | self.kind
    }

    /// Unpacks a word.
    pub fn unpack(word: u64) -> Self {
        CountWord {
            epoch: word >> EPOCH_SHIFT,
            count: word >> 4 & COUNT_MASK,
            bank: word >> 3 & 1,
            invalid: word >> 2 & 1 == 1,
            kind: word & 3,
        }
    }
}

/// The words of one rank: each peer writes its own, this rank reads them all. `S` holds them: a vector, or memory that processes share.
#[derive(Debug)]
#[doc(hidden)]
pub struct Signals<M: Memory, S = Vec<<M as Memory>::Word>> {
    /// `[2 parities of the epoch, sender, word]` counts, compared with `==`; then `[sender]` done, the last dispatch whose rows are complete
    /// here, and `[sender]` ready, the last combine for which the sender's rows may be read: both only grow.
    words: S,
    world: usize,
    num_words: usize,
    memory: PhantomData<fn() -> M>,
}

impl<M: Memory> Signals<M> {
    /// Words of a rank in a world, all 0.
    pub fn new(world: usize, num_words: usize) -> Self {
        let zeros = (0..num_signal_words(world, num_words)).map(|_| M::Word::zero()).collect();
        Self::over(zeros, world, num_words)
    }
}

/// Words that a rank has in a world where each sender has `num_words` counts.
pub(crate) fn num_signal_words(world: usize, num_words: usize) -> usize {
    2 * world * num_words + 2 * world
}

impl<M: Memory, S: Deref<Target = [M::Word]>> Signals<M, S> {
    /// The words in `words`, all 0 at first.
    ///
    /// # Panics
    /// When there are fewer than a rank needs.
    pub fn over(words: S, world: usize, num_words: usize) -> Self {
        assert!(words.len() >= num_signal_words(world, num_words), "{} words", words.len());
        Signals { words, world, num_words, memory: PhantomData }
    }

    /// The words of `sender` for the parity of `epoch`.
    fn count_words(&self, sender: usize, epoch: u64) -> &[M::Word] {
        &self.words[((epoch & 1) as usize * self.world + sender) * self.num_words..][..self.num_words]
    }

    fn done(&self, sender: usize) -> &M::Word {
        &self.words[2 * self.world * self.num_words + sender]
    }

    fn ready(&self, sender: usize) -> &M::Word {
        &self.words[2 * self.world * self.num_words + self.world + sender]
    }

    /// Stores the count words of `me` here. The caller has issued [`Memory::release`] after the last access that they give away.
    // sync counts: pairs with the acquire after `poll_counts` in the dispatch of the peer
    pub fn post_counts(&self, me: usize, words: &[CountWord]) {
        for (word, value) in self.count_words(me, words[0].epoch).iter().zip(words) {
            word.store(value.pack());
        }
    }

    /// Reads the words of `sender` from `first` on while they are of `epoch`; returns how many were and gives each to `take`.
    /// After the last, the caller issues [`Memory::acquire`].
    pub fn poll_counts(&self, sender: usize, epoch: u64, first: usize, mut take: impl FnMut(usize, CountWord)) -> usize {
        let words = self.count_words(sender, epoch);
        for (i, word) in words.iter().enumerate().skip(first) {
            let word = CountWord::unpack(word.load());
            if word.epoch != epoch {
                return i;
            }
            take(i, word);
        }
        words.len()
    }

    /// Epoch of the first word of `sender`, for error records.
    pub fn seen_counts(&self, sender: usize, epoch: u64) -> u64 {
        CountWord::unpack(self.count_words(sender, epoch)[0].load()).epoch
    }

    /// Says that the rows of `me` for dispatch `epoch` are complete here. The caller has issued [`Memory::release`] after writing them.
    // sync done: pairs with the acquire after `seen_done` in dispatch_receive
    pub fn post_done(&self, me: usize, epoch: u64) {
        self.done(me).store(epoch);
    }

    /// The last dispatch that `sender` completed here; waits compare with `>=`.
    pub fn seen_done(&self, sender: usize) -> u64 {
        self.done(sender).load()
    }

    /// Says that the rows of `me` for combine `epoch` may be read. The caller has issued [`Memory::release`] after writing them.
    // sync ready: pairs with the acquire after `seen_ready` in combine_receive
    pub fn post_ready(&self, me: usize, epoch: u64) {
        self.ready(me).store(epoch);
    }

    /// The last combine for which `sender` is ready; waits compare with `>=`.
    pub fn seen_ready(&self, sender: usize) -> u64 {
        self.ready(sender).load()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_words_keep_every_field() {
        for epoch in [1, 2, (1 << 40) - 1] {
            for count in [0, 1, COUNT_MASK] {
                for flags in 0..4u64 {
                    for kind in [Kind::Dispatch as u64, Kind::Replay as u64] {
                        let word = CountWord { epoch, count, bank: flags & 1, invalid: flags & 2 != 0, kind };
                        assert_eq!(CountWord::unpack(word.pack()), word);
                    }
                }
            }
        }
    }

    #[test]
    fn words_of_other_epochs_stop_the_poll() {
        let signals = Signals::<Machine>::new(2, 3);
        let word = |epoch, count| CountWord { epoch, count, bank: 0, invalid: false, kind: 1 };
        signals.post_counts(1, &[word(1, 10), word(1, 11), word(1, 12)]);
        let mut seen = Vec::new();
        assert_eq!(signals.poll_counts(1, 1, 0, |i, w| seen.push((i, w.count))), 3);
        assert_eq!(seen, [(0, 10), (1, 11), (2, 12)]);
        // The same parity two epochs later, and the other sender, are not there yet.
        assert_eq!(signals.poll_counts(1, 3, 0, |_, _| panic!("stale word taken")), 0);
        assert_eq!(signals.poll_counts(0, 1, 0, |_, _| panic!("foreign word taken")), 0);
        assert_eq!((signals.seen_counts(1, 3), signals.seen_counts(1, 2)), (1, 0));
    }
}
