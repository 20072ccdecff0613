//! The C interface: the header is what the sources say, it compiles as C and as C++, and the examples run against it on CPU ranks.
//!
//! `MOE_WRITE_HEADER=1` writes the header instead of comparing it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::{Failed, Trial};

const HEADER: &str = "include/moe_kernels.h";

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let mut trials = vec![Trial::test("capi::the header is that of the sources", header_is_current)];
    if compilers().is_empty() {
        // Whoever has no C compiler at all learns nothing here; the CI has one.
        trials.push(Trial::test("capi::examples", || Ok(())).with_ignored_flag(true));
        return trials;
    }
    trials.push(Trial::test("capi::the header compiles as C99 and as C++", header_compiles));
    for example in ["gate", "dispatch"] {
        trials.push(Trial::test(format!("capi::examples/{example}.c runs"), move || example_runs(example)));
    }
    trials
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The head of the header: what holds for all functions.
const HEAD: &str = "\
/* moe-kernels: the data path of Mixture-of-Experts layers. Made from src/capi by a test: change it there.
 *
 * Rules for all functions
 *
 * Errors     Every function that can fail returns MOE_OK (0) or another MOE_* status; moe_last_error() has the message of the calling thread. Unless
 *            the text of a function says otherwise, nothing was written and nothing was consumed when it fails.
 * Handles    MoeBackend, MoeWorld, MoeEp, MoeRouting, MoeArrival, MoeDispatchSent, MoeCombineSent belong to the library; the caller owns what a function
 *            stores through a pointer to a handle, and destroys it once with the function of its kind. Set the pointer to NULL first. Destroyed handles
 *            may not be used. A handle is used by one thread at a time; different handles, of one world too, by different threads at once.
 * Pointers   May not be null unless the text says so. Structs and arrays are read during the call only. No two outputs of a call overlap, and no output
 *            overlaps an input.
 * Tensors    Are memory of the caller. The library never frees or keeps it. See MoeTensor.
 * Structs    With a `size` member are made by zeroing, setting `size`, and setting members; later versions of the library take the older, shorter ones.
 * Units      Shapes and strides are in elements; sizes named bytes in bytes; times in the unit of their name. T is tokens of a rank, K routes of a token.
 * Collective A call that all ranks of a world make, in the same order. It waits for peers, at most the configuration's bound.
 * GPU        Calls on a GPU are queued in a stream and return. They allocate nothing and can be captured in a graph; exceptions are said.
 * Bytes      Results have the same bytes on every backend, whatever the mode, geometry or run.
 */
";

/// What the sources of the interface declare, in C.
fn generated() -> Result<String, Failed> {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        header: Some(HEAD.trim_end().to_owned()),
        include_guard: Some("MOE_KERNELS_H".to_owned()),
        cpp_compat: true,
        usize_is_size_t: true,
        style: cbindgen::Style::Both,
        documentation_style: cbindgen::DocumentationStyle::C99,
        line_length: 140,
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        ..cbindgen::Config::default()
    };
    config.function.args = cbindgen::Layout::Auto;
    let files = ["mod", "tensor", "gate", "ep", "calls"];
    let builder = files.iter().fold(cbindgen::Builder::new().with_config(config), |builder, file| {
        builder.with_src(root().join("src/capi").join(file).with_extension("rs"))
    });
    let mut text = Vec::new();
    builder.generate().map_err(|e| e.to_string())?.write(&mut text);
    Ok(String::from_utf8(text)?)
}

fn header_is_current() -> Result<(), Failed> {
    let (want, path) = (generated()?, root().join(HEADER));
    if std::env::var_os("MOE_WRITE_HEADER").is_some() {
        fs::write(path, want)?;
        return Ok(());
    }
    let have = fs::read_to_string(&path)?;
    match have.lines().zip(want.lines()).position(|(have, want)| have != want) {
        None if have == want => Ok(()),
        None => Err(format!("{HEADER} has another length than the sources say").into()),
        Some(line) => Err(format!("{HEADER}:{} is not what the sources say; MOE_WRITE_HEADER=1 writes it", line + 1).into()),
    }
}

/// Commands that compile C: the machine's, or that of the tools of the CI.
fn compilers() -> Vec<Vec<String>> {
    let mut all: Vec<Vec<String>> = vec![vec!["cc".into()]];
    if let Ok(zig) = std::env::var("MOE_CLANG") {
        all.push(vec![zig, "cc".into()]);
    }
    all.retain(|command| Command::new(&command[0]).args(&command[1..]).arg("--version").output().is_ok_and(|out| out.status.success()));
    all
}

fn run(command: &mut Command) -> Result<String, Failed> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(text) } else { Err(format!("{command:?}: {}\n{text}", output.status).into()) }
}

/// The first compiler, told to be strict.
fn compiler(standard: &str) -> Command {
    let command = &compilers()[0];
    let mut compiler = Command::new(&command[0]);
    compiler.args(&command[1..]).args([&format!("-std={standard}"), "-Wall", "-Wextra", "-Werror", "-pedantic"]);
    compiler.arg("-I").arg(root().join("include"));
    compiler
}

fn header_compiles() -> Result<(), Failed> {
    let header = root().join(HEADER);
    run(compiler("c99").args(["-fsyntax-only", "-x", "c"]).arg(&header))?;
    run(compiler("c++11").args(["-fsyntax-only", "-x", "c++"]).arg(&header)).map(|_| ())
}

/// The shared library that was built with this test.
fn library() -> Result<PathBuf, Failed> {
    let test = std::env::current_exe()?;
    let folders = test.ancestors().skip(1).take(2);
    let name = format!("{}moe_kernels{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let newest = folders.map(|folder| folder.join(&name)).filter(|path| path.is_file()).max_by_key(|path| {
        let metadata = fs::metadata(path).and_then(|m| m.modified());
        metadata.unwrap_or(std::time::UNIX_EPOCH)
    });
    newest.ok_or_else(|| format!("no {name} near {}", test.display()).into())
}

fn example_runs(name: &str) -> Result<(), Failed> {
    let (library, folder) = (library()?, tempfile::tempdir()?);
    let program = folder.path().join(name);
    let libraries = library.parent().ok_or("a file has a folder")?;
    let mut compiler = compiler("c99");
    compiler.arg(root().join("examples").join(name).with_extension("c")).arg("-o").arg(&program);
    compiler.arg(&library).arg(format!("-Wl,-rpath,{}", libraries.display())).args(["-lpthread", "-lm"]);
    run(&mut compiler)?;
    let text = run(&mut Command::new(&program))?;
    if text.contains(&format!("{name}: ok")) { Ok(()) } else { Err(format!("it did not say that it went well:\n{text}").into()) }
}
