//! The C interface: the header is what the sources say, it compiles as C and as C++, and the examples run against it on CPU ranks.
//!
//! `MOE_WRITE_HEADER=1` writes the header instead of comparing it.

use std::ffi::{CStr, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::{null, null_mut};

use libtest_mimic::{Failed, Trial};
use moe_kernels::capi::*;

const HEADER: &str = "include/moe_kernels.h";

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let mut trials = vec![Trial::test("capi::the header is that of the sources", header_is_current)];
    trials.push(Trial::test("capi::misuse is refused with a message", misuse_is_refused));
    trials.push(Trial::test("capi::what a refused call was given can be used again", refused_calls_give_back));
    if compilers().is_empty() {
        // Whoever has no C compiler at all learns nothing here; the CI has one.
        trials.push(Trial::test("capi::examples", || Ok(())).with_ignored_flag(true));
        return trials;
    }
    trials.push(Trial::test("capi::the header compiles as C99 and as C++", header_compiles));
    for example in ["gate", "dispatch", "cast"] {
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
    // It reads the files of the modules too.
    let builder = cbindgen::Builder::new().with_config(config).with_src(root().join("src/capi/mod.rs"));
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

/// The message of this thread's last failed call.
fn message() -> String {
    // SAFETY: the function returns a text that ends with a zero and stays until the next failed call.
    unsafe { CStr::from_ptr(moe_last_error()) }.to_string_lossy().into_owned()
}

fn expect(status: i32, want: i32, words: &str) -> Result<(), Failed> {
    match status == want && (want == MOE_OK || message().contains(words)) {
        true => Ok(()),
        false => Err(format!("status {status} instead of {want} with `{words}`: {}", message()).into()),
    }
}

fn tensor<T>(data: &mut [T], dtype: i32, shape: &[usize]) -> MoeTensor {
    let mut tensor =
        MoeTensor { data: data.as_mut_ptr().cast::<c_void>(), dtype, num_dims: shape.len() as i32, shape: [0; 4], strides: [0; 4] };
    tensor.shape[..shape.len()].copy_from_slice(shape);
    tensor
}

fn cpu_backend() -> Result<*mut MoeBackend, Failed> {
    let mut backend = null_mut();
    // SAFETY: the pointer is stored in a variable of its own.
    expect(unsafe { moe_backend_cpu(Some(&mut backend)) }, MOE_OK, "")?;
    Ok(backend)
}

/// A world of one rank, an object with two tokens of two routes, and its routing.
fn object(backend: *mut MoeBackend) -> Result<(*mut MoeWorld, *mut MoeEp, *mut MoeRouting, MoeEpConfig), Failed> {
    let (backends, mut worlds) = ([backend.cast_const()], [null_mut()]);
    let mut config = std::mem::MaybeUninit::uninit();
    let (mut ep, mut routing) = (null_mut(), null_mut());
    // SAFETY: every pointer is to a live variable or a live handle of the library, the arrays have one entry each, and sizes are true.
    unsafe {
        expect(moe_world_threads(backends.as_ptr(), worlds.as_mut_ptr(), 1), MOE_OK, "")?;
        expect(moe_ep_config_init(config.as_mut_ptr(), size_of::<MoeEpConfig>(), 8, MOE_F32, 4, 2, 2), MOE_OK, "")?;
        expect(moe_ep_create(worlds[0].as_ref(), config.as_ptr(), Some(&mut ep)), MOE_OK, "")?;
        expect(moe_routing_create(ep.as_ref(), Some(&mut routing)), MOE_OK, "")?;
        Ok((worlds[0], ep, routing, config.assume_init()))
    }
}

fn misuse_is_refused() -> Result<(), Failed> {
    let backend = cpu_backend()?;
    let (mut x, mut w, mut out) = ([1f32; 6], [1f32; 3], [0f32; 2]);
    let (x, w, out) = (tensor(&mut x, MOE_F32, &[2, 3]), tensor(&mut w, MOE_F32, &[3]), tensor(&mut out, MOE_F32, &[2]));
    let (world, ep, routing, config) = object(backend)?;
    let mut options = MoeGateOptions {
        size: size_of::<MoeGateOptions>(),
        activation: 0,
        rounding: 0,
        scale: 1.0,
        weights_are_constant: 0,
        bias: null(),
        addend: null(),
    };
    // SAFETY: every pointer is null, or to a live variable or a live handle of the library. A handle of another kind is looked at as far as its first word only.
    unsafe {
        let b = || backend.as_ref();
        expect(moe_gate(None, Some(&x), Some(&w), null(), Some(&out)), MOE_INVALID, "MoeBackend is null")?;
        expect(moe_gate(b(), None, Some(&w), null(), Some(&out)), MOE_INVALID, "x is null")?;
        expect(moe_gate(b(), Some(&MoeTensor { data: null_mut(), ..x }), Some(&w), null(), Some(&out)), MOE_INVALID, "data of x is null")?;
        expect(moe_gate(b(), Some(&MoeTensor { dtype: 99, ..x }), Some(&w), null(), Some(&out)), MOE_INVALID, "x is 99")?;
        options.activation = 7;
        expect(moe_gate(b(), Some(&x), Some(&w), &options, Some(&out)), MOE_INVALID, "activation is 7")?;
        options.size = 3;
        expect(moe_gate(b(), Some(&x), Some(&w), &options, Some(&out)), MOE_INVALID, "size of MoeGateOptions is 3")?;
        expect(moe_backend_cpu(None), MOE_INVALID, "backend is null")?;
        expect(moe_world_threads(null(), null_mut(), 2), MOE_INVALID, "size is 2 ranks")?;
        expect(moe_world_rank(backend.cast::<MoeWorld>().as_ref(), Some(&mut 0)), MOE_INVALID, "expected a MoeWorld")?;
        expect(moe_world_join(b(), null(), Some(&mut null_mut())), MOE_INVALID, "group is null")?;
        expect(moe_ep_create(world.as_ref(), null(), Some(&mut null_mut())), MOE_INVALID, "MoeEpConfig")?;
        for (bad, words) in [
            (MoeEpConfig { layout: 3, ..config }, "layout is 3"),
            (MoeEpConfig { wire: -1, ..config }, "wire is -1"),
            (MoeEpConfig { dtype: 12, ..config }, "dtype is 12"),
            (MoeEpConfig { k: 33, ..config }, "k is 33"),
            (MoeEpConfig { in_flight: 0, ..config }, "in_flight is 0"),
        ] {
            expect(moe_ep_create(world.as_ref(), &bad, Some(&mut null_mut())), MOE_INVALID, words)?;
        }
        expect(moe_ep_set_stream(ep.as_mut(), null_mut()), MOE_UNSUPPORTED, "CPUs")?;
        expect(moe_backend_set_programmatic(backend.as_mut(), 1), MOE_UNSUPPORTED, "CPU")?;
        expect(moe_cast(b(), null(), 1, null()), MOE_INVALID, "MoeCastOperands")?;
        expect(moe_cast(b(), null(), 0, null()), MOE_OK, "")?;
        expect(moe_cast_grouped(b(), null(), Some(&x), null()), MOE_INVALID, "MoeCastOperands")?;
        let mut cast = std::mem::zeroed::<MoeCastOperands>();
        cast.size = size_of::<MoeCastOperands>();
        expect(moe_cast(b(), &cast, 1, null()), MOE_INVALID, "x is null")?;
        cast.x = &x;
        expect(moe_cast(b(), &cast, 1, null()), MOE_INVALID, "matrices[0]")?;
        let options = MoeCastOptions { size: size_of::<MoeCastOptions>(), scaling: 2, ..std::mem::zeroed() };
        expect(moe_cast(b(), &cast, 1, &options), MOE_INVALID, "scaling is 2")?;
        let (good, second) = (cast, MoeCastOperands { size: cast.size + 8, ..cast });
        expect(moe_cast(b(), [good, second, good].as_ptr(), 2, null()), MOE_INVALID, "size of matrices[1] is 72")?;
        expect(moe_routing_create_in(ep.as_ref(), null_mut(), 0, Some(&mut null_mut())), MOE_INVALID, "memory is 0 bytes")?;
        expect(moe_dispatch(ep.as_mut(), routing.as_mut(), null(), null(), Some(&mut null_mut())), MOE_INVALID, "MoeDispatchInput")?;
        expect(moe_combine(ep.as_mut(), routing.as_ref(), None, null(), null()), MOE_INVALID, "MoeCombineInput")?;
        // Nothing is destroyed twice: what is null is nothing.
        expect(moe_routing_destroy(None), MOE_OK, "")?;
        expect(moe_routing_destroy(Some(Box::from_raw(routing))), MOE_OK, "")?;
        expect(moe_ep_destroy(Some(Box::from_raw(ep))), MOE_OK, "")?;
        expect(moe_world_destroy(Some(Box::from_raw(world))), MOE_OK, "")?;
        expect(moe_backend_destroy(Some(Box::from_raw(backend))), MOE_OK, "")
    }
}

fn refused_calls_give_back() -> Result<(), Failed> {
    let backend = cpu_backend()?;
    let (world, ep, routing, _) = object(backend)?;
    // Rows are aligned to 16 bytes.
    let mut memory = [0u128; 4];
    let words: &mut [f32] = bytemuck::cast_slice_mut(&mut memory);
    words.iter_mut().enumerate().for_each(|(i, word)| *word = i as f32);
    let (mut ids, mut result) = ([0i32, -1, 3, -1], [0f32; 16]);
    let (x, topk_idx) = (tensor(words, MOE_F32, &[2, 8]), tensor(&mut ids, MOE_I32, &[2, 2]));
    let (out, short) = (tensor(&mut result, MOE_F32, &[2, 8]), tensor(&mut [0f32; 8], MOE_F32, &[1, 8]));
    let mut input = MoeDispatchInput {
        size: size_of::<MoeDispatchInput>(),
        x: &x,
        topk_idx: &topk_idx,
        topk_weights: null(),
        scales: null(),
        device_num_tokens: null(),
        num_tokens: 3,
    };
    let in_place = MoeCombineInput { size: size_of::<MoeCombineInput>(), y: null(), row_weights: null() };
    let output = |out| MoeCombineOutput { size: size_of::<MoeCombineOutput>(), out, add_to: null(), topk_weights: null() };
    let (mut arrival, mut second, mut view) = (null_mut(), null_mut(), x);
    let mut num_rows = 0;
    let outputs = MoeDispatchOutputs { size: 3, expert_statistics: null(), counts_host: null() };
    // SAFETY: every pointer is to a live variable or a live handle of the library.
    unsafe {
        expect(moe_dispatch(ep.as_mut(), routing.as_mut(), &input, null(), Some(&mut arrival)), MOE_CAPACITY, "rank 0 needs 3 tokens")?;
        expect(moe_dispatch(ep.as_mut(), routing.as_mut(), &input, &outputs, Some(&mut arrival)), MOE_INVALID, "MoeDispatchOutputs is 3")?;
        input.num_tokens = -1;
        expect(moe_dispatch(ep.as_mut(), routing.as_mut(), &input, null(), Some(&mut arrival)), MOE_OK, "")?;
        expect(moe_dispatch(ep.as_mut(), routing.as_mut(), &input, null(), Some(&mut second)), MOE_BUSY, "bank 0")?;
        expect(moe_arrival_num_rows(ep.as_ref(), arrival.as_ref(), Some(&mut num_rows)), MOE_OK, "")?;
        expect(moe_arrival_view(arrival.as_mut(), MOE_ARRIVAL_SCALES, Some(&mut view)), MOE_UNSUPPORTED, "no scales")?;
        expect(moe_arrival_view(arrival.as_mut(), 9, Some(&mut view)), MOE_INVALID, "which is 9")?;
        expect(moe_arrival_view(arrival.as_mut(), MOE_ARRIVAL_X, Some(&mut view)), MOE_OK, "")?;
        expect(moe_arrival_gather_idx(arrival.as_ref(), 1, None, Some(&topk_idx)), MOE_INVALID, "gather_idx is null")?;
        expect(moe_arrival_gather_idx(arrival.as_ref(), 1, Some(&x), Some(&topk_idx)), MOE_INVALID, "gather_idx")?;
        expect(moe_replay_receive(ep.as_mut(), routing.as_ref(), None, Some(&mut second)), MOE_INVALID, "MoeDispatchSent is null")?;
        expect(moe_arrival_contiguous_metadata(arrival.as_ref(), Some(&out), Some(&topk_idx), Some(&short)), MOE_INVALID, "source")?;
        let (from, elements) = (view.data, num_rows * 8);
        expect(moe_arrival_view(arrival.as_mut(), MOE_ARRIVAL_EXPERT_OUTPUT, Some(&mut view)), MOE_OK, "")?;
        view.data.cast::<f32>().copy_from_nonoverlapping(from.cast::<f32>(), elements);
        // An output that is too small: the arrival stays the caller's.
        expect(moe_combine(ep.as_mut(), routing.as_ref(), Some(&mut arrival), &in_place, &output(&short)), MOE_INVALID, "out")?;
        if arrival.is_null() {
            return Err("a refused combine took the arrival".into());
        }
        expect(moe_combine(ep.as_mut(), routing.as_ref(), Some(&mut arrival), &in_place, &output(&out)), MOE_OK, "")?;
        expect(
            moe_combine(ep.as_mut(), routing.as_ref(), Some(&mut arrival), &in_place, &output(&out)),
            MOE_INVALID,
            "MoeArrival is null",
        )?;
        expect(moe_routing_destroy(Some(Box::from_raw(routing))), MOE_OK, "")?;
        expect(moe_ep_destroy(Some(Box::from_raw(ep))), MOE_OK, "")?;
        expect(moe_world_destroy(Some(Box::from_raw(world))), MOE_OK, "")?;
        expect(moe_backend_destroy(Some(Box::from_raw(backend))), MOE_OK, "")?;
    }
    let want: Vec<f32> = (0..16).map(|i| i as f32).collect();
    if num_rows == 2 && result.as_slice() == want { Ok(()) } else { Err(format!("{num_rows} rows, {result:?}").into()) }
}
