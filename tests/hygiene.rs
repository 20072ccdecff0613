//! Rules about the source itself.

use std::fs;
use std::path::{Path, PathBuf};

use libtest_mimic::{Failed, Trial};

/// Most lines of a file in `src/` (the project's rule is about 600; this is where it ends).
const MAX_LINES: usize = 700;

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("hygiene::unsafe_only_where_allowed", || each_source(no_stray_unsafe)),
        Trial::test("hygiene::files_are_short", || each_source(is_short)),
        Trial::test("hygiene::no_machine_paths", no_machine_paths),
        Trial::test("hygiene::rules_find_what_they_forbid", rules_find_what_they_forbid),
    ]
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files under `folder` of the checkout, with paths relative to it.
fn files(folder: &str) -> Result<Vec<PathBuf>, Failed> {
    let mut files = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path.strip_prefix(root())?.to_owned());
            }
        }
    }
    files.sort();
    Ok(files)
}

fn each_source(rule: impl Fn(&Path, &str) -> Option<String>) -> Result<(), Failed> {
    let mut broken = Vec::new();
    for file in files("src")?.iter().filter(|file| file.extension().is_some_and(|e| e == "rs")) {
        broken.extend(rule(file, &fs::read_to_string(root().join(file))?));
    }
    if broken.is_empty() { Ok(()) } else { Err(broken.join("\n").into()) }
}

/// The C interface, kernels, symmetric memory, GPUs, views of foreign device memory, the launches of the ceilings and the one call that maps a checkpoint's file may use `unsafe`. A kernel is a file of an operation that is not its API, or a module's `cpu.rs`.
fn may_be_unsafe(file: &Path) -> bool {
    file.starts_with("src/capi")
        || file.starts_with("src/cpu")
        || file.starts_with("src/gpu")
        || file.starts_with("src/tensor.rs")
        || file.starts_with("src/measure/ceiling.rs")
        || file.starts_with("src/measure/delay.rs")
        || file.starts_with("src/measure/link/")
        || file.starts_with("src/ep/symmetric.rs")
        || file.starts_with("src/layer/checkpoint/files.rs")
        || file.ends_with("cpu.rs")
        || (file.starts_with("src/ops") && !file.ends_with("mod.rs"))
}

fn no_stray_unsafe(file: &Path, text: &str) -> Option<String> {
    let is_code = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
    };
    let (number, _) = text.lines().enumerate().find(|(_, line)| is_code(line))?;
    (!may_be_unsafe(file)).then(|| format!("{}:{}: unsafe in a file that may not use it", file.display(), number + 1))
}

fn is_short(file: &Path, text: &str) -> Option<String> {
    let lines = text.lines().count();
    (lines > MAX_LINES).then(|| format!("{}: {lines} lines, at most {MAX_LINES}", file.display()))
}

/// Paths of one machine, which mean nothing on another. In pieces, so that this file does not hold them.
fn machine_path(text: &str) -> Option<&'static str> {
    [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/fa", "rm/"), concat!("/ho", "me/")]
        .into_iter()
        .find(|path| text.contains(path))
}

fn no_machine_paths() -> Result<(), Failed> {
    let folders = ["src", "tests", "benches", "examples", "include", ".ci"].into_iter().filter(|folder| root().join(folder).is_dir());
    let mut all: Vec<PathBuf> = folders.map(files).collect::<Result<Vec<_>, _>>()?.concat();
    all.extend(["README.md", "Cargo.toml"].map(PathBuf::from));
    for file in all {
        let Ok(text) = fs::read_to_string(root().join(&file)) else { continue }; // a binary vector
        if let Some(path) = machine_path(&text) {
            return Err(format!("{}: holds a path of one machine, {path}", file.display()).into());
        }
    }
    Ok(())
}

/// The rules are not blind.
fn rules_find_what_they_forbid() -> Result<(), Failed> {
    let bad = [
        no_stray_unsafe("src/cli/main.rs".as_ref(), "fn f() {\n    unsafe { g() }\n}"),
        no_stray_unsafe("src/ops/gate/mod.rs".as_ref(), "unsafe fn f() {}"),
        is_short("src/lib.rs".as_ref(), &"\n".repeat(MAX_LINES + 1)),
        machine_path(concat!("let p = \"/wo", "rk/x\";")).map(str::to_owned),
    ];
    let good = [
        no_stray_unsafe("src/cli/main.rs".as_ref(), "#![forbid(unsafe_code)]\n// unsafe is not used here"),
        no_stray_unsafe("src/cpu/convert.rs".as_ref(), "unsafe { g() }"),
        is_short("src/lib.rs".as_ref(), &"\n".repeat(MAX_LINES)),
        machine_path("target/release").map(str::to_owned),
    ];
    match (bad.iter().position(Option::is_none), good.iter().position(Option::is_some)) {
        (None, None) => Ok(()),
        (missed, refused) => Err(format!("missed {missed:?}, refused {refused:?}").into()),
    }
}
