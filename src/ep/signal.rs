//! The words that peers poll, and the only code that reads or writes them.
//!
//! Everything here is generic over [`Memory`], so that the same functions run on the atomics of the machine and on those of a model checker.
//! Words are read and written relaxed; order comes from the two fences alone, as on a GPU: a rank that publishes issues [`Memory::release`]
//! once and then stores to all its peers, a rank that waited issues [`Memory::acquire`] once after all its polls succeeded. Every fence says
//! which [`Label`] it belongs to, so that a model checker can leave out each of them; `PROTOCOL.md` has the list.
#![forbid(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// What a pair of fences orders. Code names it at every fence: as this value, and in kernels as `sync NAME`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub enum Label {
    /// Count words: staged rows are complete, and the bank that the words name may be written.
    Counts,
    /// Done words: the rows of a dispatch are complete.
    Done,
    /// Ready words: the rows of a combine are complete.
    Ready,
    /// The abort word: the record of the first failure is complete.
    First,
    /// A rank has left; its words are all there.
    Left,
    /// A rank has entered a collective call; what it did before is there.
    Meet,
    /// Doorbells: a sleeper and who wakes it do not miss each other.
    Bell,
}

impl Label {
    /// All of them.
    pub const ALL: [Label; 7] = [Label::Counts, Label::Done, Label::Ready, Label::First, Label::Left, Label::Meet, Label::Bell];

    /// The name in `PROTOCOL.md`.
    pub const fn name(self) -> &'static str {
        match self {
            Label::Counts => "counts",
            Label::Done => "done",
            Label::Ready => "ready",
            Label::First => "first",
            Label::Left => "left",
            Label::Meet => "meet",
            Label::Bell => "bell",
        }
    }
}

/// What the protocol decides by number. A model checker puts other rules in their place, to see that these are needed.
#[doc(hidden)]
pub trait Rules {
    /// Which of the two copies of the count words epoch `epoch` uses.
    fn parity(epoch: u64) -> usize {
        (epoch & 1) as usize
    }

    /// Whether a count word is of `epoch`.
    fn is_of(seen: u64, epoch: u64) -> bool {
        seen == epoch
    }

    /// Whether a done or ready word says that `epoch` has come.
    fn has_come(seen: u64, epoch: u64) -> bool {
        seen >= epoch
    }

    /// The bank of dispatch `epoch`: they alternate.
    fn bank(epoch: u64, in_flight: usize) -> usize {
        epoch as usize % in_flight
    }

    /// Which ready word of a sender is that of `bank`.
    fn ready_word(bank: usize) -> usize {
        bank
    }

    /// Copies of the staging.
    fn staging_copies(in_flight: usize) -> usize {
        in_flight + 1
    }

    /// The copy of the staging that `epoch` uses.
    fn staging_copy(epoch: u64, in_flight: usize) -> usize {
        epoch as usize % Self::staging_copies(in_flight)
    }
}

/// Atomic memory as the protocol uses it.
#[doc(hidden)]
pub trait Memory: Rules {
    /// A 64-bit word with one writer.
    type Word: Word;

    /// What this thread wrote becomes visible to whoever reads a word stored after this.
    fn release(label: Label);

    /// What was written before the stores of the words that this thread has read becomes visible to it.
    fn acquire(label: Label);
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
    /// Relaxed store, if the value is 0.
    fn claim(&self, value: u64);
}

/// The atomics of the machine.
#[derive(Debug)]
#[doc(hidden)]
pub struct Machine;

impl Rules for Machine {}

impl Memory for Machine {
    type Word = AtomicU64;

    fn release(_: Label) {
        fence(Ordering::Release);
    }

    fn acquire(_: Label) {
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

    fn claim(&self, value: u64) {
        // Who comes later changes nothing, and finds the other's value when it reads.
        let _ = self.compare_exchange(0, value, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Stores a word that says that all before it is there.
#[doc(hidden)]
pub fn publish<M: Memory>(label: Label, word: &M::Word, value: u64) {
    M::release(label);
    word.store(value);
}

/// As [`publish`], for the one of several writers that comes first.
#[doc(hidden)]
pub fn publish_first<M: Memory>(label: Label, word: &M::Word, value: u64) {
    M::release(label);
    word.claim(value);
}

/// Reads such a word; unless it is 0, what came before it is there.
#[doc(hidden)]
#[inline]
pub fn observe<M: Memory>(label: Label, word: &M::Word) -> u64 {
    let value = word.load();
    if value != 0 {
        M::acquire(label);
    }
    value
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
    /// here, and `[2 banks, sender]` ready, the epoch of the bank's arrival whose rows the reader may read for a combine: both only grow.
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
    2 * world * num_words + 3 * world
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
        &self.words[(M::parity(epoch) * self.world + sender) * self.num_words..][..self.num_words]
    }

    fn done(&self, sender: usize) -> &M::Word {
        &self.words[2 * self.world * self.num_words + sender]
    }

    fn ready(&self, sender: usize, bank: usize) -> &M::Word {
        &self.words[2 * self.world * self.num_words + (1 + M::ready_word(bank)) * self.world + sender]
    }

    /// Stores the count words of `me` here. The caller has issued [`Memory::release`] after the last access that they give away.
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
            if !M::is_of(word.epoch, epoch) {
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
    pub fn post_done(&self, me: usize, epoch: u64) {
        self.done(me).store(epoch);
    }

    /// Whether `sender` has completed its rows of dispatch `epoch` here.
    pub fn is_done(&self, sender: usize, epoch: u64) -> bool {
        M::has_come(self.seen_done(sender), epoch)
    }

    /// The last dispatch that `sender` completed here.
    pub fn seen_done(&self, sender: usize) -> u64 {
        self.done(sender).load()
    }

    /// Says that the rows of `me` for the combine of the arrival of `epoch` in `bank` may be read. The caller has issued
    /// [`Memory::release`] after writing them. An arrival is combined at most once and those of a bank are ordered, so nobody counts combines.
    pub fn post_ready(&self, me: usize, bank: usize, epoch: u64) {
        self.ready(me, bank).store(epoch);
    }

    /// Whether the rows of `sender` for the combine of the arrival of `epoch` in `bank` may be read.
    pub fn is_ready(&self, sender: usize, bank: usize, epoch: u64) -> bool {
        M::has_come(self.seen_ready(sender, bank), epoch)
    }

    /// Epoch of the last arrival of `bank` for whose combine `sender` is ready.
    pub fn seen_ready(&self, sender: usize, bank: usize) -> u64 {
        self.ready(sender, bank).load()
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

    #[test]
    fn ready_words_of_two_banks_are_two() {
        let signals = Signals::<Machine>::new(2, 1);
        signals.post_ready(1, 0, 4);
        signals.post_ready(1, 1, 3);
        assert_eq!([0, 1].map(|bank| signals.seen_ready(1, bank)), [4, 3]);
        assert_eq!([0, 1].map(|bank| signals.seen_ready(0, bank)), [0, 0]);
        assert!(signals.is_ready(1, 1, 3) && !signals.is_ready(1, 1, 5));
    }
}
