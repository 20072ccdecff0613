//! The machine and the build that a figure was measured with.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fs};

use crate::cpu::Level;
use crate::measure::available_bytes;
use crate::measure::commit::{self, Commit};
use crate::measure::nvidia::Nvidia;

/// What a measurement needs beside its figures to be compared with another one. Whatever the system does not tell is empty, `None` or 0.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Environment {
    /// When it was recorded, UTC, as `2026-01-31T12:00:00Z`.
    pub time: String,
    /// The CPU's own name.
    pub cpu: String,
    /// Architecture of the build, for example `x86_64`.
    pub architecture: &'static str,
    /// Instructions that the CPU backend chooses here: scalar, neon, avx2 or avx512.
    pub level: &'static str,
    /// Every level that can be chosen here, slowest first.
    pub levels: Vec<&'static str>,
    /// Vector extensions that this CPU reports, of those that matter to this crate.
    pub features: Vec<&'static str>,
    /// Hardware threads that this process may use.
    pub num_cores: usize,
    /// Memory, all and available.
    pub memory: Memory,
    /// Name of the system and release of its kernel.
    pub system: String,
    /// Version of this crate.
    pub version: &'static str,
    /// What the running program was built from.
    pub commit: Option<Commit>,
    /// The compiler of the host code.
    pub rustc: Option<String>,
    /// The compiler of the GPU code, for example `NVRTC 13.0`: set by whoever compiles with it.
    pub nvrtc: Option<String>,
    /// `release`, or `debug` with debug assertions.
    pub profile: &'static str,
    /// NVIDIA's driver and GPUs.
    pub nvidia: Option<Nvidia>,
    /// Why there is nothing about them.
    pub nvidia_absence: Option<String>,
}

/// Memory of this machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Memory {
    /// All of it, whatever this process may use.
    pub total_bytes: u64,
    /// What this process may still allocate: the kernel's estimate, or what a control group leaves it if that is less.
    pub available_bytes: u64,
}

impl Environment {
    /// Looks at this machine. Takes some milliseconds, most of them to ask `git` for the commit and NVML for the GPUs.
    pub fn record() -> Self {
        Environment::record_with_diff(0)
    }

    /// The same, with up to `max_diff_bytes` of the text of `git diff HEAD`.
    pub fn record_with_diff(max_diff_bytes: usize) -> Self {
        let (nvidia, nvidia_absence) = match Nvidia::record() {
            Ok(nvidia) => (Some(nvidia), None),
            Err(error) => (None, Some(error.to_string())),
        };
        Environment {
            time: utc(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())),
            cpu: cpu_name(),
            architecture: env::consts::ARCH,
            level: Level::detect().name(),
            levels: Level::available().into_iter().map(Level::name).collect(),
            features: features(),
            num_cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
            memory: Memory::now(),
            system: system(),
            version: env!("CARGO_PKG_VERSION"),
            commit: Commit::of_program(max_diff_bytes),
            rustc: option_env!("MOE_RUSTC_VERSION").or_else(commit::rustc).map(str::to_owned),
            nvrtc: None,
            profile: if cfg!(debug_assertions) { "debug" } else { "release" },
            nvidia,
            nvidia_absence,
        }
    }
}

impl Memory {
    /// Memory at this moment; zeros where the system does not tell.
    pub fn now() -> Self {
        let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Memory { total_bytes: total_bytes(&text).unwrap_or(0), available_bytes: available_bytes().unwrap_or(0) }
    }
}

fn total_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().filter_map(|line| line.split_once(':')).find(|(key, _)| key.trim() == "model name");
    name.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
}

fn system() -> String {
    let uname = rustix::system::uname();
    let kernel = format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy());
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    match text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")) {
        Some(name) => format!("{}, {kernel}", name.trim_matches('"')),
        None => kernel,
    }
}

/// Names of the detected features of a list.
macro_rules! detected {
    ($detect:ident: $($name:tt)*) => {{
        let mut names = Vec::new();
        $(if std::arch::$detect!($name) {
            names.push($name);
        })*
        names
    }};
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    detected!(is_x86_feature_detected: "avx2" "fma" "f16c" "bmi2" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512vbmi" "avx512vnni" "avx512bf16" "avx512fp16")
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<&'static str> {
    detected!(is_aarch64_feature_detected: "neon" "fp16" "bf16" "dotprod" "i8mm" "sve" "sve2")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

/// Where this crate keeps what it can make again: `$MOE_CACHE_DIR`, else `moe-kernels` in `$XDG_CACHE_HOME` (if absolute, as its specification
/// wants) or in `$HOME/.cache`. `None` without any of them.
pub fn cache_folder() -> Option<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let shared = || variable("XDG_CACHE_HOME").filter(|folder| folder.is_absolute());
    variable("MOE_CACHE_DIR")
        .or_else(|| shared().or_else(|| variable("HOME").map(|home| home.join(".cache"))).map(|folder| folder.join("moe-kernels")))
}

/// Civil date and time of seconds since 1970.
fn utc(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days are counted from the 1st of March of year 0, so that the leap day comes last; 719468 days lie between it and 1970, 146097 in 400 years.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153; // months from March, 153 days every five
    let (day, month, year) = (day - (153 * month + 2) / 5 + 1, (month + 2) % 12 + 1, era * 400 + year + month / 10);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        // Each from `date -u -d @SECONDS`.
        for (seconds, want) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), want);
        }
    }

    #[test]
    fn this_machine_is_described() {
        let environment = Environment::record();
        assert!(environment.levels.contains(&environment.level));
        assert!(environment.num_cores >= 1);
        let memory = environment.memory;
        assert!(memory.available_bytes <= memory.total_bytes);
        assert!(!cfg!(target_os = "linux") || memory.available_bytes > 1 << 20);
        assert_ne!(environment.nvidia.is_some(), environment.nvidia_absence.is_some());
    }

    #[test]
    fn total_of_meminfo() {
        assert_eq!(total_bytes("MemTotal:       99 kB\nMemFree: 1 kB\n"), Some(99 * 1024));
        assert_eq!(total_bytes("MemTotal: x kB"), None);
    }
}
