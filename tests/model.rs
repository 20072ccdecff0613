//! The protocol under model checkers: every interleaving of two ranks with every reordering that the fences allow (loom), and the order of steps
//! of three and four (shuttle).
//!
//! The models run the library's words, fences and lists of steps. Mutants break one thing each: every fence that code names, every step, every
//! pair that `PROTOCOL.md` declares ordered, every rule of `signal::Rules`. A mutant that no model finds fails the trial, and so does a pair that
//! is declared independent and is not.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use libtest_mimic::{Failed, Trial};
use moe_kernels::ep::signal::Label;
use moe_kernels::ep::steps::Step;

mod page;
mod platform;
mod protocol;
mod ranks;

use platform::{IS_EXPECTED, Loom, Mutant, Platform, Shuttle, quiet_hook, under};
use ranks::{SCRIPTS, Script};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let mut trials = vec![
        Trial::test("model::protocol::every name in code is in the document, and the reverse", protocol::names_agree),
        Trial::test("model::protocol::every two neighbours are declared", protocol::pairs_are_complete),
    ];
    let mut add = |name: String, check: Box<dyn Fn() -> Result<(), Failed> + Send + Sync>| {
        trials.push(Trial::test(format!("model::{name}"), check));
    };
    for script in &SCRIPTS {
        add(format!("two ranks::{}", script.name), Box::new(|| sound::<Loom>(script, 2, script.steps())));
        for world in [3, 4] {
            add(format!("{world} ranks::{}", script.name), Box::new(move || sound::<Shuttle>(script, world, script.steps())));
        }
    }
    add("page::two first failures".into(), Box::new(|| passes(page::first_failure)));
    add("page::left".into(), Box::new(|| passes(|| page::published(Label::Left))));
    add("page::meet".into(), Box::new(|| passes(|| page::published(Label::Meet))));
    add("page::doorbell".into(), Box::new(|| passes(page::doorbell)));
    add("blocks::each one adds its share".into(), Box::new(|| passes(page::counted_blocks)));
    add("blocks::the last one signals".into(), Box::new(|| passes(|| page::last_block(Ordering::AcqRel))));
    for label in Label::ALL {
        let fences: &[Mutant] = match label {
            Label::Bell => &[Mutant::NoRelease(label), Mutant::WeakBell],
            _ => &[Mutant::NoRelease(label), Mutant::NoAcquire(label)],
        };
        for &mutant in fences {
            add(format!("mutants::{mutant:?}"), Box::new(move || killed(&[mutant])));
        }
    }
    for mutants in RULES {
        add(format!("mutants::{mutants:?}"), Box::new(|| killed(mutants)));
    }
    add("mutants::CountsAtLeast alone changes nothing".into(), Box::new(|| survives(&[Mutant::CountsAtLeast])));
    for fence in [Ordering::Release, Ordering::Acquire] {
        add(format!("mutants::the last block's fence is {fence:?}"), Box::new(move || must_fail(|| page::last_block(fence)).map(|_| ())));
    }
    add(
        "mutants::blocks do not release".into(),
        Box::new(|| must_fail(|| under(&[Mutant::NoRelease(Label::Done)], || page::last_block(Ordering::AcqRel))).map(|_| ())),
    );
    let of_shares =
        [Mutant::ShareOfOne, Mutant::ShareOfAll, Mutant::BlockStores, Mutant::NoRelease(Label::Done), Mutant::NoAcquire(Label::Done)];
    for mutant in of_shares {
        add(
            format!("mutants::shares of blocks: {mutant:?}"),
            Box::new(move || must_fail(|| under(&[mutant], page::counted_blocks)).map(|_| ())),
        );
    }
    for step in protocol::all_steps() {
        add(format!("mutants::without {step}"), Box::new(move || order_is_found(&|s| without(s, step), false)));
    }
    for pair in protocol::pairs() {
        let name = format!("{}, then {}", pair.first, pair.then);
        if pair.is_ordered {
            let is_fence = |step: &str| step.starts_with("release") || step.starts_with("acquire");
            let also_in_order = !is_fence(&pair.first) && !is_fence(&pair.then);
            add(format!("mutants::not {name}"), Box::new(move || order_is_found(&|s| swapped(s, &pair.first, &pair.then), also_in_order)));
        } else {
            add(format!("both orders::{name}"), Box::new(move || both_orders(&pair)));
        }
    }
    trials
}

/// Rules, each replaced by one that does not do.
const RULES: [&[Mutant]; 7] = [
    &[Mutant::OneParity],
    &[Mutant::OneParity, Mutant::CountsAtLeast],
    &[Mutant::Exactly],
    &[Mutant::OneBank],
    &[Mutant::OneReadyWord],
    &[Mutant::FewCopies],
    &[Mutant::LastWins],
];

type Steps = Vec<(u64, Step)>;

fn sound<P: Platform>(script: &'static Script, world: usize, steps: Steps) -> Result<(), Failed> {
    let steps: &'static [(u64, Step)] = steps.leak();
    passes(|| ranks::explore::<P>(script, world, steps))
}

fn passes(model: impl FnOnce()) -> Result<(), Failed> {
    catch_unwind(AssertUnwindSafe(model)).map_err(|p| Failed::from(message(&*p)))
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_else(|| "panicked".into())
}

/// Every model of two ranks and of the page, in the order of what they cost.
fn models() -> Vec<Box<dyn Fn()>> {
    let mut all: Vec<Box<dyn Fn()>> = vec![
        Box::new(page::first_failure),
        Box::new(|| page::published(Label::Left)),
        Box::new(|| page::published(Label::Meet)),
        Box::new(page::doorbell),
    ];
    for script in &SCRIPTS {
        let steps: &'static [(u64, Step)] = script.steps().leak();
        all.push(Box::new(move || ranks::explore::<Loom>(script, 2, steps)));
    }
    all
}

/// Some model finds what `mutants` break.
fn killed(mutants: &[Mutant]) -> Result<(), Failed> {
    let is_found = models().iter().any(|model| must_fail(|| under(mutants, model)).is_ok());
    if is_found { Ok(()) } else { Err(format!("no model finds {mutants:?}").into()) }
}

/// No model finds anything.
fn survives(mutants: &'static [Mutant]) -> Result<(), Failed> {
    models().iter().try_for_each(|model| passes(|| under(mutants, model)))
}

/// Some script of two ranks finds what `change` does to the steps, and of three and four when `also_in_order`.
fn order_is_found(change: &dyn Fn(Steps) -> Steps, also_in_order: bool) -> Result<(), Failed> {
    let is_found = |explore: &dyn Fn(&'static Script, &'static [(u64, Step)])| {
        SCRIPTS.iter().any(|script| {
            let (before, after) = (script.steps(), change(script.steps()));
            before != after && must_fail(|| explore(script, after.leak())).is_ok()
        })
    };
    if !is_found(&|script, steps| ranks::explore::<Loom>(script, 2, steps)) {
        return Err("no model of two ranks finds it".into());
    }
    for world in [3, 4].into_iter().filter(|_| also_in_order) {
        if !is_found(&|script, steps| ranks::explore::<Shuttle>(script, world, steps)) {
            return Err(format!("no model of {world} ranks finds it").into());
        }
    }
    Ok(())
}

/// The other order is sound as well, in every script that has the pair.
fn both_orders(pair: &protocol::Pair) -> Result<(), Failed> {
    let mut num = 0;
    for script in SCRIPTS.iter().filter(|script| !pair.needs_packets || script.packets) {
        // With packets posting comes right after its fence, and the rows after both.
        let change = if pair.needs_packets { delayed } else { swapped };
        let (before, after) = (script.steps(), change(script.steps(), &pair.first, &pair.then));
        if before == after {
            continue;
        }
        num += 1;
        sound::<Loom>(script, 2, after.clone())?;
        sound::<Shuttle>(script, 3, after.clone())?;
        sound::<Shuttle>(script, 4, after)?;
    }
    if num == 0 { Err("no script has the pair".into()) } else { Ok(()) }
}

fn without(mut steps: Steps, step: Step) -> Steps {
    steps.retain(|(_, s)| *s != step);
    steps
}

/// Wherever `first` comes before `then`, the next `then` is taken right before it.
fn swapped(steps: Steps, first: &str, then: &str) -> Steps {
    let mut rest = steps;
    let mut out = Steps::new();
    while !rest.is_empty() {
        let step = rest.remove(0);
        if step.1.to_string() == first
            && let Some(at) = rest.iter().position(|s| s.1.to_string() == then)
        {
            out.push(rest.remove(at));
        }
        out.push(step);
    }
    out
}

/// Wherever `first` comes before `then`, it is taken right behind the next `then`.
fn delayed(mut steps: Steps, first: &str, then: &str) -> Steps {
    for i in (0..steps.len()).rev().filter(|&i| steps[i].1.to_string() == first).collect::<Vec<_>>() {
        if let Some(at) = steps[i..].iter().position(|s| s.1.to_string() == then) {
            steps[i..=i + at].rotate_left(1);
        }
    }
    steps
}

/// The model fails for a reason that a broken protocol has: a race, a wrong value, or a wait without end.
fn must_fail(model: impl FnOnce()) -> Result<String, Failed> {
    quiet_hook();
    IS_EXPECTED.set(true);
    let found = catch_unwind(AssertUnwindSafe(model)).map_err(|p| message(&*p));
    IS_EXPECTED.set(false);
    const REASONS: [&str; 10] = [
        "Causality violation",
        "of another epoch",
        "was not decided",
        "maximum number of branches",
        "a wait without end",
        "rows that nobody pulled",
        "deadlock",
        "record that is not whole",
        "two first failures",
        "that nobody finds",
    ];
    match found {
        Ok(()) => Err("the checker found nothing".into()),
        Err(text) if REASONS.iter().any(|reason| text.contains(reason)) => Ok(text),
        Err(text) => Err(format!("failed for another reason: {text}").into()),
    }
}
