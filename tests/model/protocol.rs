//! What `PROTOCOL.md` declares, read from it: the names of fences and the order of steps. The document and the code must have the same.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use libtest_mimic::Failed;
use moe_kernels::ep::signal::Label;
use moe_kernels::ep::steps::{COMBINE_RECEIVE, COMBINE_SEND, DISPATCH_RECEIVE, DISPATCH_SEND, Step};

const DOCUMENT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/ep/PROTOCOL.md"));

/// Two steps of a rank, and whether the first must come first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    pub first: String,
    pub then: String,
    pub is_ordered: bool,
    /// Independent only where staged rows carry flags.
    pub needs_packets: bool,
}

/// The rows of the table under `heading`, as cells.
fn table(heading: &str) -> Vec<Vec<&'static str>> {
    let (_, text) = DOCUMENT.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("PROTOCOL.md has no section {heading}"));
    let text = text.split("\n## ").next().unwrap_or_default();
    let rows = text.lines().filter(|line| line.starts_with('|')).skip(2);
    rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// The pairs that the document declares.
pub fn pairs() -> Vec<Pair> {
    let pair = |cells: Vec<&str>| {
        let text = |i: usize| cells.get(i).copied().unwrap_or_default().trim_matches('`').to_owned();
        let kind = text(2);
        assert!(["ordered", "independent", "independent with packets"].contains(&kind.as_str()), "{cells:?}");
        Pair { first: text(0), then: text(1), is_ordered: kind == "ordered", needs_packets: kind.ends_with("packets") }
    };
    table("Order").into_iter().map(pair).collect()
}

pub fn all_steps() -> Vec<Step> {
    [&DISPATCH_SEND[..], &DISPATCH_RECEIVE, &COMBINE_SEND, &COMBINE_RECEIVE].concat()
}

/// Each two neighbours of the steps of a round, the next round's first included, are declared once; what else is declared names steps.
pub fn pairs_are_complete() -> Result<(), Failed> {
    let steps: Vec<String> = all_steps().iter().map(Step::to_string).collect();
    let declared = pairs();
    for (i, first) in steps.iter().enumerate() {
        let then = &steps[(i + 1) % steps.len()];
        let num = declared.iter().filter(|p| !p.needs_packets && p.first == *first && p.then == *then).count();
        if num != 1 {
            return Err(format!("`{first}` and `{then}` are declared {num} times").into());
        }
    }
    match declared.iter().find(|p| !steps.contains(&p.first) || !steps.contains(&p.then)) {
        Some(pair) => Err(format!("{pair:?} names no steps").into()),
        None => Ok(()),
    }
}

/// `sync NAME` in comments and `Label::Name` at fences in the sources of the library, and the names of the document's table.
pub fn names_agree() -> Result<(), Failed> {
    let mut in_code = BTreeSet::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut files: Vec<PathBuf> = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            // What measures links has words of its own, which no rank sees.
            match path.is_dir() {
                true if path.ends_with("src/measure") => {}
                true => folders.push(path),
                false => files.push(path),
            }
        }
    }
    for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "rs" || e == "cu" || e == "cuh")) {
        let text = fs::read_to_string(file)?;
        in_code.extend(text.split("sync ").skip(1).filter_map(|rest| name_before(rest, ':')));
        // A fence or a poll in device code without a name nearby: the lines above it must hold one.
        if file.extension().is_some_and(|e| e == "cu" || e == "cuh") && !file.ends_with("gpu/device/sync.cuh") {
            unnamed_fences(&text).map_err(|e| format!("{}: {e}", file.display()))?;
        }
    }
    in_code.extend(Label::ALL.iter().map(|label| label.name().to_owned()));
    let in_document: BTreeSet<String> = table("Fences").iter().map(|row| row[0].trim_matches('`').to_owned()).collect();
    let missing: Vec<_> = in_code.symmetric_difference(&in_document).collect();
    if missing.is_empty() { Ok(()) } else { Err(format!("only in one of code and document: {missing:?}").into()) }
}

/// The word at the start of `text` when `end` follows it.
fn name_before(text: &str, end: char) -> Option<String> {
    let name: String = text.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect();
    (!name.is_empty() && text[name.len()..].starts_with(end)).then_some(name)
}

/// Lines between a fence or a wait and its name, at most (arbitrary: a loop's head and its condition).
const NEARBY: usize = 12;

fn unnamed_fences(text: &str) -> Result<(), String> {
    let lines: Vec<&str> = text.lines().collect();
    for (i, line) in lines.iter().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        if !["release_system()", "release_device()", "release_peers(", "wait_for<"].iter().any(|call| code.contains(call)) {
            continue;
        }
        let above = &lines[i.saturating_sub(NEARBY)..=i];
        if !above.iter().any(|l| l.split("sync ").skip(1).any(|rest| name_before(rest, ':').is_some())) {
            return Err(format!("line {}: no `sync NAME:` above {}", i + 1, code.trim()));
        }
    }
    Ok(())
}
