//! How many kernels the shared checks of expert parallelism compile: no GPU is needed to count them.

use std::collections::{BTreeMap, HashSet};

use moe_kernels::check::groups;

use super::{Needs, Outcome, Test, ensure, report};

pub const TRIALS: &[(&str, Needs, Test)] = &[("checks: kernels that they compile", Needs::Nothing, count)];

fn count() -> Outcome {
    let mut all = HashSet::new();
    let mut by_entry = BTreeMap::<_, usize>::new();
    for group in groups() {
        let programs = group.programs().map_err(|failed| failed.0)?;
        let before = all.len();
        let own = programs.len();
        for program in programs {
            let entry = format!("{} {}", group.op, program.entry);
            if all.insert(format!("{} {:?}", program.entry, program.constants)) {
                *by_entry.entry(entry).or_default() += 1;
            }
        }
        if own > 0 {
            report(format!("{} {}: {own} kernels, {} of them new", group.op, group.name, all.len() - before));
        }
    }
    report(format!("{} kernels: {by_entry:?}", all.len()));
    // Measured (H200, 16 processors): 50 a second, the whole in less than two minutes.
    ensure((1..4000).contains(&all.len()), format!("{} kernels", all.len()))
}
