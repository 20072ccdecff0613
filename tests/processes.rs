//! Tests of worlds of one process per rank: this program starts itself again for each rank.

use std::collections::BTreeMap;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use moe_kernels::check::ep::processes as scripts;
use moe_kernels::ep::{Config, ExpertParallel, Launched, Rendezvous, Secret, World, launch, launch_command};
use moe_kernels::error::{Failure, FailureKind};
use moe_kernels::ops::dispatch;
use moe_kernels::{Backend, Error, Rank, Result};
use serde::{Deserialize, Serialize};

use crate::gpu::ep::processes as on_gpu;
use crate::world::{BOUND, config, first_cause, one_call, one_dispatch, short, stress_configs, stress_rank};

/// Names the work of a rank, in its environment.
pub const VARIABLE: &str = "MOE_KERNELS_TEST_RANK";
/// A number or name that the work needs.
const DETAIL: &str = "MOE_KERNELS_TEST_DETAIL";
/// Rounds of the stress test of 2 and 4 processes [default: 500]; a fifth of it with 8.
const ROUNDS: &str = "MOE_STRESS_ROUNDS";

type Test = fn() -> Result<(), Failed>;

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    let mut add = |name: String, test: Box<dyn Fn() -> Result<(), Failed> + Send>| {
        trials.push(Trial::test(format!("processes::cpu::{name}"), test));
    };
    for ranks in [1, 2, 3, 4, 8] {
        add(format!("the same bytes as threads::{ranks} ranks"), Box::new(move || all_well("scripts", "", ranks)));
    }
    for ranks in [2, 4, 8] {
        add(format!("rounds without barrier::{ranks} ranks"), Box::new(move || all_well("stress", &num_rounds(ranks).to_string(), ranks)));
    }
    for step in ["dispatch", "combine", "setup"] {
        for victim in [0, 1] {
            add(format!("a killed process, in {step}::rank {victim}"), Box::new(move || killed(step, victim)));
        }
    }
    let named: [(&str, Test); 16] = [
        ("two killed processes", two_killed),
        ("a process killed while ranks meet", killed_in_the_meeting),
        ("a rank that never comes", never_comes),
        ("a rank that never dispatches", never_dispatches),
        ("a rank that panics", panics),
        ("a rank that leaves", leaves),
        ("setup differs", setup_differs),
        ("setup fails on one", setup_fails_on_one),
        ("the wrong secret", wrong_secret),
        ("over TCP", over_tcp),
        ("a rank too many", rank_too_many),
        ("another world size", another_size),
        ("the socket of a dead job", dead_job),
        ("two groups at once", two_groups),
        ("nothing is left", || all_well("nothing left", "", 3)),
        ("the launcher", launcher),
    ];
    for (name, test) in named {
        add(name.into(), Box::new(test));
    }
    trials
}

fn num_rounds(ranks: usize) -> usize {
    let rounds = std::env::var(ROUNDS).ok().and_then(|text| text.parse().ok()).unwrap_or(500);
    if ranks > 4 { rounds / 5 } else { rounds }
}

/// What a rank says when it ends: its result, and the time that its failing call took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Said {
    result: Result<()>,
    seconds: f64,
    /// Of the work in a rebuilt world.
    again: Option<Result<()>>,
}

impl Said {
    fn just(result: Result<()>) -> Self {
        Said { result, seconds: 0.0, again: None }
    }

    fn timed(work: impl FnOnce() -> Result<()>) -> Self {
        let start = Instant::now();
        let result = work();
        Said { seconds: start.elapsed().as_secs_f64(), ..Said::just(result) }
    }

    fn error(&self) -> Result<&Error, Failed> {
        self.result.as_ref().err().ok_or_else(|| Failed::from(format!("no error: {self:?}")))
    }
}

/// One rank: the work that the parent named.
pub fn child(work: &str) -> ExitCode {
    let detail = std::env::var(DETAIL).unwrap_or_default();
    let said = match work {
        "scripts" => Said::just(join().and_then(|w| scripts::run(&w, "").map(|num| assert!(num > 0)).map_err(of_check))),
        "stress" => Said::just(join().and_then(|w| {
            let rounds = detail.parse().expect("a number of rounds");
            stress_configs().iter().try_for_each(|(_, config)| stress_rank(&w, config, rounds))
        })),
        "killed" => killed_rank(&detail),
        "gpu rounds" => Said::just(on_gpu::join().and_then(|w| on_gpu::rounds(&w, detail.parse().expect("a number of rounds")))),
        "gpu killed" => killed_on_gpu(&detail),
        "gpu leave" => Said::timed(|| on_gpu::join().and_then(on_gpu::leave)),
        "meet" => met(&detail),
        "late" => Said::just(join().and_then(|w| never_dispatches_rank(&w))),
        "panic" => Said::just(join().and_then(|w| panic_rank(&w))),
        "leave" => Said::timed(|| join().and_then(leave_rank)),
        "differ" => Said::just(join().and_then(|w| {
            let k = if w.rank() == Rank(2) { detail.parse().expect("a number") } else { config().k };
            ExpertParallel::new(&w, Config { k, ..config() }).map(|_| ())
        })),
        "groups" => Said::just(groups_rank()),
        "nothing left" => Said::just(nothing_left_rank()),
        "status" => return ExitCode::from(std::env::var("RANK").map_or(9, |rank| rank.parse().unwrap_or(9))),
        _ => panic!("no work named `{work}`"),
    };
    println!("{}", serde_json::to_string(&said).expect("a result can be written"));
    ExitCode::SUCCESS
}

fn of_check(failed: moe_kernels::check::Failed) -> Error {
    Error::Io { what: "checking".into(), why: failed.0 }
}

fn join() -> Result<World> {
    World::join(&Backend::cpu(), &Rendezvous::from_env("test")?)
}

/// A folder for the meetings of one test.
fn folder() -> Result<(tempfile::TempDir, PathBuf), Failed> {
    let temporary = tempfile::tempdir()?;
    let path = temporary.path().join("m");
    Ok((temporary, path))
}

/// The ranks of a world, at work.
fn start(work: &str, detail: &str, ranks: usize, folder: &Path) -> Result<Launched, Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    command.env(VARIABLE, work).env(DETAIL, detail).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(launch_command(&mut command, ranks, Some(folder.into()))?)
}

/// How a rank ended, and what it said.
struct Ended {
    status: ExitStatus,
    said: Option<Said>,
    stderr: String,
}

fn finish(mut launched: Launched, ranks: usize) -> Result<Vec<Ended>, Failed> {
    let mut texts = Vec::new();
    for rank in 0..ranks {
        let child = launched.child(Rank(rank as u32)).ok_or("no such rank")?;
        let (mut out, mut err) = (String::new(), String::new());
        child.stdout.take().ok_or("no stdout")?.read_to_string(&mut out)?;
        child.stderr.take().ok_or("no stderr")?.read_to_string(&mut err)?;
        texts.push((out, err));
    }
    let statuses = launched.wait()?;
    let ended = |(status, (out, stderr)): (ExitStatus, (String, String))| Ended { status, said: serde_json::from_str(&out).ok(), stderr };
    Ok(statuses.into_iter().zip(texts).map(ended).collect())
}

/// Runs the ranks and expects all to end, and their meeting place to be gone.
fn run(work: &str, detail: &str, ranks: usize) -> Result<Vec<Ended>, Failed> {
    let (_temporary, folder) = folder()?;
    let ended = finish(start(work, detail, ranks, &folder)?, ranks)?;
    if folder.exists() {
        return Err(format!("{} was left behind", folder.display()).into());
    }
    Ok(ended)
}

fn said(ended: &Ended) -> Result<&Said, Failed> {
    ended.said.as_ref().ok_or_else(|| Failed::from(format!("a rank said nothing: {}\n{}", ended.status, ended.stderr)))
}

/// Runs the ranks, and expects that all is well.
pub fn all_well(work: &str, detail: &str, ranks: usize) -> Result<(), Failed> {
    for (rank, ended) in run(work, detail, ranks)?.iter().enumerate() {
        if let Err(error) = &said(ended)?.result {
            return Err(format!("rank {rank}: {error}").into());
        }
    }
    Ok(())
}

/// Ends this process as the system does when memory is short: nothing runs afterwards.
fn kill_myself() -> ! {
    let me = rustix::process::getpid();
    rustix::process::kill_process(me, rustix::process::Signal::KILL).expect("a process may end itself");
    unreachable!("SIGKILL cannot be caught");
}

fn kill_myself_in(delay: Duration) {
    std::thread::spawn(move || {
        std::thread::sleep(delay);
        kill_myself();
    });
}

/// Long enough for every other rank to wait, and for a victim to be inside a call (arbitrary).
const INSIDE: Duration = Duration::from_millis(300);

/// `detail`: the step and the victims. The victim is killed inside the step, while another rank is late for it.
fn killed_rank(detail: &str) -> Said {
    let (step, victims) = detail.split_once(' ').expect("a step and victims");
    let victims: Vec<usize> = victims.split(',').map(|v| v.parse().expect("a rank")).collect();
    let rendezvous = Rendezvous::from_env("test").expect("an environment");
    let (me, size) = (rendezvous.rank().index(), rendezvous.size());
    let late = size - 1;
    let mut start = Instant::now();
    let result = (|| {
        let w = World::join(&Backend::cpu(), &rendezvous)?;
        let enter = |start: &mut Instant| {
            *start = Instant::now();
            if victims.contains(&me) {
                kill_myself_in(INSIDE);
            }
            if me == late {
                std::thread::sleep(3 * INSIDE);
            }
        };
        if step == "setup" {
            enter(&mut start);
        }
        let mut ep = ExpertParallel::new(&w, config())?;
        let mut routing = dispatch::Routing::new(&ep)?;
        one_call(&mut ep, &mut routing)?;
        if step == "dispatch" {
            enter(&mut start);
            return one_call(&mut ep, &mut routing);
        }
        let arrival = one_dispatch(&mut ep, &mut routing)?;
        enter(&mut start);
        crate::world::one_combine(&mut ep, &routing, arrival)
    })();
    let seconds = start.elapsed().as_secs_f64();
    // The survivors build a smaller world.
    let rank = me - victims.iter().filter(|v| **v < me).count();
    let again = Rendezvous::from_env("survivors")
        .and_then(|from_env| from_env.generation(1).as_rank(Rank(rank as u32), size - victims.len()))
        .and_then(|rendezvous| World::join(&Backend::cpu(), &rendezvous))
        .and_then(|w| stress_rank(&w, &config(), 3));
    Said { result, seconds, again: Some(again) }
}

/// As `killed_rank`, on a GPU, in the middle of rounds.
fn killed_on_gpu(detail: &str) -> Said {
    let (_, victim) = detail.split_once(' ').expect("a step and a victim");
    let victim: usize = victim.parse().expect("a rank");
    let rendezvous = Rendezvous::from_env("test").expect("an environment");
    let (me, size) = (rendezvous.rank().index(), rendezvous.size());
    let mut start = Instant::now();
    let result = on_gpu::join().and_then(|w| {
        let enter = || {
            start = Instant::now();
            if me == victim {
                kill_myself_in(INSIDE);
            }
        };
        on_gpu::endless(&w, enter)
    });
    let seconds = start.elapsed().as_secs_f64();
    Said { result, seconds, again: Some(on_gpu::again(me - usize::from(victim < me), size - 1)) }
}

/// Runs the ranks, of which the victims are killed; every survivor blames the same one, in time, and works on in a new world.
fn survivors_blame(step: &str, victims: &[usize], ranks: usize) -> Result<Failure, Failed> {
    survivors_blame_of("killed", step, victims, ranks)
}

/// As [`survivors_blame`], of other work.
pub fn survivors_blame_of(work: &str, step: &str, victims: &[usize], ranks: usize) -> Result<Failure, Failed> {
    let list = victims.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let ended = run(work, &format!("{step} {list}"), ranks)?;
    let mut causes = Vec::new();
    for (rank, ended) in ended.iter().enumerate() {
        if victims.contains(&rank) {
            assert!(!ended.status.success() && ended.said.is_none(), "rank {rank} was not killed: {}", ended.status);
            continue;
        }
        let said = said(ended)?;
        causes.push(first_cause(said.error()?).ok_or_else(|| format!("rank {rank}: {said:?}"))?);
        assert!(said.seconds < config().timeout.as_secs_f64() / 2.0, "rank {rank} found it after {} s", said.seconds);
        assert_eq!(said.again, Some(Ok(())), "rank {rank}: the rebuilt world");
    }
    let first = causes[0];
    assert!(causes.iter().all(|cause| *cause == first), "{causes:?}");
    assert!(first.kind == FailureKind::Died && victims.contains(&first.rank.index()), "{first:?}");
    Ok(first)
}

fn killed(step: &str, victim: usize) -> Result<(), Failed> {
    let first = survivors_blame(step, &[victim], 4)?;
    let want = match step {
        "dispatch" => ("dispatch", "counts"),
        "combine" => ("combine", "ready"),
        _ => ("ep setup", "setup"),
    };
    assert_eq!((first.op, first.phase), want);
    Ok(())
}

fn two_killed() -> Result<(), Failed> {
    survivors_blame("dispatch", &[1, 2], 4).map(|_| ())
}

/// A rank that meets others as `detail` says, if it says something of its rank: `3:die`, `1:skip`.
fn met(detail: &str) -> Said {
    let mut rendezvous = Rendezvous::from_env("test").expect("an environment").timeout(6 * BOUND).expect("a bound");
    let me = rendezvous.rank().to_string();
    let mut again = None;
    for part in detail.split_whitespace() {
        let (rank, what) = part.split_once(':').expect("rank and what");
        if rank != me && rank != "all" {
            continue;
        }
        match what.split_once('=').unwrap_or((what, "")) {
            ("die", _) => kill_myself_in(INSIDE),
            ("skip", _) => return Said::just(Ok(())),
            ("patient", _) => rendezvous = rendezvous.timeout(60 * BOUND).expect("a bound"),
            ("late", _) => std::thread::sleep(2 * INSIDE),
            ("secret", text) => rendezvous = rendezvous.secret(Secret::from_text(text).expect("a secret")),
            ("tcp", address) => {
                let secret = Secret::from_text("a secret of the test").expect("a secret");
                rendezvous = rendezvous.over_tcp(address, secret);
            }
            ("twice", _) => again = Some(()),
            ("size", size) => rendezvous = rendezvous.clone().as_rank(rendezvous.rank(), size.parse().expect("a size")).expect("a size"),
            other => panic!("{other:?}"),
        }
    }
    let start = Instant::now();
    // A second process that says that it is this rank too.
    let twin = again.map(|()| {
        let rendezvous = rendezvous.clone();
        std::thread::spawn(move || World::join(&Backend::cpu(), &rendezvous).and_then(|w| w.barrier()))
    });
    let result = World::join(&Backend::cpu(), &rendezvous).and_then(|w| w.barrier());
    let seconds = start.elapsed().as_secs_f64();
    Said { result, seconds, again: twin.map(|twin| twin.join().expect("no panic")) }
}

fn killed_in_the_meeting() -> Result<(), Failed> {
    for (detail, victim) in [("all:patient 1:die 3:skip", 1), ("all:patient 0:die 3:skip", 0)] {
        let ended = run("meet", detail, 4)?;
        for rank in (0..3).filter(|&rank| rank != victim) {
            let said = said(&ended[rank])?;
            let first = first_cause(said.error()?).ok_or_else(|| format!("rank {rank}: {said:?}"))?;
            assert!(first.kind == FailureKind::Died && first.rank.index() == victim, "{said:?}");
            assert!(said.seconds < 20.0 * BOUND.as_secs_f64(), "rank {rank} found it after {} s", said.seconds);
        }
    }
    Ok(())
}

fn never_comes() -> Result<(), Failed> {
    let ended = run("meet", "2:skip", 4)?;
    let causes: Vec<_> = [0, 1, 3].into_iter().map(|rank| Ok(first_cause(said(&ended[rank])?.error()?))).collect::<Result<_, Failed>>()?;
    let first = causes[0].ok_or("no cause")?;
    assert!(causes.iter().all(|cause| *cause == Some(first)), "{causes:?}");
    assert_eq!((first.kind, first.rank, first.peer), (FailureKind::Timeout, Rank(0), Rank(2)));
    Ok(())
}

fn never_dispatches_rank(w: &World) -> Result<()> {
    let mut ep = ExpertParallel::new(w, short())?;
    let mut routing = dispatch::Routing::new(&ep)?;
    one_call(&mut ep, &mut routing)?;
    if w.rank() == Rank(1) {
        std::thread::sleep(3 * BOUND);
        return Ok(());
    }
    let error = one_call(&mut ep, &mut routing).unwrap_err();
    let later = one_call(&mut ep, &mut routing).unwrap_err();
    assert_eq!(first_cause(&later), first_cause(&error));
    assert!(w.barrier().is_err() && w.failure() == first_cause(&error));
    Err(error)
}

/// Every rank but `culprit` failed with the same cause, which names it.
fn all_blame(ended: &[Ended], culprit: usize, kind: FailureKind) -> Result<(), Failed> {
    let others = || (0..ended.len()).filter(|&rank| rank != culprit);
    let causes: Vec<_> = others().map(|rank| Ok(first_cause(said(&ended[rank])?.error()?))).collect::<Result<_, Failed>>()?;
    let first = causes[0].ok_or("no cause")?;
    assert!(causes.iter().all(|cause| *cause == Some(first)), "{causes:?}");
    assert!(first.kind == kind && (first.rank.index() == culprit || first.peer.index() == culprit), "{first:?}");
    Ok(())
}

fn never_dispatches() -> Result<(), Failed> {
    let ended = run("late", "", 4)?;
    all_blame(&ended, 1, FailureKind::Timeout)?;
    let is_timeout = |ended: &&Ended| ended.said.as_ref().is_some_and(|said| matches!(said.result, Err(Error::Timeout { .. })));
    assert_eq!(ended.iter().filter(is_timeout).count(), 1, "one rank finds out first");
    Ok(())
}

fn panic_rank(w: &World) -> Result<()> {
    let mut ep = ExpertParallel::new(w, config())?;
    let mut routing = dispatch::Routing::new(&ep)?;
    one_call(&mut ep, &mut routing)?;
    if w.rank() == Rank(2) {
        panic!("as a bug would");
    }
    one_call(&mut ep, &mut routing)
}

fn panics() -> Result<(), Failed> {
    all_blame(&run("panic", "", 3)?, 2, FailureKind::Panicked)
}

fn leave_rank(w: World) -> Result<()> {
    let mut ep = ExpertParallel::new(&w, config())?;
    let mut routing = dispatch::Routing::new(&ep)?;
    one_call(&mut ep, &mut routing)?;
    if w.rank() == Rank(0) {
        // The process goes on: the others must not wait for its end.
        drop((w, ep, routing));
        std::thread::sleep(2 * INSIDE);
        return Ok(());
    }
    one_call(&mut ep, &mut routing)
}

fn leaves() -> Result<(), Failed> {
    one_left("leave", 3)
}

/// Rank 0 leaves in `work`: the others say so, long before their bound.
pub fn one_left(work: &str, ranks: usize) -> Result<(), Failed> {
    let ended = run(work, "", ranks)?;
    all_blame(&ended, 0, FailureKind::Left)?;
    // Rank 0 does something else for a while.
    let its = said(&ended[0])?.seconds;
    let slowest = ended[1..].iter().filter_map(|ended| ended.said.as_ref()).map(|said| said.seconds).fold(0.0, f64::max);
    assert!(slowest < its, "found after {slowest} s, rank 0 was there for {its}");
    Ok(())
}

fn setup_differs() -> Result<(), Failed> {
    for ended in run("differ", "2", 3)? {
        let error = said(&ended)?.error()?.clone();
        assert!(matches!(&error, Error::Mismatch { first: Rank(0), second: Rank(2), what, .. } if what == "k"), "{error:?}");
    }
    Ok(())
}

fn setup_fails_on_one() -> Result<(), Failed> {
    for ended in run("differ", "0", 3)? {
        let error = said(&ended)?.error()?.clone();
        let Error::Setup { rank: Rank(2), op: "ep setup", error } = error else { return Err(format!("{error:?}").into()) };
        assert!(matches!(&*error, Error::Invalid { what, .. } if what == "k"), "{error:?}");
    }
    Ok(())
}

fn is_wrong_secret(error: &Error) -> bool {
    matches!(error, Error::Invalid { what, .. } if what == "secret")
}

fn wrong_secret() -> Result<(), Failed> {
    // Both wait for their bounds: at the same time.
    let (of_a_rank, of_rank_0) = std::thread::scope(|scope| {
        let second = scope.spawn(|| run("meet", "0:secret=not-that-of-the-job", 2));
        (run("meet", "1:secret=not-that-of-the-job", 3), second.join().expect("no panic"))
    });
    let ended = of_a_rank?;
    let error = said(&ended[1])?.error()?;
    assert!(is_wrong_secret(error), "{error:?}");
    // For the others it has not come.
    for rank in [0, 2] {
        let first = first_cause(said(&ended[rank])?.error()?).ok_or("no cause")?;
        assert_eq!((first.kind, first.peer), (FailureKind::Timeout, Rank(1)));
    }
    // The others do not believe a rank 0 without the secret.
    assert!(is_wrong_secret(said(&of_rank_0?[1])?.error()?));
    Ok(())
}

/// An address of this machine that nobody listens at.
fn free_address() -> Result<String, Failed> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

fn over_tcp() -> Result<(), Failed> {
    let ended = run("meet", &format!("all:patient all:tcp={} 2:late", free_address()?), 3)?;
    for ended in &ended {
        assert_eq!(said(ended)?.result, Ok(()));
    }
    let ended = run("meet", &format!("all:tcp={} 1:secret=not-that-of-the-job", free_address()?), 2)?;
    assert!(is_wrong_secret(said(&ended[1])?.error()?));
    assert!(said(&ended[0])?.result.is_err());
    Ok(())
}

fn rank_too_many() -> Result<(), Failed> {
    let ended = run("meet", "all:patient 1:twice 2:late", 3)?;
    for rank in [0, 2] {
        assert_eq!(said(&ended[rank])?.result, Ok(()), "rank {rank}");
    }
    let said = said(&ended[1])?;
    let results = [&said.result, said.again.as_ref().ok_or("no second")?];
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1, "{results:?}");
    let error = results.into_iter().find_map(|result| result.as_ref().err()).ok_or("no error")?;
    assert!(matches!(error, Error::Invalid { what, .. } if what == "rank"), "{error:?}");
    Ok(())
}

fn another_size() -> Result<(), Failed> {
    let ended = run("meet", "all:patient 2:size=4 2:late", 3)?;
    for rank in [0, 2] {
        let error = said(&ended[rank])?.error()?;
        // Rank 1, which is right, hears of it if it has come by then.
        let is_it = matches!(error, Error::Mismatch { what, first: Rank(0), second: Rank(2), .. } if what == "world size");
        assert!(is_it, "rank {rank}: {error:?}");
    }
    Ok(())
}

fn sockets(folder: &Path) -> Result<Vec<PathBuf>, Failed> {
    let mut found = Vec::new();
    let Ok(jobs) = std::fs::read_dir(folder) else { return Ok(found) };
    for job in jobs {
        for file in std::fs::read_dir(job?.path())? {
            found.push(file?.path());
        }
    }
    Ok(found)
}

fn dead_job() -> Result<(), Failed> {
    let (_temporary, folder) = folder()?;
    // A process that meets nobody, killed.
    let mut command = Command::new(std::env::current_exe()?);
    command.env(VARIABLE, "meet").env(DETAIL, "all:patient").stdout(Stdio::null()).env("RANK", "0").env("WORLD_SIZE", "2");
    command.env("MOE_FOLDER", &folder).env("MOE_JOB", "a job").env_remove("MASTER_ADDR").env_remove("MASTER_PORT");
    let mut child = command.spawn()?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while sockets(&folder)?.len() < 2 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    // While it lives the place is taken.
    let same = Rendezvous::new("////a job", "test", Rank(0), 2)?.folder(&folder);
    let taken = World::join(&Backend::cpu(), &same);
    child.kill()?;
    child.wait()?;
    assert!(matches!(taken, Err(Error::Busy { .. })), "{taken:?}");
    assert_eq!(sockets(&folder)?.len(), 2, "a killed process cannot remove its files");
    let join = |rank| {
        let rendezvous = Rendezvous::new("////a job", "test", Rank(rank), 2)?.folder(&folder).timeout(20 * BOUND)?;
        World::join(&Backend::cpu(), &rendezvous).and_then(|w| stress_rank(&w, &config(), 3))
    };
    std::thread::scope(|scope| {
        // The other rank meets the dead socket first.
        let second = scope.spawn(|| join(1));
        std::thread::sleep(Duration::from_millis(50));
        join(0)?;
        second.join().expect("no panic")
    })?;
    assert!(!folder.exists(), "the place was left behind");
    Ok(())
}

fn groups_rank() -> Result<()> {
    let results = std::thread::scope(|scope| {
        let group = |name: &'static str| {
            move || World::join(&Backend::cpu(), &Rendezvous::from_env(name)?).and_then(|w| stress_rank(&w, &config(), 5))
        };
        let threads = [scope.spawn(group("first")), scope.spawn(group("second"))];
        threads.map(|thread| thread.join().expect("no panic"))
    });
    results.into_iter().collect()
}

fn two_groups() -> Result<(), Failed> {
    all_well("groups", "", 3)
}

/// Open files, mappings of our memory, and threads of this process.
fn held() -> BTreeMap<&'static str, usize> {
    let files = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mappings = maps.lines().filter(|line| line.contains("memfd:moe-kernels")).count();
    let threads = std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    BTreeMap::from([("files", files), ("mappings", mappings), ("threads", threads)])
}

fn nothing_left_rank() -> Result<()> {
    let mut rendezvous = Rendezvous::from_env("test")?;
    let before = held();
    for generation in 0..3 {
        rendezvous = rendezvous.generation(generation);
        let w = World::join(&Backend::cpu(), &rendezvous)?;
        let bytes = w.gather(Ok(vec![w.rank().0 as u8; 10 * w.rank().index()]))?;
        assert_eq!(bytes, [vec![], vec![1; 10], vec![2; 20]]);
        let mut ep = ExpertParallel::new(&w, config())?;
        let mut routing = dispatch::Routing::new(&ep)?;
        one_call(&mut ep, &mut routing)?;
        assert_eq!(held()["mappings"], 4, "the page, and the memory of three ranks");
        if generation == 1 {
            // A failed world leaves as little.
            match w.rank() {
                Rank(1) => drop((w, ep)),
                _ => assert!(one_call(&mut ep, &mut routing).is_err()),
            }
        }
    }
    assert_eq!(held(), before);
    Ok(())
}

fn launcher() -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    for (ranks, what) in [(0, "size"), (65, "size")] {
        assert!(matches!(launch(&program, [""; 0], ranks), Err(Error::Invalid { what: w, .. }) if w == what));
    }
    assert!(matches!(launch("/no/such/program", [""; 0], 2), Err(Error::Io { .. })));
    let (_temporary, folder) = folder()?;
    let statuses = start("status", "", 3, &folder)?.wait()?;
    assert_eq!(statuses.iter().map(ExitStatus::code).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
    // Who drops the ranks ends them.
    let mut launched = start("meet", "all:patient 0:skip", 2, &folder)?;
    let id = launched.child(Rank(1)).ok_or("no rank 1")?.id();
    drop(launched);
    assert!(!Path::new(&format!("/proc/{id}")).exists(), "a rank outlived its launcher");
    Ok(())
}
