//! Who holds the waiting grids of a device, and how many blocks the grids of each object have.
//!
//! An object declares its grids when it is made, as large as they would be alone, and is refused then if even grids of one block would not fit beside what is
//! held. How many blocks they have is settled at the **first call**, when the objects that share the device are known: as many in each grid as fit when all
//! objects that have made no call yet get as many. That number never becomes smaller, since graphs keep what they captured, and queued kernels what they were
//! launched with; an object that finds all of it taken is refused with an error that says how many blocks would have been right for all.
//!
//! Objects that a rank uses in the same stream take turns there, so they count as one and cost each other nothing: this is how they all begin. Those that
//! [`set_stream`](crate::ep::ExpertParallel::set_stream) moves apart count beside each other from their next call on. A rank looks at its own streams, and takes
//! the other ranks of its world to use theirs alike: so ranks that run the same program come to the same answer, whoever is ahead.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Mutex;

use super::registry::{CONNECTIONS, Demand, Limits, Refusal, Waiting, judge};
use crate::ep::World;
use crate::ep::world::lock;
use crate::error::{Error, Result};
use crate::gpu::{Device, Stream};
use crate::id::Rank;
use crate::name::Name;

/// Whose demand it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    object: Object,
    rank: Rank,
    /// The stream that the object uses on this rank; `None`: it takes turns with no other.
    stream: Option<usize>,
}

/// A world of this process and one of its objects.
type Object = (usize, u64);

/// The right to launch the grids of a demand. Dropped when no kernel of them can run any more.
#[derive(Debug)]
#[must_use]
pub struct Permit {
    registry: &'static Registry,
    limits: Limits,
    id: u64,
}

/// The demands of a process, by device.
#[derive(Debug)]
struct Registry(Mutex<Entries>);

#[derive(Debug)]
struct Entries {
    entries: Vec<Entry>,
    num_added: u64,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    device: u32,
    holder: Holder,
    /// Of this process on this device.
    num_ranks: usize,
    demand: Demand,
    /// Since the first call of any rank of the object.
    settled: Option<Settled>,
}

/// What an object has of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    /// Most blocks of a grid of which the caller has not said how many.
    pub blocks: u32,
    /// Nothing else waits on the device.
    pub is_alone: bool,
}

/// That of this process.
static REGISTRY: Registry = Registry::new();

impl Holder {
    /// The object that this rank of `world` is setting up: all its ranks call this between the same two collective calls.
    pub fn of(world: &World) -> Self {
        let stream = world.member().cuda().map(|cuda| key_of(cuda.stream()));
        Holder { object: world.member().place_in_setup(), rank: world.rank(), stream }
    }

    /// Of an object that uses another stream than its world gave it.
    pub fn in_stream(self, stream: &Stream) -> Self {
        Holder { stream: Some(key_of(stream)), ..self }
    }
}

fn key_of(stream: &Stream) -> usize {
    stream.raw().addr()
}

/// Registers the demand of an object of one rank, of which `num_ranks` ranks of this process share the device, each with such a demand. All of them get the same
/// answer, whichever comes first.
///
/// # Errors
/// [`Error::Invalid`] that says how many multiprocessors are needed, why, who holds how many, and how many blocks would fit;
/// [`Error::Unsupported`] when no grid does.
pub fn register(op: Name, device: &Device, holder: Holder, num_ranks: usize, demand: Demand) -> Result<Permit> {
    REGISTRY.register(op, Limits::of(device), device.ordinal(), holder, num_ranks, demand)
}

impl Registry {
    /// An empty one.
    const fn new() -> Self {
        Registry(Mutex::new(Entries { entries: Vec::new(), num_added: 0 }))
    }

    fn register(&'static self, op: Name, limits: Limits, device: u32, holder: Holder, num_ranks: usize, demand: Demand) -> Result<Permit> {
        let mut entries = lock(&self.0);
        entries.num_added += 1;
        let id = entries.num_added;
        entries.entries.push(Entry { id, device, holder, num_ranks, demand, settled: None });
        match entries.most_blocks(op, &limits, id).and_then(|_| entries.check_queues(op, &limits, device, holder.object.0, num_ranks)) {
            Ok(()) => Ok(Permit { registry: self, limits, id }),
            Err(error) => {
                entries.remove(id);
                Err(error)
            }
        }
    }
}

impl Permit {
    /// What the object would have if the first call came now.
    pub fn expected(&self, op: Name) -> Result<Settled> {
        lock(&self.registry.0).most_blocks(op, &self.limits, self.id)
    }

    /// Before the first call, and the first in another stream: what the object has from now on.
    ///
    /// # Errors
    /// As [`register`].
    pub fn settle(&self, op: Name) -> Result<Settled> {
        let mut entries = lock(&self.registry.0);
        let settled = entries.most_blocks(op, &self.limits, self.id)?;
        let Some((device, object)) = entries.get(self.id).map(|entry| (entry.device, entry.holder.object)) else { return Ok(settled) };
        for entry in &mut entries.entries {
            if (entry.device, entry.holder.object) == (device, object) {
                entry.settled = Some(settled);
            }
        }
        Ok(settled)
    }

    /// The object uses this stream from its next call on, which must [`settle`](Self::settle) first.
    pub fn moved_to(&self, stream: &Stream) {
        if let Some(entry) = lock(&self.registry.0).entries.iter_mut().find(|entry| entry.id == self.id) {
            entry.holder = entry.holder.in_stream(stream);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.registry.0).remove(self.id);
    }
}

impl Entries {
    fn get(&self, id: u64) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.id == id)
    }

    fn remove(&mut self, id: u64) {
        self.entries.retain(|entry| entry.id != id);
    }

    /// What was settled for an object.
    fn settled(&self, device: u32, object: Object) -> Option<Settled> {
        self.entries.iter().filter(|entry| (entry.device, entry.holder.object) == (device, object)).find_map(|entry| entry.settled)
    }

    /// The demands of a device, one for each rank and stream, as the rank of `me` sees them, with `cut` made of what each object demands.
    fn demands(&self, me: &Entry, cut: impl Fn(&Entry) -> Demand) -> Vec<Demand> {
        let here: Vec<&Entry> = self.entries.iter().filter(|entry| entry.device == me.device).collect();
        let worlds: BTreeSet<usize> = here.iter().map(|entry| entry.holder.object.0).collect();
        let mut all = Vec::new();
        for world in worlds {
            let of_world: Vec<&Entry> = here.iter().copied().filter(|entry| entry.holder.object.0 == world).collect();
            let ranks: BTreeSet<Rank> = of_world.iter().map(|entry| entry.holder.rank).collect();
            let num_ranks = of_world.iter().map(|entry| entry.num_ranks).max().unwrap_or(0).max(ranks.len());
            let is_mine = world == me.holder.object.0;
            let own_rank = is_mine.then_some(me.holder.rank);
            let Some(eyes) = own_rank.or_else(|| ranks.first().copied()) else { continue };
            let find = |object: Object, rank: Rank| of_world.iter().copied().find(|e| e.holder.object == object && e.holder.rank == rank);
            // Objects of one stream of that rank.
            let mut turns: Vec<(Option<usize>, Vec<Object>)> = Vec::new();
            for object in of_world.iter().map(|entry| entry.holder.object).collect::<BTreeSet<_>>() {
                let stream = find(object, eyes).and_then(|entry| entry.holder.stream);
                match turns.iter_mut().find(|(other, _)| stream.is_some() && *other == stream) {
                    Some((_, objects)) => objects.push(object),
                    None => turns.push((stream, vec![object])),
                }
            }
            // Ranks that have not come yet are like those that have.
            let like = |object: Object, rank: Option<&Rank>| {
                let own = rank.and_then(|rank| find(object, *rank)).or_else(|| find(object, eyes));
                own.or_else(|| of_world.iter().copied().find(|entry| entry.holder.object == object))
            };
            let ranks: Vec<Rank> = ranks.into_iter().collect();
            for rank in 0..num_ranks {
                for (_, objects) in &turns {
                    let parts: Vec<Demand> = objects.iter().filter_map(|object| like(*object, ranks.get(rank))).map(&cut).collect();
                    all.push(Demand::in_turns(&parts));
                }
            }
        }
        all
    }

    /// What an object's demand comes to: as it is settled, or else with so many blocks.
    fn of(&self, limits: &Limits, entry: &Entry, blocks: u32) -> Demand {
        match self.settled(entry.device, entry.holder.object) {
            None => entry.demand.cut(blocks),
            Some(Settled { blocks, is_alone: true }) if entry.demand.opens_when_alone => entry.demand.cut(blocks).opened(limits),
            Some(Settled { blocks, .. }) => entry.demand.cut(blocks),
        }
    }

    /// What the object of this entry has, or else would have, if all objects for which nothing is settled get as much.
    fn most_blocks(&self, op: Name, limits: &Limits, id: u64) -> Result<Settled> {
        let Some(me) = self.get(id) else { return Ok(Settled { blocks: 1, is_alone: false }) };
        let with = |blocks: u32| self.demands(me, |entry| self.of(limits, entry, blocks));
        let fits = |blocks: u32| judge(limits, &with(blocks).iter().collect::<Vec<_>>());
        let settled = self.settled(me.device, me.holder.object);
        let or_now = |blocks: u32| settled.unwrap_or(Settled { blocks, is_alone: with(1).len() == 1 });
        let Err(refusal) = fits(u32::MAX) else { return Ok(or_now(u32::MAX)) };
        if fits(1).is_err() {
            return Err(self.refused(op, limits, me, &refusal));
        }
        // More blocks need more of everything: what lies between what fits and what does not is halved.
        let (mut good, mut bad) = (1, me.demand.grids().map(|grid| grid.blocks).max().unwrap_or(1).max(2));
        if fits(bad).is_ok() {
            return Ok(or_now(bad));
        }
        while bad - good > 1 {
            let blocks = good + (bad - good) / 2;
            *(if fits(blocks).is_ok() { &mut good } else { &mut bad }) = blocks;
        }
        Ok(or_now(good))
    }

    /// Where all ranks of a process could be late at once.
    fn check_queues(&self, op: Name, limits: &Limits, device: u32, world: usize, num_ranks: usize) -> Result<()> {
        let holders = self.entries.iter().filter(|entry| entry.device == device).map(|entry| entry.holder);
        let others: BTreeSet<_> = holders.map(|holder| (holder.object.0, holder.rank)).filter(|(w, _)| *w != world).collect();
        let ranks = others.len() + num_ranks;
        if ranks <= limits.queues as usize {
            return Ok(());
        }
        let queues = limits.queues;
        let why = format!(
            "work of a process reaches the device through {queues} queues, where that of a late rank would wait behind the others; set {CONNECTIONS}, \
             up to 32, before the process first uses the GPU"
        );
        Err(Error::Unsupported { op, what: format!("{ranks} ranks of one process on one device"), why })
    }

    fn refused(&self, op: Name, limits: &Limits, me: &Entry, refusal: &Refusal) -> Error {
        let Refusal { need_sms, why } = refusal;
        let is_mine = |entry: &Entry| entry.holder.object == me.holder.object;
        // The largest cut of this object's grids with which all fit, and of those of all objects.
        let largest = |cut: &dyn Fn(&Entry, u32) -> Demand| {
            let fits = |blocks: &u32| judge(limits, &self.demands(me, |entry| cut(entry, *blocks)).iter().collect::<Vec<_>>()).is_ok();
            let most = self.entries.iter().flat_map(|entry| entry.demand.grids()).map(|grid| grid.blocks).max().unwrap_or(0);
            (1..most).rev().find(fits)
        };
        let alone = largest(&|entry, blocks| match is_mine(entry) {
            true => entry.demand.cut_all(blocks),
            false => self.of(limits, entry, 1),
        });
        let together = || largest(&|entry, blocks| entry.demand.cut_all(blocks));
        let grids: BTreeSet<String> = me.demand.grids().map(Waiting::to_string).collect();
        let grids: Vec<String> = grids.into_iter().collect();
        let ranks = if me.num_ranks > 1 { format!(", on each of {} ranks of the device", me.num_ranks) } else { String::new() };
        let others = self.entries.iter().filter(|entry| entry.device == me.device && !is_mine(entry));
        let held: Vec<String> = others
            .map(|entry| {
                let demand = self.of(limits, entry, u32::MAX);
                let grids: BTreeSet<String> = demand.grids().map(|grid| format!("{} of {}", grid.name, grid.blocks)).collect();
                let grids = grids.into_iter().collect::<Vec<_>>().join(", ");
                format!("rank {} of another object holds {} ({grids})", entry.holder.rank, demand.touched(limits))
            })
            .collect();
        let held_text = if held.is_empty() { String::new() } else { format!("; {}", held.join(", ")) };
        let got = format!("{}{ranks}: they need {need_sms} multiprocessors, because {why}", grids.join(", "));
        let have = format!("{} multiprocessors{held_text}", limits.sms);
        match (alone, held.is_empty()) {
            (Some(blocks), true) => {
                Error::invalid(op, "waiting grids", got, format!("grids that fit on {have}; at most {blocks} blocks each would"))
            }
            (Some(blocks), false) => {
                let want =
                    format!("grids that fit on {have}; at most {blocks} blocks each (Tuning::sms) would, or the other object's stream");
                Error::invalid(op, "waiting grids", got, want)
            }
            (None, true) => {
                Error::Unsupported { op, what: got, why: format!("the device has {have}; not even grids of one block would fit") }
            }
            (None, false) => {
                let all = together().map_or(String::new(), |blocks| {
                    format!("at most {blocks} blocks in every grid of all objects (Tuning::sms) would, or ")
                });
                let why =
                    format!("the device has {have}; not even grids of one block would fit; {all}one stream for the objects of a rank");
                Error::Unsupported { op, what: got, why }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::registry::tests::{H200, demand, grid};
    use super::super::registry::{Other, Waiting};
    use super::*;

    /// In the only stream of its rank.
    fn holder(object: u64, rank: u32) -> Holder {
        Holder { object: (0, object), rank: Rank(rank), stream: Some(100 + rank as usize) }
    }

    /// In a stream of its own.
    fn apart(object: u64, rank: u32) -> Holder {
        Holder { stream: Some(1000 * object as usize + rank as usize), ..holder(object, rank) }
    }

    fn registry() -> &'static Registry {
        Box::leak(Box::new(Registry::new()))
    }

    /// The same, of which the caller has not said how many blocks.
    fn free(demand: Demand) -> Demand {
        let of = |w: &Waiting| Waiting { is_fixed: false, ..*w };
        Demand { moments: demand.moments.iter().map(|moment| moment.iter().map(of).collect()).collect(), ..demand }
    }

    const OP: Name = "ep setup";

    #[test]
    fn every_rank_gets_the_same_answer() {
        let registry = registry();
        let add = |rank, blocks| registry.register(OP, H200, 0, holder(1, rank), 4, demand(blocks, 512, 110));
        for rank in [2, 0] {
            let Err(Error::Invalid { what, got, want, .. }) = add(rank, 66) else { panic!("four times 66 were accepted") };
            assert_eq!(what, "waiting grids");
            assert!(got.contains("combine of 66 blocks of 512 threads") && got.contains("each of 4 ranks") && got.contains("199"), "{got}");
            assert!(want.contains("132 multiprocessors") && want.contains("at most 33 blocks"), "{want}");
        }
        let permits: Vec<_> = (0..4).map(|rank| add(rank, 33).unwrap()).collect();
        assert_eq!(lock(&registry.0).entries.len(), 4);
        drop(permits);
        assert_eq!(lock(&registry.0).entries.len(), 0);
    }

    #[test]
    fn a_device_takes_as_many_ranks_as_it_has_queues() {
        let registry = registry();
        let add = |world: usize, object: u64, rank: u32, num: usize| {
            let holder = Holder { object: (world, object), ..apart(object, rank) };
            registry.register(OP, H200, 0, holder, num, demand(1, 64, 32))
        };
        let Err(Error::Unsupported { what, why, .. }) = add(1, 1, 0, 9) else { panic!("9 ranks have 8 queues") };
        assert!(what.starts_with("9 ranks") && why.contains(CONNECTIONS), "{what}; {why}");
        // Two objects of 6 ranks, and another world.
        let permits: Vec<_> = (0..12).map(|i| add(1, i / 6, i as u32 % 6, 6).unwrap()).collect();
        let others = [0, 1].map(|rank| add(2, 1, rank, 2).unwrap());
        assert!(add(3, 1, 0, 1).is_err());
        drop(permits);
        assert!(add(3, 1, 0, 6).is_ok() && add(3, 1, 0, 7).is_err());
        drop(others);
    }

    #[test]
    fn objects_of_two_streams_count_twice_and_devices_apart() {
        let registry = registry();
        let add = |device, object, blocks| registry.register(OP, H200, device, apart(object, 3), 1, demand(blocks, 512, 110));
        let first = add(0, 1, 100).unwrap();
        let other_device = add(1, 1, 132).unwrap();
        let Err(Error::Invalid { want, .. }) = add(0, 2, 40) else { panic!("100 and 40 of 132 were accepted") };
        assert!(want.contains("rank 3 of another object holds 100") && want.contains("at most 32 blocks"), "{want}");
        let second = add(0, 2, 32).unwrap();
        assert!(add(0, 3, 1).is_err());
        drop(first);
        let third = add(0, 3, 1).unwrap();
        drop((second, third, other_device));
        let full = add(0, 1, 132).unwrap();
        let Err(Error::Unsupported { what, why, .. }) = add(0, 2, 1) else { panic!("there is no room at all") };
        assert!(what.contains("133 multiprocessors") && why.contains("not even") && why.contains("at most 131"), "{what}; {why}");
        drop(full);
    }

    /// Blocks that the ranks of an object get at their first call.
    fn settled(permits: &[Permit]) -> u32 {
        let all: Vec<_> = permits.iter().map(|permit| permit.settle(OP).unwrap().blocks).collect();
        assert!(all.iter().all(|blocks| *blocks == all[0]), "{all:?}");
        all[0]
    }

    #[test]
    fn who_is_alone_has_it_all() {
        for (ranks, blocks) in [(1, 264), (2, 131), (4, 43), (8, 18)] {
            let registry = registry();
            let add = |rank| registry.register(OP, H200, 0, holder(1, rank), ranks, free(demand(264, 256, 64))).unwrap();
            // Also while the others have not come.
            let first = add(0);
            assert_eq!(first.expected(OP).unwrap().blocks.min(264), blocks, "{ranks} ranks");
            let others: Vec<_> = (1..ranks as u32).map(add).collect();
            assert_eq!(settled(&others.into_iter().chain([first]).collect::<Vec<_>>()).min(264), blocks, "{ranks} ranks");
        }
    }

    /// `objects` of two ranks, each with grids of as many blocks as there are.
    fn of_two_ranks(registry: &'static Registry, object: u64, holder: fn(u64, u32) -> Holder) -> Vec<Permit> {
        [0, 1].map(|rank| registry.register(OP, H200, 0, holder(object, rank), 2, free(demand(264, 256, 64))).unwrap()).into()
    }

    #[test]
    fn objects_of_one_stream_take_turns() {
        let registry = registry();
        let first = of_two_ranks(registry, 1, holder);
        assert_eq!(settled(&first), 131);
        // A later one costs the first nothing, and itself neither.
        let second = of_two_ranks(registry, 2, holder);
        assert_eq!((settled(&first), settled(&second)), (131, 131));
        // One rank has moved its second object: the other will.
        lock(&registry.0).entries.iter_mut().find(|entry| entry.id == second[0].id).unwrap().holder.stream = Some(7);
        let Err(Error::Unsupported { why, .. }) = second[0].settle(OP) else { panic!("131 of each of two ranks, twice") };
        assert!(why.contains("another object holds 131") && why.contains("at most 43"), "{why}");
        assert_eq!(second[1].settle(OP).unwrap().blocks, 131);
        drop(first);
        assert_eq!(second[0].settle(OP).unwrap().blocks, 131);
    }

    #[test]
    fn objects_of_two_streams_share_what_there_is() {
        let registry = registry();
        let (first, second) = (of_two_ranks(registry, 1, apart), of_two_ranks(registry, 2, apart));
        // Three wait, the fourth is late: 43 each.
        assert_eq!(first[1].expected(OP).unwrap().blocks, 43);
        assert_eq!(settled(&first), 43);
        // 43, twice 44, and room for a kernel of the late one.
        assert_eq!(settled(&second), 44);
        assert!(registry.register(OP, H200, 0, apart(3, 0), 2, free(demand(264, 256, 64))).is_err());
        // What was settled stays: graphs may hold it.
        drop(second);
        assert_eq!(settled(&first), 43);
        // One that is made later gets what is left.
        let third = of_two_ranks(registry, 3, apart);
        assert_eq!((settled(&first), settled(&third)), (43, 44));
    }

    #[test]
    fn what_the_caller_has_chosen_is_not_cut() {
        let registry = registry();
        let fixed = registry.register(OP, H200, 0, apart(1, 0), 1, demand(100, 256, 64)).unwrap();
        let other = registry.register(OP, H200, 0, apart(2, 0), 1, free(demand(132, 512, 110))).unwrap();
        // 32 of one a multiprocessor, wherever the 100 are.
        assert_eq!(other.settle(OP).unwrap().blocks, 32);
        assert!(fixed.settle(OP).is_ok());
    }

    /// A rank that is alone on its device lets kernels start behind one that waits, of whatever size; whoever shares the device then finds no room.
    #[test]
    fn what_is_alone_opens_the_device() {
        let registry = registry();
        let add = |object, holder: fn(u64, u32) -> Holder| {
            let demand = Demand { opens_when_alone: true, ..free(demand(4, 256, 64)) };
            registry.register(OP, H200, 0, holder(object, 0), 1, demand)
        };
        let first = add(1, holder).unwrap();
        assert!(first.expected(OP).unwrap().is_alone);
        let apart_from_it = add(2, apart).unwrap();
        // Known before the first call: it opens nothing.
        assert!(!first.expected(OP).unwrap().is_alone);
        drop(apart_from_it);
        assert!(first.settle(OP).unwrap().is_alone);
        // Four blocks of each would fit; what may be behind them does not.
        assert!(add(2, apart).is_err());
        // In turns nothing shares the device.
        assert!(add(2, holder).unwrap().settle(OP).unwrap().is_alone);
    }

    /// The last block of a payload that lets the next kernel start waits beside whichever kernel of the stream comes next.
    #[test]
    fn what_lingers_waits_beside_the_other_objects() {
        let (payload, combine) = (grid("payload", 1, 512, 64), grid("combine", 131, 512, 64));
        let of = |moments, lingers| Demand { moments, lingers, opens_when_alone: false, other: Other::ANY };
        let early = of(vec![vec![payload]], Some(payload));
        let late = of(vec![vec![combine]], None);
        let all = Demand::in_turns(&[early.clone(), late.clone()]);
        assert_eq!(all.moments, [vec![payload], vec![combine], vec![combine, payload]]);
        assert_eq!(Demand::in_turns(&[late.clone(), late.clone()]).moments, [vec![combine], vec![combine]]);
        let registry = registry();
        let add = |object, rank, demand: &Demand| registry.register(OP, H200, 0, holder(object, rank), 2, demand.clone());
        let _late: Vec<_> = [0, 1].map(|rank| add(1, rank, &late).unwrap()).into();
        assert!(matches!(add(2, 0, &early), Err(Error::Unsupported { .. })));
        assert!(add(2, 0, &Demand { lingers: None, ..early }).is_ok());
    }
}
