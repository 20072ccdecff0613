//! Dispatch and combine in graphs: what changes between replays is read on the device.

use moe_kernels::check::Shape;
use moe_kernels::ep::{Config, Layout, Mode, Overflow, PhaseTuning, Tuning, World};
use moe_kernels::error::Limit;
use moe_kernels::gpu::{Graph, Stream};
use moe_kernels::random::SplitMix64;
use moe_kernels::{Backend, DType, Error, Result};

use super::super::kernels::delay;
use super::rig::{Options, Rig, run, run_sharing};
use super::{Needs, Outcome, Test, base, ensure, failed};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("ep graphs: counts and routes change, several are alive", Needs::GpuAlone, several),
    ("ep graphs: overflow", Needs::GpuAlone, overflow),
    ("ep graphs: two objects", Needs::GpuAlone, two_objects),
    ("ep graphs: objects that take turns", Needs::GpuAlone, objects_in_turns),
    ("ep graphs: two banks, out of order", Needs::GpuAlone, out_of_order),
];

/// Of each form of dispatch, with the number of ranks.
fn configs() -> Vec<(usize, Config)> {
    let low_latency = |config: Config| Config { mode: Mode::LowLatency, expected_tokens: 4, ..config };
    let by_expert = Config { layout: Layout::ByExpert { segment_align: 4 }, ..base() };
    vec![
        (2, base()),
        (4, Config { max_tokens: 700, ..base() }),
        (2, low_latency(base())),
        (4, low_latency(Config { in_flight: 2, ..base() })),
        (2, Config { in_flight: 2, ..by_expert.clone() }),
        (4, low_latency(by_expert)),
    ]
}

/// Fewer rows than many rounds bring.
fn tight() -> Config {
    Config { max_rows: Some(30), overflow: Overflow::Error, ..base() } // 30 of at most 48
}

fn two_banks() -> Config {
    Config { in_flight: 2, ..base() }
}

/// Grids that leave room for those of another object.
pub fn beside_others() -> Tuning {
    let phase = PhaseTuning { geometry: None, sms: Some(12) }; // 12: arbitrary, of 8 ranks and objects fewer than any device has
    Tuning { dispatch: phase, combine: phase, ..Tuning::default() }
}

pub fn shapes() -> Vec<Shape> {
    let mut all: Vec<Shape> = configs().into_iter().map(|(ranks, config)| (ranks, config, Tuning::default())).collect();
    all.extend([(2, tight(), Tuning::default()), (2, two_banks(), Tuning::default()), (4, two_banks(), Tuning::default())]);
    all.extend([2, 4].map(|ranks| (ranks, two_banks(), beside_others())));
    all.extend([2, 4].map(|ranks| (ranks, wide(ranks), Tuning::default())));
    all
}

fn record(stream: &Stream, mut work: impl FnMut() -> Result<()>) -> Result<Graph> {
    Graph::capture(stream, &mut work)
}

/// Graphs of one, two and three dispatches, one of them without a combine, launched in many orders without waiting.
fn several() -> Outcome {
    for (ranks, config) in configs() {
        for programmatic in [false, true] {
            let name = format!("{ranks} ranks, {config:?}");
            let work = |world: World| -> Result<()> {
                let mut rig = Rig::new(&world, &config, Options { staged: programmatic, ..Options::default() })?;
                rig.round(0)?;
                let stream = rig.stream.clone();
                let one = record(&stream, || rig.round(0))?;
                let two = record(&stream, || rig.round(0).and_then(|()| rig.round(0)))?;
                let three = record(&stream, || {
                    rig.round(0)?;
                    rig.round_without_combine(0)?;
                    rig.round(0)
                })?;
                // An odd number of dispatches, the last one without a combine.
                let last = record(&stream, || rig.round_without_combine(0))?;
                for graph in [&one, &one, &two, &three, &one, &last, &last, &two, &one, &three, &three, &two] {
                    graph.launch(&stream)?;
                }
                // Eager calls go on where the graphs ended.
                rig.round(0)?;
                one.launch(&stream)?;
                rig.finish()
            };
            run(ranks, programmatic, work).map_err(|error| failed(&name, &error))?;
        }
    }
    Ok(())
}

/// What a rank found after a launch: rows expected here, rows there, the error, whether the sums were written.
type Found = (u32, u32, Option<Vec<(u64, u64)>>, bool);

/// A graph in which some replays have more rows than fit: all ranks are told by the next call, nothing is written, the next replay works.
fn overflow() -> Outcome {
    let config = tight();
    let capacity = 30;
    let work = |world: World| -> Result<Vec<Found>> {
        let mut rig = Rig::new(&world, &config, Options::default())?;
        let stream = rig.stream.clone();
        let mut kept = None;
        // The arrival is looked at after replays, while it lives.
        let graph = record(&stream, || {
            let arrival = rig.dispatch(0)?;
            rig.expect(0)?;
            kept = Some(rig.num_rows_of(&arrival));
            rig.combine(0, arrival)
        })?;
        let num_rows = kept.expect("recorded");
        let mut found = Vec::new();
        for round in 0..24 {
            rig.set_round(0, round)?;
            graph.launch(&stream)?;
            let demands = match rig.ep.synchronize() {
                Ok(()) => None,
                Err(Error::Capacity { demands, .. }) => {
                    assert!(demands.iter().all(|d| d.limit == Limit::Rows));
                    Some(demands.iter().map(|d| (d.demand, d.capacity)).collect())
                }
                Err(error) => return Err(error),
            };
            rig.ep.synchronize()?; // it is said once
            let [end, got] = rig.ends(0, num_rows)?;
            let untouched = rig.sums_are_untouched(0)?;
            if demands.is_none() {
                rig.check_sums(0)?;
            }
            found.push((end, got, demands, untouched));
        }
        rig.finish().map(|()| found)
    };
    let found = run(2, false, work).map_err(|error| failed("overflow", &error))?;
    let (mut num_over, mut num_fit) = (0, 0);
    for (round, (first, second)) in found[0].iter().zip(&found[1]).enumerate() {
        let want: Vec<(u64, u64)> = vec![(first.0.into(), capacity), (second.0.into(), capacity)];
        let is_over = first.0.max(second.0) > capacity as u32;
        num_over += usize::from(is_over);
        num_fit += usize::from(!is_over);
        for (rank, (end, got, demands, untouched)) in [first, second].into_iter().enumerate() {
            let place = format!("round {round}, rank {rank}, {end} rows");
            match demands {
                Some(demands) => {
                    ensure(is_over && *demands == want, format!("{place}: demands {demands:?}, expected {want:?}"))?;
                    ensure(*got == 0 && *untouched, format!("{place}: {got} rows arrived, sums untouched: {untouched}"))?;
                }
                None => ensure(!is_over && got == end, format!("{place}: {got} rows arrived, over: {is_over}"))?,
            }
        }
    }
    ensure(num_over >= 3 && num_fit >= 3, format!("{num_over} rounds overflow, {num_fit} do not"))
}

/// Blocks of the kernel that sums, in a call of as many tokens as there may be: the largest waiting grid.
fn combine_blocks(rig: &Rig) -> u32 {
    rig.ep.launches(rig.ep.config().max_tokens).map_or(0, |launches| launches.combine.blocks)
}

/// Grids that wait and are as large as the device has room for: wide rows, and the most tokens whose sums wait for themselves (of more a kernel of one block does).
fn wide(ranks: usize) -> Config {
    Config { timeout: base().timeout, ..Config::new(7168, DType::BF16, 16, 4, if ranks > 2 { 128 } else { 192 }) }
}

/// Two objects of one world, each in its own stream, at the same time: eagerly, with delays, then in graphs. They share the device.
fn two_objects() -> Outcome {
    let cases = |ranks| [(two_banks(), Tuning::default()), (two_banks(), beside_others()), (wide(ranks), Tuning::default())];
    for (ranks, (config, tuning)) in [2, 4].into_iter().flat_map(|ranks| cases(ranks).map(|case| (ranks, case))) {
        let work = |world: World| -> Result<u32> {
            let mut first = Rig::new(&world, &config, Options { tuning, ..Options::default() })?;
            let alone = combine_blocks(&first);
            let mut second = Rig::new(&world, &config, Options { tuning, staged: true, ..Options::default() })?;
            let Backend::Cuda(cuda) = world.backend() else { unreachable!("a GPU was asked for") };
            second.set_stream(&Stream::new(cuda.device())?)?;
            [&first, &second].into_iter().try_for_each(|rig| delay(&rig.stream, 0))?; // loads it
            world.barrier()?;
            let mut random = SplitMix64::stream(ranks as u64, world.rank().0.into());
            for _ in 0..4 {
                for rig in [&first, &second] {
                    delay(&rig.stream, random.below(200_000))?; // arbitrary, several rounds of a small object
                }
                first.round(0)?;
                second.round(0)?;
                second.round(0)?;
            }
            let shared = combine_blocks(&first);
            let streams = [first.stream.clone(), second.stream.clone()];
            let graphs = [record(&streams[0], || first.round(0))?, record(&streams[1], || second.round(0))?];
            for i in [0, 1, 1, 0, 0, 1, 0, 0, 1, 1] {
                graphs[i].launch(&streams[i])?;
            }
            let verdict = first.verdict().and(second.verdict());
            world.barrier()?;
            verdict.map(|()| alone - shared)
        };
        let name = format!("{ranks} ranks, {config:?}, {tuning:?}");
        let is_wide = config == wide(ranks);
        let ran = if is_wide { run_sharing(ranks, ranks == 4, work) } else { run(ranks, ranks == 4, work) };
        let fewer = ran.map_err(|error| failed(&name, &error))?;
        ensure(!is_wide || fewer.iter().all(|fewer| *fewer > 0), format!("{name}: {fewer:?} blocks fewer than alone"))?;
    }
    Ok(())
}

/// An object in use has what it has. One that is made later in the same stream costs it nothing; moved to another stream it finds no room, and says so.
fn objects_in_turns() -> Outcome {
    let work = |world: World| -> Result<()> {
        let Backend::Cuda(cuda) = world.backend() else { unreachable!("a GPU was asked for") };
        let apart = Stream::new(cuda.device())?;
        let config = wide(world.size());
        let mut first = Rig::new(&world, &config, Options::default())?;
        first.round(0)?;
        let alone = combine_blocks(&first);
        let stream = first.stream.clone();
        first.verdict()?;
        world.barrier()?;
        let mut second = Rig::new(&world, &config, Options { staged: true, ..Options::default() })?;
        let graphs = [record(&stream, || first.round(0))?, record(&stream, || second.round(0))?];
        for i in [0, 1, 1, 0, 1, 0] {
            graphs[i].launch(&stream)?;
        }
        first.round(0)?;
        second.round(0)?;
        assert_eq!([combine_blocks(&first), combine_blocks(&second)], [alone; 2], "one stream");
        second.verdict()?;
        world.barrier()?;
        second.set_stream(&apart)?;
        match second.dispatch(0) {
            Err(Error::Unsupported { why, .. }) if why.contains("another object holds") && why.contains("Tuning::sms") => {}
            other => panic!("{:?}", other.map(drop)),
        }
        // Nothing has happened. Both in the other stream take turns again.
        first.set_stream(&apart)?;
        apart.synchronize()?;
        world.barrier()?;
        for _ in 0..2 {
            first.round(0)?;
            second.round(0)?;
        }
        let verdict = first.verdict().and(second.verdict());
        world.barrier()?;
        verdict
    };
    for (ranks, programmatic) in [(2, false), (2, true), (4, true)] {
        run_sharing(ranks, programmatic, work).map_err(|error| failed(&format!("{ranks} ranks"), &error))?;
    }
    Ok(())
}

/// Two arrivals alive, combined last to first; then in halves that overlap.
fn both_banks(rig: &mut Rig) -> Result<()> {
    let (first, second) = (rig.dispatch(0)?, rig.dispatch(1)?);
    rig.check_rows(1, &second)?;
    rig.check_rows(0, &first)?;
    rig.combine(1, second)?;
    rig.combine(0, first)?;
    rig.check_sums(0)?;
    rig.check_sums(1)?;
    rig.advance(0)?;
    rig.advance(1)
}

fn halves(rig: &mut Rig) -> Result<()> {
    let first = rig.dispatch_send(0)?;
    let second = rig.dispatch_send(1)?;
    let first = rig.dispatch_receive(0, first)?;
    rig.check_rows(0, &first)?;
    let first = rig.combine_send(0, first)?;
    let second = rig.dispatch_receive(1, second)?;
    rig.check_rows(1, &second)?;
    rig.combine_receive(0, first)?;
    rig.check_sums(0)?;
    let second = rig.combine_send(1, second)?;
    rig.combine_receive(1, second)?;
    rig.check_sums(1)?;
    rig.advance(0)?;
    rig.advance(1)
}

fn out_of_order() -> Outcome {
    for (ranks, programmatic) in [(2, false), (2, true), (4, true)] {
        let work = |world: World| -> Result<()> {
            let options = Options { num_sets: 2, staged: ranks == 4, ..Options::default() };
            let mut rig = Rig::new(&world, &two_banks(), options)?;
            for _ in 0..4 {
                both_banks(&mut rig)?;
                halves(&mut rig)?;
            }
            // The routing of a round once more, with the other bank alive.
            let first = rig.dispatch(0)?;
            let again = rig.replay(0)?;
            rig.check_rows(0, &again)?;
            rig.check_rows(0, &first)?;
            rig.combine(0, again)?;
            rig.check_sums(0)?;
            drop(first);
            rig.advance(0)?;
            rig.round_without_combine(1)?;
            let stream = rig.stream.clone();
            let graphs = [record(&stream, || both_banks(&mut rig))?, record(&stream, || halves(&mut rig))?];
            for i in [0, 1, 0, 0, 1, 1, 0] {
                graphs[i].launch(&stream)?;
            }
            rig.finish()
        };
        run(ranks, programmatic, work).map_err(|error| failed(&format!("{ranks} ranks"), &error))?;
    }
    Ok(())
}
