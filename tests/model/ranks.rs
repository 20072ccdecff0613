//! Ranks that take the library's steps over the library's words, on payload that a checker watches.

use std::marker::PhantomData;

use moe_kernels::ep::signal::{CountWord, Kind, Label, Memory, Rules, Signals, Word};
use moe_kernels::ep::steps::{COMBINE_RECEIVE, COMBINE_SEND, DISPATCH_RECEIVE, DISPATCH_SEND, Step, Walker, walk};

use super::platform::{Payload, Platform, ensure};

/// A call of one rank, or half of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    Send,
    Receive,
    CombineSend,
    CombineReceive,
}

use Half::*;

/// What every rank calls, and how.
#[derive(Debug, Clone, Copy)]
pub struct Script {
    pub name: &'static str,
    pub in_flight: usize,
    /// Rows beyond those that travel with the counts.
    pub has_rows: bool,
    /// The epoch in which rank 0 has none of them.
    pub empty: Option<u64>,
    /// Staged rows as on GPUs: words that carry their own flag.
    pub packets: bool,
    /// The epoch that rank 0 makes all refuse.
    pub refused: Option<u64>,
    /// Halves of dispatches, by epoch.
    pub calls: &'static [(Half, u64)],
}

const ROUND_TRIPS: Script = Script {
    name: "round trips",
    in_flight: 1,
    has_rows: true,
    empty: None,
    packets: false,
    refused: None,
    calls: &[
        (Send, 1),
        (Receive, 1),
        (CombineSend, 1),
        (CombineReceive, 1),
        (Send, 2),
        (Receive, 2),
        (CombineSend, 2),
        (CombineReceive, 2),
    ],
};

/// Every script. Each is as short as shows what it is for.
pub const SCRIPTS: [Script; 7] = [
    Script {
        name: "staged rows only",
        has_rows: false,
        calls: &[(Send, 1), (Receive, 1), (Send, 2), (Receive, 2), (Send, 3), (Receive, 3)],
        ..ROUND_TRIPS
    },
    Script { name: "a refused dispatch", refused: Some(1), calls: &[(Send, 1), (Receive, 1), (Send, 2), (Receive, 2)], ..ROUND_TRIPS },
    ROUND_TRIPS,
    Script { name: "an empty rank", empty: Some(2), ..ROUND_TRIPS },
    Script { name: "two banks ahead", in_flight: 2, calls: &[(Send, 1), (Send, 2), (Receive, 1), (Receive, 2), (Send, 3)], ..ROUND_TRIPS },
    Script {
        name: "two banks, combined in reverse",
        in_flight: 2,
        calls: &[
            (Send, 1),
            (Receive, 1),
            (Send, 2),
            (Receive, 2),
            (CombineSend, 2),
            (CombineReceive, 2),
            (CombineSend, 1),
            (CombineReceive, 1),
        ],
        ..ROUND_TRIPS
    },
    Script {
        name: "packets",
        packets: true,
        calls: &[(Send, 1), (Receive, 1), (Send, 2), (Receive, 2), (Send, 3), (Receive, 3)],
        ..ROUND_TRIPS
    },
];

impl Script {
    /// What a rank does, step by step, with the epoch of each.
    pub fn steps(&self) -> Vec<(u64, Step)> {
        let of = |half: Half| -> &'static [Step] {
            match half {
                Send => &DISPATCH_SEND,
                Receive => &DISPATCH_RECEIVE,
                CombineSend => &COMBINE_SEND,
                CombineReceive => &COMBINE_RECEIVE,
            }
        };
        self.calls.iter().flat_map(|&(half, epoch)| of(half).iter().map(move |&step| (epoch, step))).collect()
    }
}

/// A rank's memory: its words, and a row of each kind for each peer.
struct RankMemory<P: Platform> {
    signals: Signals<P::Memory>,
    /// What each sender staged, by copy.
    staged: Vec<Vec<P::Payload>>,
    /// The same as words with flags.
    packets: Vec<Vec<<P::Memory as Memory>::Word>>,
    /// The row of each sender, by bank.
    rows: Vec<Vec<P::Payload>>,
    /// What the experts wrote and peers read, by bank.
    output: Vec<P::Payload>,
}

pub struct Ranks<P: Platform>(Vec<RankMemory<P>>);

impl<P: Platform> Ranks<P> {
    pub fn new(world: usize, in_flight: usize) -> Self {
        let payload = |_| P::Payload::new();
        let rank = |_| RankMemory {
            signals: Signals::new(world, 1),
            staged: (0..=in_flight).map(|_| (0..world).map(payload).collect()).collect(),
            packets: (0..=in_flight).map(|_| (0..world).map(|_| <P::Memory as Memory>::Word::zero()).collect()).collect(),
            rows: (0..in_flight).map(|_| (0..world).map(payload).collect()).collect(),
            output: (0..in_flight).map(payload).collect(),
        };
        Ranks((0..world).map(rank).collect())
    }
}

/// One rank on its way.
struct Rank<'a, P: Platform> {
    ranks: &'a Ranks<P>,
    script: &'a Script,
    me: usize,
    epoch: u64,
    /// Some word of this epoch said that the call is refused.
    is_invalid: bool,
    /// The last epoch that was decided to go on.
    decided: u64,
    /// The epoch whose rows were arranged last, by bank.
    arranged: [u64; 2],
    /// The epoch whose rows were pulled last.
    pulled: u64,
    platform: PhantomData<P>,
}

/// The call is refused.
struct Refused;

/// Every rank's row of every epoch is another one.
fn value(epoch: u64, rank: usize) -> u64 {
    epoch * 100 + rank as u64
}

impl<P: Platform> Rank<'_, P> {
    /// Whether a rank sends rows in this epoch.
    fn sends(&self, rank: usize) -> bool {
        self.script.has_rows && !(rank == 0 && self.script.empty == Some(self.epoch))
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<P> {
        let (me, world) = (self.me, self.ranks.0.len());
        (1..world).map(move |i| (me + i) % world)
    }

    fn bank(&self) -> usize {
        P::Memory::bank(self.epoch, self.script.in_flight)
    }

    fn copy(&self) -> usize {
        P::Memory::staging_copy(self.epoch, self.script.in_flight)
    }

    fn wait(&self, is_there: impl Fn(usize) -> bool) {
        self.peers().for_each(|peer| until::<P>(|| is_there(peer)));
    }
}

/// Waits until `is_there`, or the model has failed.
fn until<P: Platform>(mut is_there: impl FnMut() -> bool) {
    let mut polls = 0;
    while !is_there() && !P::has_failed() {
        polls += 1;
        P::pause(polls);
    }
}

/// A staged row as a word with its flag.
fn packet(epoch: u64, rank: usize) -> u64 {
    epoch << 32 | value(epoch, rank)
}

impl<P: Platform> Walker for Rank<'_, P> {
    type Memory = P::Memory;
    type Error = Refused;

    fn take(&mut self, step: Step) -> Result<(), Refused> {
        let (me, epoch, bank, copy) = (self.me, self.epoch, self.bank(), self.copy());
        let mine = &self.ranks.0[me];
        match step {
            Step::Stage => {
                for peer in self.peers() {
                    let to = &self.ranks.0[peer];
                    match self.script.packets {
                        true => to.packets[copy][me].store(packet(epoch, me)),
                        false => to.staged[copy][me].write(value(epoch, me)),
                    }
                }
            }
            Step::Post(Label::Counts) => {
                let invalid = self.script.refused == Some(epoch) && me == 0;
                self.is_invalid = invalid;
                let word = CountWord { epoch, count: value(epoch, me), bank: bank as u64, invalid, kind: Kind::Dispatch as u64 };
                self.peers().for_each(|peer| self.ranks.0[peer].signals.post_counts(me, &[word]));
            }
            Step::Poll(Label::Counts) => {
                for peer in self.peers() {
                    let mut take = |_, word: CountWord| {
                        ensure::<P>(word.count == value(epoch, peer), "counts of another epoch");
                        self.is_invalid |= word.invalid;
                    };
                    until::<P>(|| mine.signals.poll_counts(peer, epoch, 0, &mut take) == 1);
                }
            }
            Step::Decide if self.is_invalid => return Err(Refused),
            Step::Decide => self.decided = epoch,
            Step::WriteRows => {
                ensure::<P>(self.decided == epoch, "rows of a call that was not decided");
                if self.sends(me) {
                    self.peers().for_each(|peer| self.ranks.0[peer].rows[bank][me].write(value(epoch, me)));
                }
            }
            Step::Post(Label::Done) => self.peers().for_each(|peer| self.ranks.0[peer].signals.post_done(me, epoch)),
            Step::Poll(Label::Done) => self.wait(|peer| !self.sends(peer) || mine.signals.is_done(peer, epoch)),
            Step::Arrange => {
                for peer in self.peers() {
                    let row = match self.script.packets {
                        true => {
                            let mut word = 0;
                            until::<P>(|| {
                                word = mine.packets[copy][peer].load();
                                word >> 32 == epoch
                            });
                            word & 0xFFFF_FFFF
                        }
                        false => mine.staged[copy][peer].read(),
                    };
                    ensure::<P>(row == value(epoch, peer), "a staged row of another epoch");
                    if self.sends(peer) {
                        ensure::<P>(mine.rows[bank][peer].read() == value(epoch, peer), "a row of another epoch");
                        // The bank is this rank's alone.
                        mine.rows[bank][peer].write(0);
                    }
                }
                self.arranged[bank] = epoch;
            }
            Step::WireForm => mine.output[bank].write(value(self.arranged[bank], me)),
            Step::Post(Label::Ready) => self.peers().for_each(|peer| self.ranks.0[peer].signals.post_ready(me, bank, epoch)),
            Step::Poll(Label::Ready) => self.wait(|peer| !self.sends(me) || mine.signals.is_ready(peer, bank, epoch)),
            Step::Pull => {
                for peer in self.peers().filter(|_| self.sends(me)) {
                    let output = self.ranks.0[peer].output[bank].read();
                    ensure::<P>(output == value(epoch, peer), "an output of another epoch");
                }
                self.pulled = epoch;
            }
            other => panic!("{other} is no step of any half"),
        }
        Ok(())
    }
}

/// Lets every rank of `world` take `steps` in many ways.
pub fn explore<P: Platform>(script: &'static Script, world: usize, steps: &'static [(u64, Step)]) {
    P::explore(
        world,
        move || Ranks::<P>::new(world, script.in_flight),
        move |ranks, me| {
            let mut rank =
                Rank { ranks, script, me, epoch: 0, is_invalid: false, decided: 0, arranged: [0; 2], pulled: 0, platform: PhantomData };
            let mut refused = 0;
            for &(epoch, step) in steps.iter() {
                rank.epoch = epoch;
                if P::has_failed() {
                    return;
                }
                if epoch != refused && walk(&[step], &mut rank).is_err() {
                    refused = epoch;
                }
            }
            let to_pull = script.calls.iter().rev().find(|call| call.0 == CombineReceive).map_or(0, |call| call.1);
            ensure::<P>(rank.pulled == to_pull, "rows that nobody pulled");
        },
    );
}
