//! Tests of ranks, the protocol and its failures.

use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use moe_kernels::ep::{Config, ExpertParallel, Layout, Mode, Reduce, World};
use moe_kernels::error::{Failure, FailureKind};
use moe_kernels::ops::{combine, dispatch};
use moe_kernels::random::SplitMix64;
use moe_kernels::{Backend, DType, Error, Rank, Result, Slot, TensorView, TensorViewMut};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for world in [2, 4, 8] {
        for (name, config) in stress_configs() {
            trials.push(Trial::test(format!("world::cpu::1000 rounds without barrier::{world} ranks {name}"), move || {
                stress(world, &config, 1000)
            }));
        }
    }
    for world in [2, 3, 8] {
        trials.push(Trial::test(format!("world::cpu::a rank that never arrives::{world} ranks"), move || never_arrives(world)));
        trials.push(Trial::test(format!("world::cpu::a rank that panics::{world} ranks"), move || panics(world)));
        trials.push(Trial::test(format!("world::cpu::a rank that leaves::{world} ranks"), move || leaves(world)));
        trials.push(Trial::test(format!("world::cpu::a rank that arrives late::{world} ranks"), move || late(world)));
    }
    trials.push(Trial::test("world::cpu::a rank that leaves and works on", leaves_and_works_on));
    trials.push(Trial::test("world::cpu::a rank that stops between dispatch and combine", stops_before_combine));
    trials.push(Trial::test("world::cpu::setup differs", setup_differs));
    trials.push(Trial::test("world::cpu::setup fails on one rank", setup_fails_on_one));
    trials.push(Trial::test("world::cpu::setup misses a rank", setup_misses_a_rank));
    trials.push(Trial::test("world::cpu::a rank calls replay instead of dispatch", different_calls));
    trials.push(Trial::test("world::cpu::world sizes", world_sizes));
    trials
}

pub const HIDDEN: usize = 32;
const EXPERTS: usize = 16;
const K: usize = 3;
const MAX_TOKENS: usize = 24;

pub fn config() -> Config {
    Config { timeout: Duration::from_secs(20), ..Config::new(HIDDEN, DType::F32, EXPERTS, K, MAX_TOKENS) }
}

pub fn stress_configs() -> Vec<(&'static str, Config)> {
    let by_expert = Layout::ByExpert { segment_align: 4 };
    vec![
        ("by token", config()),
        ("by token, low latency", Config { mode: Mode::LowLatency, expected_tokens: 4, ..config() }),
        ("by token, two banks", Config { in_flight: 2, ..config() }),
        ("by expert", Config { layout: by_expert, ..config() }),
        (
            "by expert, low latency, at source",
            Config { layout: by_expert, mode: Mode::LowLatency, expected_tokens: 4, reduce: Reduce::AtSource, in_flight: 2, ..config() },
        ),
    ]
}

/// The value of element `h` of a token: small integers, so that sums are exact in any order, and different for any two tokens and rounds.
fn value(rank: usize, token: usize, round: usize, h: usize) -> f32 {
    ((rank * 7919 + token * 104_729 + round * 1_299_709 + h * 15_485_863) % 65_521) as f32
}

/// One round's input of one rank.
struct Round {
    num_tokens: usize,
    x: Vec<f32>,
    ids: Vec<i32>,
}

impl Round {
    fn new(rank: usize, round: usize) -> Self {
        let mut random = SplitMix64::stream(round as u64, rank as u64);
        // Some rounds are empty on some ranks, some are full, some go to one expert.
        let num_tokens = match random.below(8) {
            0 => 0,
            1 => MAX_TOKENS,
            _ => random.below(MAX_TOKENS as u64 + 1) as usize,
        };
        let to_one = random.below(8) == 0;
        let id = |random: &mut SplitMix64| if to_one { 5 } else { random.below(EXPERTS as u64 + 1) as i32 - 1 };
        let ids = (0..num_tokens * K).map(|_| id(&mut random)).collect();
        let x = (0..num_tokens * HIDDEN).map(|i| value(rank, i / HIDDEN, round, i % HIDDEN)).collect();
        Round { num_tokens, x, ids }
    }

    /// Ranks (or, by expert, experts) to which a token goes, ascending and distinct.
    fn targets(&self, token: usize, world: usize, by_expert: bool) -> Vec<usize> {
        let ids = self.ids[token * K..][..K].iter().filter(|&&e| (0..EXPERTS as i32).contains(&e));
        let mut targets: Vec<_> = ids.map(|&e| if by_expert { e as usize } else { e as usize * world / EXPERTS }).collect();
        targets.sort_unstable();
        targets.dedup();
        targets
    }
}

fn pause(random: &mut SplitMix64) {
    match random.below(64) {
        0 => std::thread::sleep(Duration::from_micros(random.below(2000))),
        1..8 => (0..random.below(2000)).for_each(|_| std::hint::spin_loop()),
        8..12 => std::thread::yield_now(),
        _ => {}
    }
}

fn stress(world: usize, config: &Config, num_rounds: usize) -> Result<(), Failed> {
    let results = World::run(&Backend::cpu(), world, |w| stress_rank(&w, config, num_rounds))?;
    Ok(results.into_iter().collect::<Result<()>>()?)
}

/// Dispatch, experts that multiply by (1 + expert id) or (1 + rank), combine: `num_rounds` times with new data, random delays between phases and
/// no barrier; every row and every sum is checked. One rank's part.
pub fn stress_rank(w: &World, config: &Config, num_rounds: usize) -> Result<()> {
    let (rank, world) = (w.rank().index(), w.size());
    let mut random = SplitMix64::stream(99, rank as u64);
    let mut ep = ExpertParallel::new(w, config.clone())?;
    let mut routing = dispatch::Routing::new(&ep)?;
    for round in 0..num_rounds {
        let input = Round::new(rank, round);
        pause(&mut random);
        let view = dispatch::Input {
            x: TensorView::from_slice(&input.x, &[input.num_tokens, HIDDEN])?,
            topk_idx: TensorView::from_slice(&input.ids, &[input.num_tokens, K])?,
            topk_weights: None,
            scales: None,
            num_tokens: dispatch::NumTokens::All,
        };
        let sent = ep.dispatch_send(&mut routing, &view)?;
        pause(&mut random);
        let mut arrival = ep.dispatch_receive(&mut routing, sent, dispatch::Outputs::default())?;
        pause(&mut random);
        check_rows(&arrival, config, rank, world, round);
        run_experts(&mut arrival, config, rank);
        pause(&mut random);
        let y = combine::Input { y: combine::ExpertRows::InPlace, row_weights: None };
        let sent = ep.combine_send(&routing, arrival, &y)?;
        pause(&mut random);
        let mut out = vec![-1f32; (input.num_tokens + 1) * HIDDEN];
        let view = TensorViewMut::from_slice(&mut out, &[input.num_tokens + 1, HIDDEN])?;
        ep.combine_receive(&routing, sent, combine::Output { out: view, add_to: None, topk_weights: None })?;
        check_sums(&out, &input, config, rank, world, round);
    }
    Ok(())
}

/// Rows in the order (expert,) source rank, token, with the payload of this round.
fn check_rows(arrival: &dispatch::Arrival, config: &Config, rank: usize, world: usize, round: usize) {
    let arrival = arrival.on_host().expect("rows of a CPU are on the host");
    let by_expert = config.layout.is_by_expert();
    let rounds: Vec<_> = (0..world).map(|r| Round::new(r, round)).collect();
    let groups: Vec<usize> = if by_expert { (0..EXPERTS).filter(|e| e * world / EXPERTS == rank).collect() } else { vec![rank] };
    for (g, &target) in groups.iter().enumerate() {
        let mut slot = arrival.segment_start().get(g).copied().unwrap_or(0);
        for (source, input) in rounds.iter().enumerate() {
            for token in (0..input.num_tokens).filter(|&t| input.targets(t, world, by_expert).contains(&target)) {
                let from = arrival.metadata(Slot(slot)).source.map(|(r, t)| (r.index(), t.index()));
                assert_eq!(from, Some((source, token)), "rank {rank}, round {round}, slot {slot}: source");
                let row: &[f32] = bytemuck::cast_slice(arrival.row(Slot(slot)));
                let want: Vec<_> = (0..HIDDEN).map(|h| value(source, token, round, h)).collect();
                assert_eq!(row, want, "rank {rank}, round {round}, slot {slot}: payload");
                slot += 1;
            }
        }
        if !by_expert {
            assert_eq!(arrival.num_rows(), slot as usize, "rank {rank}, round {round}: number of rows");
        }
    }
}

fn run_experts(arrival: &mut dispatch::Arrival, config: &Config, rank: usize) {
    let received = arrival.on_host().expect("rows of a CPU are on the host");
    let num_rows = received.num_rows();
    let ids: Vec<_> = (0..num_rows).map(|s| received.metadata(Slot(s as u32)).topk_idx[0]).collect();
    let (rows, mut output) = arrival.parts();
    let rows: &[f32] = bytemuck::cast_slice(rows.host("test", "x").expect("on the host"));
    let output: &mut [f32] = bytemuck::cast_slice_mut(output.host_mut("test", "expert_output").expect("on the host"));
    for slot in 0..num_rows {
        let factor = if config.layout.is_by_expert() { ids[slot] + 1 } else { rank as i32 + 1 } as f32;
        for h in 0..HIDDEN {
            output[slot * HIDDEN + h] = rows[slot * HIDDEN + h] * factor;
        }
    }
}

fn check_sums(out: &[f32], input: &Round, config: &Config, rank: usize, world: usize, round: usize) {
    for token in 0..input.num_tokens {
        let factors = input.targets(token, world, config.layout.is_by_expert());
        let factor: usize = factors.iter().map(|f| f + 1).sum();
        for h in 0..HIDDEN {
            let want = value(rank, token, round, h) * factor as f32;
            assert_eq!(out[token * HIDDEN + h], want, "rank {rank}, round {round}, token {token}, element {h}: sum");
        }
    }
    assert!(out[input.num_tokens * HIDDEN..].iter().all(|&v| v == -1.0), "rank {rank}, round {round}: a row beyond T was written");
}

/// A bound long enough for a busy machine and short enough for a test.
pub const BOUND: Duration = Duration::from_millis(500);

pub fn short() -> Config {
    Config { timeout: BOUND, ..config() }
}

/// One dispatch of one token to every rank's first expert, then a combine.
pub fn one_call(ep: &mut ExpertParallel, routing: &mut dispatch::Routing) -> Result<()> {
    let arrival = one_dispatch(ep, routing)?;
    one_combine(ep, routing, arrival)
}

pub fn one_combine(ep: &mut ExpertParallel, routing: &dispatch::Routing, arrival: dispatch::Arrival) -> Result<()> {
    let mut out = vec![0f32; HIDDEN];
    let out = TensorViewMut::from_slice(&mut out, &[1, HIDDEN])?;
    let input = combine::Input { y: combine::ExpertRows::InPlace, row_weights: None };
    Ok(ep.combine(routing, arrival, &input, combine::Output { out, add_to: None, topk_weights: None })?)
}

pub fn one_dispatch(ep: &mut ExpertParallel, routing: &mut dispatch::Routing) -> Result<dispatch::Arrival> {
    let x = [1f32; HIDDEN];
    // Three experts reach at most three ranks: enough that everybody waits for somebody.
    let ids = [0, EXPERTS as i32 / 2, EXPERTS as i32 - 1];
    let input = dispatch::Input {
        x: TensorView::from_slice(&x, &[1, HIDDEN])?,
        topk_idx: TensorView::from_slice(&ids, &[1, K])?,
        topk_weights: None,
        scales: None,
        num_tokens: dispatch::NumTokens::All,
    };
    ep.dispatch(routing, &input, dispatch::Outputs::default())
}

/// The first failure in an error of a rank that did not fail itself.
pub fn first_cause(error: &Error) -> Option<Failure> {
    match error {
        Error::Timeout { failure, .. } | Error::Poisoned { first: failure } => Some(*failure),
        _ => None,
    }
}

/// Every surviving rank failed with the same cause, which names `culprit`, and a rebuilt world works.
fn all_blame(results: &[Result<()>], culprit: usize, kinds: &[FailureKind]) -> Result<(), Failed> {
    let causes: Vec<_> = results
        .iter()
        .enumerate()
        .filter(|(r, _)| *r != culprit)
        .map(|(r, result)| result.as_ref().err().and_then(first_cause).ok_or_else(|| format!("rank {r} got {result:?}")))
        .collect::<Result<_, _>>()?;
    let first = causes[0];
    if causes.iter().any(|c| *c != first) {
        return Err(format!("causes differ: {causes:?}").into());
    }
    if !kinds.contains(&first.kind) || first.rank.index() != culprit && first.peer.index() != culprit {
        return Err(format!("{first:?} does not blame rank {culprit} with one of {kinds:?}").into());
    }
    stress(results.len(), &config(), 5)
}

fn never_arrives(world: usize) -> Result<(), Failed> {
    let culprit = world - 1;
    let start = Instant::now();
    let results = World::run(&Backend::cpu(), world, |w| {
        let mut ep = ExpertParallel::new(&w, short())?;
        let mut routing = dispatch::Routing::new(&ep)?;
        one_call(&mut ep, &mut routing)?;
        if w.rank().index() == culprit {
            std::thread::sleep(3 * BOUND);
            return Ok(());
        }
        let error = one_call(&mut ep, &mut routing).unwrap_err();
        // Every later call says the same at once.
        let again = Instant::now();
        let later = one_call(&mut ep, &mut routing).unwrap_err();
        assert_eq!(first_cause(&later), first_cause(&error));
        assert!(matches!(later, Error::Poisoned { .. }), "{later:?}");
        assert!(again.elapsed() < BOUND / 2, "a poisoned world waited");
        Err(error)
    })?;
    assert!(start.elapsed() < 6 * BOUND, "{:?} is far beyond the bound", start.elapsed());
    let timeouts = results.iter().filter(|r| matches!(r, Err(Error::Timeout { .. }))).count();
    assert_eq!(timeouts, 1, "one rank finds out first: {results:?}");
    all_blame(&results, culprit, &[FailureKind::Timeout])
}

fn panics(world: usize) -> Result<(), Failed> {
    let culprit = world / 2;
    let start = Instant::now();
    let results = World::run(&Backend::cpu(), world, |w| {
        let mut ep = ExpertParallel::new(&w, config())?;
        let mut routing = dispatch::Routing::new(&ep)?;
        one_call(&mut ep, &mut routing)?;
        if w.rank().index() == culprit {
            // Unwinds without the message that the default hook prints.
            std::panic::resume_unwind(Box::new("a test's panic"));
        }
        one_call(&mut ep, &mut routing)
    })?;
    assert!(start.elapsed() < config().timeout / 2, "a panic was only found by the timeout");
    assert!(matches!(&results[culprit], Err(Error::Poisoned { first }) if first.kind == FailureKind::Panicked), "{:?}", results[culprit]);
    all_blame(&results, culprit, &[FailureKind::Panicked])
}

fn leaves(world: usize) -> Result<(), Failed> {
    let start = Instant::now();
    let results = World::run(&Backend::cpu(), world, |w| {
        let mut ep = ExpertParallel::new(&w, config())?;
        let mut routing = dispatch::Routing::new(&ep)?;
        one_call(&mut ep, &mut routing)?;
        if w.rank() == Rank(0) { Ok(()) } else { one_call(&mut ep, &mut routing) }
    })?;
    assert!(start.elapsed() < config().timeout / 2, "a rank that left was only found by the timeout");
    all_blame(&results, 0, &[FailureKind::Left])
}

/// A rank leaves when it drops what it has of the world, not when its work ends.
fn leaves_and_works_on() -> Result<(), Failed> {
    let num_told = std::sync::atomic::AtomicUsize::new(0);
    let results = World::run(&Backend::cpu(), 3, |w| {
        use std::sync::atomic::Ordering::Relaxed;
        let mut ep = ExpertParallel::new(&w, config())?;
        let mut routing = dispatch::Routing::new(&ep)?;
        one_call(&mut ep, &mut routing)?;
        if w.rank() != Rank(0) {
            let result = one_call(&mut ep, &mut routing);
            num_told.fetch_add(1, Relaxed);
            return result;
        }
        drop((w, ep, routing));
        let start = Instant::now();
        while num_told.load(Relaxed) < 2 {
            assert!(start.elapsed() < config().timeout / 2, "nobody was told while rank 0 worked on");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    })?;
    all_blame(&results, 0, &[FailureKind::Left])
}

fn late(world: usize) -> Result<(), Failed> {
    let results = World::run(&Backend::cpu(), world, |w| {
        let mut ep = ExpertParallel::new(&w, Config { timeout: 20 * BOUND, ..config() })?;
        let mut routing = dispatch::Routing::new(&ep)?;
        for round in 0..3 {
            if w.rank().index() == round % world {
                std::thread::sleep(BOUND / 4);
            }
            one_call(&mut ep, &mut routing)?;
        }
        Ok(())
    })?;
    Ok(results.into_iter().collect::<Result<()>>()?)
}

fn stops_before_combine() -> Result<(), Failed> {
    let results = World::run(&Backend::cpu(), 4, |w| {
        let mut ep = ExpertParallel::new(&w, short())?;
        let mut routing = dispatch::Routing::new(&ep)?;
        if w.rank() == Rank(0) {
            let _arrival = one_dispatch(&mut ep, &mut routing)?;
            std::thread::sleep(3 * BOUND);
            return Ok(());
        }
        one_call(&mut ep, &mut routing)
    })?;
    let failure = first_cause(results[1].as_ref().unwrap_err()).ok_or("no cause")?;
    assert_eq!((failure.op, failure.phase), ("combine", "ready"));
    all_blame(&results, 0, &[FailureKind::Timeout])
}

fn setup_differs() -> Result<(), Failed> {
    let results = World::run(&Backend::cpu(), 3, |w| {
        let k = if w.rank() == Rank(2) { 2 } else { K };
        ExpertParallel::new(&w, Config { k, ..config() }).map(|_| ())
    })?;
    for result in results {
        let want = Error::Mismatch {
            op: "ep setup",
            first: Rank(0),
            second: Rank(2),
            what: "k".into(),
            first_value: "3".into(),
            second_value: "2".into(),
        };
        assert_eq!(result, Err(want));
    }
    Ok(())
}

fn setup_fails_on_one() -> Result<(), Failed> {
    let results = World::run(&Backend::cpu(), 3, |w| {
        let k = if w.rank() == Rank(1) { 0 } else { K };
        ExpertParallel::new(&w, Config { k, ..config() }).map(|_| ())
    })?;
    let Err(Error::Setup { rank: Rank(1), error, .. }) = &results[0] else {
        return Err(format!("{results:?}").into());
    };
    assert!(matches!(&**error, Error::Invalid { what, .. } if what == "k"), "{error}");
    assert!(results.iter().all(|r| *r == results[0]), "{results:?}");
    // The same mistake everywhere needs no rank.
    let results = World::run(&Backend::cpu(), 2, |w| ExpertParallel::new(&w, Config { k: 0, ..config() }).map(|_| ()))?;
    assert!(results.iter().all(|r| matches!(r, Err(Error::Invalid { what, .. }) if what == "k")), "{results:?}");
    Ok(())
}

fn setup_misses_a_rank() -> Result<(), Failed> {
    let start = Instant::now();
    let results = World::run(&Backend::cpu(), 3, |w| match w.rank() {
        Rank(1) => Ok(()),
        _ => ExpertParallel::new(&w, config()).map(|_| ()),
    })?;
    assert!(start.elapsed() < Duration::from_secs(10), "a rank that left setup was only found by the timeout");
    all_blame(&results, 1, &[FailureKind::Left])
}

fn different_calls() -> Result<(), Failed> {
    let results = World::run(&Backend::cpu(), 3, |w| {
        let mut ep = ExpertParallel::new(&w, config())?;
        let mut routing = dispatch::Routing::new(&ep)?;
        one_call(&mut ep, &mut routing)?;
        if w.rank() == Rank(1) {
            let x = [1f32; HIDDEN];
            let payload = dispatch::Payload { x: TensorView::from_slice(&x, &[1, HIDDEN])?, scales: None };
            return ep.replay(&routing, &payload).map(|_| ());
        }
        one_call(&mut ep, &mut routing)
    })?;
    for result in results {
        assert!(matches!(&result, Err(Error::Mismatch { first: Rank(0), second: Rank(1), what, .. }) if what == "call"), "{result:?}");
    }
    Ok(())
}

fn world_sizes() -> Result<(), Failed> {
    for size in [0, 65, usize::MAX] {
        match World::threads(&Backend::cpu(), size) {
            Err(Error::Invalid { what, .. }) if what == "size" => {}
            other => return Err(format!("{size}: {other:?}").into()),
        }
    }
    assert_eq!(World::threads(&Backend::cpu(), 64)?.len(), 64);
    Ok(())
}
