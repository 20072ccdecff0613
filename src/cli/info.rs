//! `moe info`: the machine, as this program sees it.
#![forbid(unsafe_code)]

use std::env;
use std::path::{Path, PathBuf};

use moe_kernels::gpu::{Device, Nvrtc, Stream};
use moe_kernels::measure::ceiling::{self, CopyCeiling, EmptyLaunch};
use moe_kernels::measure::link::{LinkCeiling, MAX_GPUS, Way, link_ceiling};
use moe_kernels::measure::nvidia::{Gpu, Nvidia};
use moe_kernels::measure::{Commit, Environment, IdleReport, Statistics, environment, idle, report};
use moe_kernels::{Error, Result};

use crate::output::{Output, Progress};

/// Options of `moe info`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Print one JSON object instead
    #[arg(long)]
    json: bool,
    /// Keep up to this many bytes of the changes since the commit in the JSON (`git diff HEAD`)
    #[arg(long, value_name = "BYTES", default_value_t = 0, requires = "json")]
    diff: usize,
    /// Measure what the GPU can do at best: copies of several sizes, empty kernels, and the links to other GPUs (some seconds; refused on a busy GPU)
    #[arg(long)]
    ceilings: bool,
    /// Measure on a busy GPU too, and say that it was
    #[arg(long, requires = "ceilings")]
    allow_busy: bool,
    /// The GPU to measure
    #[arg(long, value_name = "ORDINAL", default_value_t = 0, requires = "ceilings")]
    device: u32,
}

#[derive(serde::Serialize)]
struct Info {
    environment: Environment,
    /// Backends of this build.
    backends: &'static [&'static str],
    gpu_libraries: Vec<GpuLibrary>,
    cache_folder: Option<PathBuf>,
    ceilings: Option<Ceilings>,
}

/// What one GPU can do at best.
#[derive(serde::Serialize)]
struct Ceilings {
    idle: IdleReport,
    empty: EmptyLaunch,
    copies: Vec<CopyCeiling>,
    /// Between all GPUs; nothing on a machine with one.
    links: Option<Links>,
}

/// What the links between the GPUs can do at best.
#[derive(serde::Serialize)]
struct Links {
    /// The GPUs, as far as they were looked at.
    idle: Vec<IdleReport>,
    ceilings: Vec<LinkCeiling>,
    /// Why they were not measured.
    absence: Option<String>,
}

/// Bytes read and written by the copies (the sizes of the recorded ceilings; the least exceeds twice the L2 cache of today's GPUs).
const COPY_BYTES: [u64; 5] = [207_000_000, 544_000_000, 1_090_000_000, 2_160_000_000, 3_800_000_000];

/// Bytes that leave each GPU when links are measured (arbitrary: from what one token sends to what 16384 do).
const LINK_BYTES: [u64; 5] = [64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20];

/// Whether a GPU's run-time library is there. Only looked for, never loaded.
#[derive(serde::Serialize)]
struct GpuLibrary {
    vendor: &'static str,
    name: &'static str,
    path: Option<PathBuf>,
}

/// Prints what there is.
pub fn info(arguments: &Arguments, output: &mut Output) -> Result<bool> {
    let mut environment = Environment::record_with_diff(arguments.diff);
    environment.nvrtc = nvrtc();
    let info = Info {
        environment,
        backends: &["cpu", "cuda"],
        gpu_libraries: vec![gpu_library("NVIDIA", "libcuda.so.1"), gpu_library("AMD", "libamdhip64.so")],
        cache_folder: environment::cache_folder(),
        ceilings: if arguments.ceilings { Some(ceilings(arguments)?) } else { None },
    };
    if arguments.json {
        let json = serde_json::to_string_pretty(&info)
            .map_err(|error| Error::Io { what: "writing the machine as JSON".into(), why: error.to_string() })?;
        output.line(json)?;
    } else {
        for (name, value) in lines(&info) {
            output.paragraph(name, 11, &value)?;
        }
        if let Some(ceilings) = &info.ceilings {
            print(ceilings, output)?;
        }
    }
    Ok(true)
}

/// The compiler of GPU code.
fn nvrtc() -> Option<String> {
    let (major, minor) = Nvrtc::get().ok()?.version().ok()?;
    Some(format!("NVRTC {major}.{minor}"))
}

fn ceilings(arguments: &Arguments) -> Result<Ceilings> {
    let progress = Progress::new(1, "measuring the GPU");
    // Before the device is opened: afterwards this process is one of its users.
    let idle = idle::check(arguments.device, arguments.allow_busy)?;
    let num_gpus = Device::count()?;
    let all_idle: Result<Vec<IdleReport>> = (0..num_gpus.min(MAX_GPUS as u32))
        .map(|gpu| if gpu == arguments.device { Ok(idle.clone()) } else { idle::check(gpu, arguments.allow_busy) })
        .collect();
    let stream = Stream::new(&Device::open(arguments.device)?)?;
    let empty = ceiling::empty_launch(&stream)?;
    let copies = COPY_BYTES.iter().map(|&bytes| ceiling::copy(&stream, bytes)).collect::<Result<_>>()?;
    let links = (num_gpus > 1).then(|| links(all_idle));
    drop(progress);
    Ok(Ceilings { idle, empty, copies, links })
}

/// What can be said of the links: a busy GPU, or one without access to another, is no reason to keep back what else was measured.
fn links(idle: Result<Vec<IdleReport>>) -> Links {
    let absent = |idle, error: Error| Links { idle, ceilings: Vec::new(), absence: Some(error.to_string()) };
    let idle = match idle {
        Ok(idle) => idle,
        Err(error) => return absent(Vec::new(), error),
    };
    let measure = || -> Result<Vec<LinkCeiling>> {
        let devices = (0..idle.len() as u32).map(Device::open).collect::<Result<Vec<_>>>()?;
        LINK_BYTES.iter().map(|&bytes| link_ceiling(&devices, bytes)).collect()
    };
    match measure() {
        Ok(ceilings) => Links { idle, ceilings, absence: None },
        Err(error) => absent(idle, error),
    }
}

fn print_links(links: &Links, output: &mut Output) -> Result<()> {
    if let Some(why) = &links.absence {
        return output.heading(format_args!("The links between GPUs were not measured: {why}"));
    }
    let busy: Vec<&str> = links.idle.iter().filter(|idle| !idle.is_idle()).map(|idle| idle.device.as_str()).collect();
    let state = if busy.is_empty() { "idle before".to_owned() } else { format!("BUSY: {}", busy.join("; ")) };
    output.heading(format_args!("What the links of {} GPUs can do at best ({state}); medians", links.idle.len()))?;
    output.line("GB/s that leave a GPU: to one other alone, from all to all at once, their ratio")?;
    let rows = links.ceilings.iter().map(|ceiling| {
        let mut cells = vec![report::bytes(ceiling.bytes) + if ceiling.is_beyond_cache { "" } else { ", cached" }];
        let way = |way: &Way| {
            let [alone, together] = [way.alone, way.together].map(|transfer| transfer.bytes_per_second);
            format!("{:.1}  {:.1}  {:.2}", alone / 1e9, together / 1e9, together / alone)
        };
        cells.extend([&ceiling.write, &ceiling.read, &ceiling.copy_engine].map(way));
        let trip = &ceiling.round_trip;
        cells.push(format!("{:.2} ({:.2}, {:.2})", trip.median * 1e6, trip.min * 1e6, trip.max * 1e6));
        cells
    });
    output.table(&["<bytes of a GPU", "a kernel writes", "a kernel reads", "copy engine", "signal and back"], rows)
}

fn print(ceilings: &Ceilings, output: &mut Output) -> Result<()> {
    let Ceilings { idle, empty, copies, links } = ceilings;
    let state = if idle.is_idle() { "idle before".to_owned() } else { format!("BUSY: {}", idle.reasons.join("; ")) };
    output.heading(format_args!("What {} can do at best ({state}); medians, least to greatest", idle.device))?;
    let spread = |s: &Statistics| format!("{} ({} to {})", report::duration(s.median), report::duration(s.min), report::duration(s.max));
    let launches = [
        ("node of a graph", &empty.node),
        ("node, programmatic", &empty.programmatic_node),
        ("queued in a row", &empty.eager),
        ("between two events", &empty.between_events),
        ("cost for the host", &empty.host_cost),
        ("cost, programmatic", &empty.programmatic_host_cost),
    ];
    output.table(&["<empty kernel", "time"], launches.map(|(name, time)| vec![name.to_owned(), spread(time)]))?;
    output.line("")?;
    let rows = copies.iter().map(|copy| {
        let rate = |s: &Statistics| report::rate(copy.moved_bytes, s.median);
        let size = report::bytes(copy.moved_bytes) + if copy.is_beyond_cache { "" } else { ", cached" };
        vec![
            size,
            rate(&copy.eager),
            rate(&copy.node),
            rate(&copy.streaming_kernel),
            rate(&copy.plain_kernel),
            report::rate(copy.moved_bytes, copy.best_seconds),
        ]
    });
    output.table(&["<copy, read + written", "memcpy GB/s", "its node", "streaming kernel", "plain kernel", "best"], rows)?;
    links.as_ref().map_or(Ok(()), |links| print_links(links, output))
}

fn lines(info: &Info) -> Vec<(&'static str, String)> {
    let e = &info.environment;
    let or_unknown = |text: &str| if text.is_empty() { "unknown".to_owned() } else { text.to_owned() };
    let version =
        [Some(format!("moe-kernels {}", e.version)), e.commit.as_ref().map(Commit::to_string), Some(e.profile.into()), e.rustc.clone()];
    let mut lines = vec![
        ("program", version.into_iter().flatten().collect::<Vec<_>>().join(", ")),
        ("system", or_unknown(&e.system)),
        ("cpu", format!("{}, {}, {} cores", or_unknown(&e.cpu), e.architecture, e.num_cores)),
        ("features", or_unknown(&e.features.join(" "))),
        ("level", format!("{} (of {})", e.level, e.levels.join(", "))),
        ("memory", format!("{}, {} available", report::bytes(e.memory.total_bytes), report::bytes(e.memory.available_bytes))),
        ("backends", info.backends.join(", ")),
    ];
    let gpus = e.nvidia.as_ref().map_or_else(Vec::new, gpu_lines);
    let absence = e.nvidia_absence.as_ref().map(|why| format!("none seen: {why}"));
    for (i, line) in gpus.into_iter().chain(absence).enumerate() {
        lines.push((if i == 0 { "gpu" } else { "" }, line));
    }
    for library in &info.gpu_libraries {
        let found = match &library.path {
            Some(path) => format!("{}: {} is installed", library.vendor, path.display()),
            None => format!("{}: {} was not found", library.vendor, library.name),
        };
        lines.push(("", found));
    }
    lines.push(("compiler", e.nvrtc.clone().unwrap_or_else(|| "none for GPU code: NVRTC was not found, MOE_NVRTC names its file".into())));
    let cache = match &info.cache_folder {
        Some(folder) => format!("{} (for compiled GPU kernels; the cpu backend keeps nothing)", folder.display()),
        None => "none: neither MOE_CACHE_DIR, XDG_CACHE_HOME nor HOME is set".into(),
    };
    lines.push(("cache", cache));
    lines
}

/// What a reader wants to know of each GPU before a measurement.
fn gpu_lines(nvidia: &Nvidia) -> Vec<String> {
    let mut lines = vec![format!("NVIDIA driver {}, CUDA up to {}, GPUs: {}", nvidia.driver, nvidia.cuda, nvidia.gpus.len())];
    lines.extend(nvidia.gpus.iter().map(gpu_line));
    lines
}

fn gpu_line(gpu: &Gpu) -> String {
    let number = |value: Option<u32>| value.map_or("?".to_owned(), |value| value.to_string());
    let watts = |milliwatts: Option<u32>| milliwatts.map_or("?".to_owned(), |value| format!("{:.0}", f64::from(value) / 1e3));
    let switch = |name: &str, value: Option<bool>| value.map(|on| format!("{name} {}", if on { "on" } else { "off" }));
    let (clocks, load) = (&gpu.clocks, &gpu.load);
    let memory = match (load.memory_used_bytes, load.memory_total_bytes) {
        (Some(used), Some(total)) => Some(format!("{} of {} in use", report::bytes(used), report::bytes(total))),
        _ => None,
    };
    let throttled = (!gpu.throttle_reasons.is_empty()).then(|| format!("clocks held by {}", gpu.throttle_reasons.join(" ")));
    let mut parts = vec![
        format!("{}: {} {} {}", gpu.index, gpu.name, gpu.uuid, gpu.pci_bus_id),
        format!("SM {} of {} MHz", number(clocks.sm_mhz), number(clocks.max_sm_mhz)),
        format!("memory {} of {} MHz", number(clocks.memory_mhz), number(clocks.max_memory_mhz)),
        format!("{} C", number(gpu.temperature_celsius)),
        format!("{} of {} W", watts(gpu.power_milliwatts), watts(gpu.power_limit_milliwatts)),
    ];
    parts.extend(memory);
    parts.extend(load.utilisation_percent.map(|percent| format!("utilisation {percent} %")));
    parts.extend([switch("ECC", gpu.ecc), switch("MIG", gpu.mig), switch("persistence", gpu.persistence)].into_iter().flatten());
    parts.extend(throttled);
    parts.extend(load.processes.iter().flatten().map(|process| format!("process {} {}", process.pid, process.name)));
    parts.join(", ")
}

/// Looks for `name` where a loader would, without loading it.
fn gpu_library(vendor: &'static str, name: &'static str) -> GpuLibrary {
    // The loader's usual folders, and where the vendors' installers and WSL put their libraries.
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
        "/opt/rocm/lib",
    ];
    let searched = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let path = env::split_paths(&searched)
        .filter(|folder| folder.is_absolute())
        .chain(usual.iter().map(PathBuf::from))
        .map(|folder: PathBuf| folder.join(name))
        .find(|path: &PathBuf| Path::exists(path));
    GpuLibrary { vendor, name, path }
}
