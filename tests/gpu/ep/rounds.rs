//! Rounds that are queued without waiting: delays on every rank, late ranks beside large kernels, many tokens, other launches.

use std::time::Duration;

use moe_kernels::check::Shape;
use moe_kernels::check::ep::Script;
use moe_kernels::check::ep::cases::{Traffic, combine_script, low_latency, many_tokens};
use moe_kernels::check::ep::inputs::Ids;
use moe_kernels::ep::{Config, Layout, Mode, PhaseTuning, Reduce, Tuning, Wire, World};
use moe_kernels::gpu::{Buffer, Geometry, Stream};
use moe_kernels::random::SplitMix64;
use moe_kernels::{Backend, DType, Error, Result};

use super::super::kernels::{Form, KERNELS, Test as Kernel, Together, delay};
use super::rig::{Options, Rig, run, run_sharing};
use super::{Needs, Outcome, Test, base, ensure, failed, gpus, report};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("ep rounds: what is wrong is found", Needs::GpuAlone, faults),
    ("ep rounds: random delays", Needs::GpuAlone, delays),
    ("ep rounds: thousands", Needs::GpuAlone, stress),
    ("ep rounds: late ranks beside other kernels", Needs::GpuAlone, late),
    ("ep rounds: late rows beside other kernels", Needs::GpuAlone, late_rows),
    ("ep rounds: what early promises", Needs::GpuAlone, promised),
    ("ep rounds: grids that would stop a late rank are refused", Needs::GpuAlone, refused),
    ("ep rounds: 65536 tokens", Needs::GpuAlone, many),
    ("ep rounds: 524288 tokens", Needs::GpuAlone, most),
    ("ep rounds: the same bytes with any launch", Needs::GpuAlone, same_bytes),
];

pub fn with_modes(config: Config) -> [Config; 2] {
    [config.clone(), Config { mode: Mode::LowLatency, expected_tokens: 4, ..config }]
}

fn delay_configs() -> Vec<(usize, Config)> {
    let by_expert = Layout::ByExpert { segment_align: 4 };
    let mut all: Vec<(usize, Config)> = Vec::new();
    for ranks in [1, 2, 3, 4, 8] {
        all.extend(with_modes(base()).map(|config| (ranks, config)));
        all.push((ranks, Config { layout: by_expert, in_flight: 2, reduce: Reduce::AtSource, ..base() }));
    }
    all
}

/// Ranks that wait in their largest grids, for tokens of which there are few and many.
fn late_configs() -> Vec<Config> {
    let many = Config { max_tokens: 4096, ..Config::new(256, DType::BF16, 16, 4, 4096) };
    let mut all = with_modes(Config { timeout: Duration::from_secs(6), ..many.clone() }).to_vec();
    all.push(Config { mode: Mode::LowLatency, expected_tokens: 1, ..base() });
    all.push(Config { layout: Layout::ByExpert { segment_align: 4 }, ..many });
    all.into_iter().map(|config| Config { timeout: Duration::from_secs(6), ..config }).collect()
}

fn large(hidden: usize, num_tokens: usize) -> Config {
    Config { timeout: Duration::from_secs(40), ..Config::new(hidden, DType::BF16, 64, 8, num_tokens) }
}

const MANY: usize = 65_536;
const MOST: usize = 524_288;

pub fn shapes() -> Vec<Shape> {
    let mut all: Vec<Shape> = delay_configs().into_iter().map(|(ranks, config)| (ranks, config, Tuning::default())).collect();
    for ranks in [2, 4] {
        all.extend(late_configs().into_iter().map(|config| (ranks, config, Tuning::default())));
        all.push((ranks, large(2048, MANY), Tuning::default()));
    }
    all.push((2, large(2048, MOST), Tuning::default()));
    let early = Tuning { early: true, ..Tuning::default() };
    all.extend(late_configs().into_iter().chain([base()]).map(|config| (2, config, early)));
    all.push((1, base(), early));
    for script in scripts() {
        all.extend(tunings().map(|tuning| (script.world, script.config.clone(), Tuning { sums: script.tuning().sums, ..tuning })));
    }
    all
}

/// The checks of rounds see a row of another token, a wrong sum, and a row that should not have been written.
fn faults() -> Outcome {
    let config = base();
    let row = config.hidden * 4;
    let work = |world: World| -> Result<()> {
        let mut rig = Rig::new(&world, &config, Options { full: true, ..Options::default() })?;
        rig.round(0)?;
        rig.verdict()?;
        let finds = |rig: &Rig, what: &str| -> Result<()> {
            let found = rig.verdict().expect_err(what).to_string();
            assert!(found.contains(what), "{found}: {what} was spoilt");
            rig.clear_report()
        };
        let arrival = rig.dispatch(0)?;
        rig.expect(0)?;
        rig.spoil_slots(0, 8)?; // the token of row 1
        rig.compare_rows(0, &arrival)?;
        finds(&rig, "source")?;
        rig.check_rows(0, &arrival)?;
        rig.verdict()?;
        drop(arrival);
        for (at, what) in [(3 * row + 5, "sum"), (config.max_tokens * row, "a row that is not there")] {
            let arrival = rig.dispatch(0)?;
            rig.combine(0, arrival)?;
            rig.check_sums(0)?;
            rig.verdict()?;
            rig.spoil_sums(0, at)?;
            rig.check_sums(0)?;
            finds(&rig, what)?;
            rig.advance(0)?;
        }
        rig.finish()
    };
    run(2, false, work).map(drop).map_err(|error| failed("faults", &error))
}

/// Now and then a kernel that takes up to 150 us (arbitrary: several rounds of a small world).
fn pause(rig: &Rig, random: &mut SplitMix64) -> Result<()> {
    if random.below(3) == 0 { delay(&rig.stream, random.below(150_000)) } else { Ok(()) }
}

/// Every rank is late in other steps of other rounds; no rank waits on its host.
fn delays() -> Outcome {
    for (i, (ranks, config)) in delay_configs().into_iter().enumerate() {
        let work = |world: World| -> Result<()> {
            let mut rig = Rig::new(&world, &config, Options { staged: i % 2 == 1, ..Options::default() })?;
            let mut random = SplitMix64::stream(i as u64, world.rank().0.into());
            delay(&rig.stream, 0)?; // loads it
            world.barrier()?;
            for _ in 0..25 {
                pause(&rig, &mut random)?;
                let arrival = rig.dispatch(0)?;
                pause(&rig, &mut random)?;
                rig.check_rows(0, &arrival)?;
                rig.combine(0, arrival)?;
                pause(&rig, &mut random)?;
                rig.check_sums(0)?;
                rig.advance(0)?;
            }
            rig.finish()
        };
        run(ranks, i % 2 == 0, work).map_err(|error| failed(&format!("{ranks} ranks, {config:?}"), &error))?;
    }
    Ok(())
}

/// Rounds of each world and form, of which there are 9: 10,800 in all unless `MOE_STRESS_ROUNDS` says how many.
fn num_rounds() -> usize {
    std::env::var("MOE_STRESS_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1200)
}

/// New data in each round, all of it checked; some ranks late in some rounds.
fn stress() -> Outcome {
    // Queues hold some 1000 launches: a rank that waits for room in its own would keep the others from launching what it waits for.
    const AT_ONCE: usize = 40;
    for (i, (ranks, config)) in delay_configs().into_iter().enumerate().filter(|(_, (ranks, _))| ranks.is_power_of_two() && *ranks > 1) {
        let work = |world: World| -> Result<()> {
            let mut rig = Rig::new(&world, &config, Options { staged: i % 2 == 0, ..Options::default() })?;
            let mut random = SplitMix64::stream(i as u64, world.rank().0.into());
            delay(&rig.stream, 0)?; // loads it
            world.barrier()?;
            for round in 0..num_rounds() {
                if random.below(16) == 0 {
                    delay(&rig.stream, random.below(50_000))?; // 50 us: arbitrary, a round's time
                }
                rig.round(0)?;
                if round % AT_ONCE == 0 {
                    rig.verdict()?;
                }
            }
            rig.finish()
        };
        run(ranks, i % 2 == 0, work).map_err(|error| failed(&format!("{ranks} ranks, {config:?}"), &error))?;
    }
    Ok(())
}

/// A kernel that fills the device several times over, with so much shared memory in each block.
fn beside(stream: &Stream, memory: &Buffer, smem_bytes: u32) -> Result<()> {
    let form = Form { smem_bytes, cluster: 1, cooperative: false, programmatic: false };
    let kernel = KERNELS.get("test", stream, Kernel::Together(form))?;
    let at = memory.address().address;
    let geometry = Geometry { grid: [(memory.len() / 4) as u32, 1, 1], threads: 256, smem_bytes, ..Geometry::default() };
    // SAFETY: the kernel is `together`, with as many words as blocks; the memory lives until the stream was waited for.
    unsafe { kernel.launch(stream, &geometry, &Together { sums: at, turned: at, arrivals: at }) }
}

/// Shared memory of blocks beside which others wait: nearly all, some, little.
const BESIDE: [u32; 3] = [200 << 10, 16 << 10, 2 << 10];

/// Some rank waits in each of its kernels, the others come later, after kernels of their own.
fn late() -> Outcome {
    for config in late_configs() {
        for ranks in [2, 4] {
            for smem_bytes in BESIDE {
                let work = |world: World| -> Result<()> {
                    let mut rig = Rig::new(&world, &config, Options { full: true, ..Options::default() })?;
                    let memory = Buffer::new(rig.stream.device(), 4 * 600)?; // 600 blocks: arbitrary, several on each multiprocessor
                    memory.fill(&rig.stream, 0, memory.len(), 0)?;
                    beside(&rig.stream, &memory, smem_bytes)?;
                    rig.stream.synchronize()?;
                    world.barrier()?;
                    for early in 0..2 {
                        let is_late = world.rank().0 != early;
                        let come = |rig: &Rig| -> Result<()> {
                            if is_late {
                                std::thread::sleep(Duration::from_millis(3));
                                beside(&rig.stream, &memory, smem_bytes)?;
                            }
                            Ok(())
                        };
                        come(&rig)?;
                        let arrival = rig.dispatch(0)?;
                        rig.check_rows(0, &arrival)?;
                        come(&rig)?;
                        rig.combine(0, arrival)?;
                        rig.check_sums(0)?;
                        rig.advance(0)?;
                        rig.stream.synchronize()?;
                        world.barrier()?;
                    }
                    rig.finish()?;
                    drop(memory);
                    Ok(())
                };
                let name = format!("{ranks} ranks, {} KB beside them, {config:?}", smem_bytes >> 10);
                run(ranks, ranks == 2, work).map_err(|error| failed(&name, &error))?;
            }
        }
    }
    Ok(())
}

/// Some rank waits in `payload` for the rows of the others, which have routed, and come with kernels of their own before they send any.
fn late_rows() -> Outcome {
    // The other mode has one kernel.
    for config in late_configs().into_iter().filter(|config| config.mode == Mode::Throughput) {
        for (ranks, programmatic, early) in [(2, false, false), (4, true, false), (2, true, true)] {
            if early && config.layout != Layout::ByToken {
                continue;
            }
            for smem_bytes in BESIDE {
                let work = |world: World| -> Result<()> {
                    let tuning = Tuning { early, ..Tuning::default() };
                    let mut rig = Rig::new(&world, &config, Options { full: true, tuning, ..Options::default() })?;
                    let memory = Buffer::new(rig.stream.device(), 4 * 600)?; // 600 blocks, as above
                    memory.fill(&rig.stream, 0, memory.len(), 0)?;
                    beside(&rig.stream, &memory, smem_bytes)?;
                    delay(&rig.stream, 0)?; // loads it
                    rig.stream.synchronize()?;
                    world.barrier()?;
                    for first in 0..2 {
                        let (stream, is_late) = (rig.stream.clone(), world.rank().0 != first);
                        let between = || match is_late {
                            // 3 ms: arbitrary, after which the other rank's last block waits.
                            true => delay(&stream, 3_000_000).and_then(|()| beside(&stream, &memory, smem_bytes)),
                            false => Ok(()),
                        };
                        let arrival = rig.dispatch_around(0, between)?;
                        rig.check_rows(0, &arrival)?;
                        rig.combine(0, arrival)?;
                        rig.check_sums(0)?;
                        rig.advance(0)?;
                        // Nothing but the combine behind the dispatch, which with `early` is there while the rows are not.
                        let arrival = rig.dispatch_around(0, between)?;
                        rig.combine_alone(0, arrival)?;
                        rig.stream.synchronize()?;
                        world.barrier()?;
                    }
                    rig.finish()?;
                    drop(memory);
                    Ok(())
                };
                let name = format!("{ranks} ranks, {} KB beside them, early {early}, {config:?}", smem_bytes >> 10);
                run(ranks, programmatic, work).map_err(|error| failed(&name, &error))?;
            }
        }
    }
    Ok(())
}

/// With the promise that rows are combined in place, other combines are refused, and the arrival is given back.
fn promised() -> Outcome {
    let tuning = Tuning { early: true, ..Tuning::default() };
    let work = |world: World| -> Result<()> {
        let mut staged = Rig::new(&world, &base(), Options { tuning, staged: true, ..Options::default() })?;
        for _ in 0..2 {
            let arrival = staged.dispatch(0)?;
            match staged.combine_alone(0, arrival) {
                Err(Error::Invalid { what, got, want, .. }) if what == "y" && got == "staged" && want.contains("early") => {}
                other => panic!("{other:?}"),
            }
        }
        staged.finish()?;
        for config in [Config { wire: Wire::Fp8Direct, ..base() }, Config { layout: Layout::ByExpert { segment_align: 4 }, ..base() }] {
            match moe_kernels::ep::ExpertParallel::with_tuning(&world, config, tuning) {
                Err(Error::Invalid { what, .. }) if what == "early" => {}
                other => panic!("{:?}", other.map(drop)),
            }
        }
        let mut in_place = Rig::new(&world, &base(), Options { tuning, ..Options::default() })?;
        (0..3).try_for_each(|_| in_place.round(0))?;
        in_place.finish()
    };
    run_sharing(2, true, work).map_err(|error| failed("with programmatic launch", &error))?;
    // Nothing starts early without it, nor beside nobody.
    let any = |world: World| -> Result<()> {
        let mut rig = Rig::new(&world, &base(), Options { tuning, staged: true, ..Options::default() })?;
        (0..3).try_for_each(|_| rig.round(0))?;
        rig.finish()
    };
    run(2, false, any).map_err(|error| failed("without", &error))?;
    run(1, true, any).map(drop).map_err(|error| failed("alone", &error))
}

/// A combine of a block on each multiprocessor, from each of two ranks, whose blocks wait. Where calls are so large that theirs do not, those of smaller calls are cut.
fn refused() -> Outcome {
    let Backend::Cuda(cuda) = Backend::cuda(0)? else { unreachable!("a GPU was asked for") };
    let num_sms = cuda.device().num_sms();
    for geometry in [(num_sms, 512), (4 * num_sms, 512)] {
        let tuning = Tuning { combine: PhaseTuning { geometry: Some(geometry), sms: None }, ..Tuning::default() };
        let config = Config { max_tokens: 128, ..base() };
        let results = World::run(&Backend::cuda(0)?, 2, |world| {
            moe_kernels::ep::ExpertParallel::with_tuning(&world, config.clone(), tuning).map(drop)
        })?;
        for result in results {
            let is_refused = |error: &Error| matches!(error, Error::Invalid { .. });
            match &result {
                Err(Error::Setup { error, .. }) if is_refused(error) => {}
                Err(error) if is_refused(error) => {}
                other => return Err(format!("{geometry:?}: {other:?}").into()),
            }
        }
        let config = Config { max_tokens: 4096, ..base() };
        let work = |world: World| -> Result<()> {
            let mut rig = Rig::new(&world, &config, Options { tuning, ..Options::default() })?;
            (0..3).try_for_each(|_| rig.round(0))?;
            rig.finish()
        };
        run_sharing(2, false, work).map_err(|error| failed(&format!("{geometry:?}, many tokens"), &error))?;
    }
    // Of a dispatch's rows one block waits, however many there are; the blocks of its first kernel, which wait, are the rule's, and cut as without a caller's.
    let phase = PhaseTuning { geometry: Some((7168, 256)), sms: None };
    let tuning = Tuning { dispatch: phase, ..Tuning::default() };
    let config = Config { max_tokens: 4096, ..base() };
    let work = |world: World| -> Result<()> {
        let mut rig = Rig::new(&world, &config, Options { tuning, ..Options::default() })?;
        (0..3).try_for_each(|_| rig.round(0))?;
        rig.finish()
    };
    run_sharing(8, false, work).map(drop).map_err(|error| failed("a dispatch of many blocks", &error))
}

fn large_rounds(ranks: usize, num_tokens: usize) -> Outcome {
    let config = large(2048, num_tokens);
    let work = |world: World| -> Result<f64> {
        let mut rig = Rig::new(&world, &config, Options { full: true, ..Options::default() })?;
        let start = std::time::Instant::now();
        for _ in 0..2 {
            rig.round(0)?;
        }
        rig.stream.synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        rig.finish().map(|()| seconds)
    };
    let seconds = run(ranks, true, work).map_err(|error| failed(&format!("{ranks} ranks, {num_tokens} tokens"), &error))?;
    report(format!("{num_tokens} tokens on each of {ranks} ranks: a round with its checks {:.1} ms", seconds[0] / 2.0 * 1e3));
    Ok(())
}

fn many() -> Outcome {
    large_rounds(2, MANY)?;
    large_rounds(4, MANY)
}

fn most() -> Outcome {
    large_rounds(2, MOST)
}

/// Worlds and forms whose bytes must not depend on launches, without NaN, whose bits may differ: the last number modulo 3 is not 1.
fn scripts() -> Vec<Script> {
    let few = Traffic { tokens: vec![9, 4, 0, 12], k: 8, num_experts: 60, map: None, ids: Ids::Messy };
    let by_expert = Layout::ByExpert { segment_align: 8 };
    let of = |traffic: &Traffic, hidden, layout, index| {
        combine_script("any launch", Config { fold_weights: true, ..traffic.config(hidden, DType::BF16, layout) }, traffic, index)
    };
    vec![
        of(&few, 1024, Layout::ByToken, 0),
        low_latency(of(&few, 1024, Layout::ByToken, 0)),
        of(&many_tokens(), 144, Layout::ByToken, 5),
        of(&many_tokens(), 1024, by_expert, 6),
        low_latency(of(&few, 144, by_expert, 3)),
    ]
}

fn tunings() -> [Tuning; 8] {
    let of = |dispatch, combine| {
        let phase = |geometry| PhaseTuning { geometry, sms: None };
        Tuning { dispatch: phase(dispatch), combine: phase(combine), ..Tuning::default() }
    };
    let sms = |n| {
        let phase = PhaseTuning { geometry: None, sms: Some(n) };
        Tuning { dispatch: phase, combine: phase, ..Tuning::default() }
    };
    [
        Tuning::default(),
        of(Some((1, 64)), Some((1, 64))),
        of(Some((7, 128)), Some((5, 128))),
        of(Some((16, 256)), Some((12, 256))),
        of(Some((5, 512)), Some((8, 512))),
        of(Some((2, 1024)), Some((1, 1024))),
        sms(1),
        sms(4),
    ]
}

/// With every geometry, with and without programmatic launch, and as on a CPU.
fn same_bytes() -> Outcome {
    let cuda = gpus()?;
    for script in scripts() {
        let sums = script.tuning().sums;
        let name = script.name.clone();
        let prepared = script.prepare().map_err(|f| f.0)?;
        let want = prepared.run(&Backend::cpu()).map_err(|f| f.0)?.out;
        for (i, tuning) in tunings().into_iter().enumerate() {
            let backend = Backend::Cuda(cuda.clone().programmatic(i % 2 == 1));
            let got = prepared.run_tuned(&backend, Tuning { sums, ..tuning }).map_err(|f| format!("{tuning:?}: {}", f.0))?;
            ensure(got.out == want, format!("{name}: other bytes with {tuning:?}"))?;
        }
    }
    Ok(())
}
