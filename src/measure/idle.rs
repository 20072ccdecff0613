//! Whether a GPU is free to be measured.
#![forbid(unsafe_code)]

use std::thread;
use std::time::Duration;

use super::nvidia::{Load, Monitor};
use super::report;
use crate::error::{Error, Result};

/// Most memory that may be in use on an idle GPU, in per cent (arbitrary: a display server fits, a second job's weights do not).
pub const MAX_MEMORY_PERCENT: u64 = 15;

/// Time between two readings (arbitrary; NVML averages the utilisation over up to a second).
const PERIOD: Duration = Duration::from_millis(250);

/// Readings in a row that must be quiet: one second.
const NUM_QUIET: usize = 5;

/// Most readings: under four seconds. What a process that has just ended left in the averages is gone by then.
const MAX_READINGS: usize = 16;

/// What was seen.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct IdleReport {
    /// The GPU, by name and uuid.
    pub device: String,
    /// Why it is not idle; empty when it is.
    pub reasons: Vec<String>,
    /// The readings, a quarter of a second apart; the last five decide.
    pub readings: Vec<Load>,
}

impl IdleReport {
    /// `true` when nothing else uses the GPU.
    pub fn is_idle(&self) -> bool {
        self.reasons.is_empty()
    }
}

/// Looks whether CUDA's device `ordinal` is idle: for a whole second at most 15 % of its memory in use, no kernel running, and no process with a
/// context but this one. Memory of this process does not count. A GPU that has just become free is given up to four seconds.
///
/// With `allow_busy` a busy GPU is no error, and the report says what was found.
///
/// Processes are known by their ids; in a container whose ids are not the driver's own this process looks like a foreign one, so check
/// before the device is opened.
///
/// # Errors
/// [`Error::Busy`] names the device, the figures and the processes; a figure that the driver does not tell counts as busy. [`Error::Library`] without
/// NVML, and what [`Monitor::index_of`] returns.
pub fn check(ordinal: u32, allow_busy: bool) -> Result<IdleReport> {
    let monitor = Monitor::open()?;
    let index = monitor.index_of(ordinal)?;
    let gpu = monitor.gpu(index)?;
    let device = format!("GPU {ordinal} ({}, {})", gpu.name, gpu.uuid);
    watch(device, allow_busy, std::process::id(), || monitor.load(index), || thread::sleep(PERIOD))
}

fn watch(
    device: String,
    allow_busy: bool,
    own_pid: u32,
    mut read: impl FnMut() -> Result<Load>,
    mut pause: impl FnMut(),
) -> Result<IdleReport> {
    let max_readings = if allow_busy { NUM_QUIET } else { MAX_READINGS };
    let (mut readings, mut reasons, mut num_quiet) = (Vec::new(), Vec::new(), 0);
    // Ends as soon as a quiet second is seen or can no longer be.
    while num_quiet < NUM_QUIET && max_readings - readings.len() >= NUM_QUIET - num_quiet {
        if !readings.is_empty() {
            pause();
        }
        let load = read()?;
        let found = reasons_against(&load, own_pid);
        num_quiet = if found.is_empty() { num_quiet + 1 } else { 0 };
        if !found.is_empty() {
            reasons = found;
        }
        readings.push(load);
    }
    if num_quiet == NUM_QUIET {
        reasons.clear();
    } else if !allow_busy {
        return Err(Error::Busy { op: "idle check", what: device, why: reasons.join("; ") });
    }
    Ok(IdleReport { device, reasons, readings })
}

/// Why this reading is not that of an idle GPU.
fn reasons_against(load: &Load, own_pid: u32) -> Vec<String> {
    let mut reasons = Vec::new();
    let processes = load.processes.as_deref().unwrap_or_default();
    let (own, foreign): (Vec<_>, Vec<_>) = processes.iter().partition(|process| process.pid == own_pid);
    match (load.memory_used_bytes, load.memory_total_bytes) {
        (Some(used), Some(total)) => {
            let own_bytes = own.iter().filter_map(|process| process.memory_bytes).fold(0, u64::saturating_add);
            let used = used.saturating_sub(own_bytes);
            if u128::from(used) * 100 > u128::from(total) * u128::from(MAX_MEMORY_PERCENT) {
                let percent = report::percent(used as f64, total as f64);
                reasons.push(format!(
                    "{} of {} in use ({percent}, at most {MAX_MEMORY_PERCENT} %)",
                    report::bytes(used),
                    report::bytes(total)
                ));
            }
        }
        _ => reasons.push("its memory in use is not known".into()),
    }
    match load.utilisation_percent {
        Some(0) => {}
        Some(percent) => reasons.push(format!("utilisation {percent} %")),
        None => reasons.push("its utilisation is not known".into()),
    }
    reasons.extend(foreign.iter().map(|process| {
        let name = if process.name.is_empty() { "unknown program" } else { &process.name };
        let memory = process.memory_bytes.map(|bytes| format!(", {}", report::bytes(bytes))).unwrap_or_default();
        format!("process {} ({name}{memory})", process.pid)
    }));
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::nvidia::Process;

    const OWN: u32 = 7;

    fn quiet() -> Load {
        Load {
            memory_used_bytes: Some(15),
            memory_total_bytes: Some(100),
            utilisation_percent: Some(0),
            memory_utilisation_percent: Some(0),
            processes: Some(vec![]),
        }
    }

    fn process(pid: u32, memory_bytes: u64) -> Process {
        Process { pid, name: "train".into(), memory_bytes: Some(memory_bytes) }
    }

    /// Runs the check over `loads`, the last one repeated; also how often it paused.
    fn watched(loads: &[Load], allow_busy: bool) -> (Result<IdleReport>, usize) {
        let (mut next, mut num_pauses) = (0, 0);
        let read = || {
            next += 1;
            Ok(loads[(next - 1).min(loads.len() - 1)].clone())
        };
        let report = watch("GPU 0 (made up)".into(), allow_busy, OWN, read, || num_pauses += 1);
        (report, num_pauses)
    }

    #[test]
    fn a_quiet_second_is_enough() {
        let (report, num_pauses) = watched(&[quiet()], false);
        let report = report.unwrap();
        assert!(report.is_idle());
        assert_eq!((report.readings.len(), num_pauses), (5, 4));
    }

    #[test]
    fn each_figure_alone_is_refused() {
        let full = Load { memory_used_bytes: Some(16), ..quiet() };
        let working = Load { utilisation_percent: Some(1), ..quiet() };
        let foreign = Load { processes: Some(vec![process(OWN, 1), process(8, 2048)]), ..quiet() };
        let unknown = Load { utilisation_percent: None, ..quiet() };
        let blind = Load { memory_total_bytes: None, ..quiet() };
        let cases =
            [(full, "16 B of 100 B in use (16.0 %, at most 15 %)"), (working, "utilisation 1 %"), (foreign, "process 8 (train, 2.00 KiB)")];
        for (load, why) in cases.into_iter().chain([(unknown, "utilisation is not known"), (blind, "memory in use is not known")]) {
            let message = watched(std::slice::from_ref(&load), false).0.unwrap_err().to_string();
            assert!(message.contains("GPU 0 (made up) is busy") && message.contains(why), "{message}");
            let report = watched(&[load], true).0.unwrap();
            assert!(!report.is_idle() && report.reasons[0].contains(why), "{:?}", report.reasons);
        }
    }

    #[test]
    fn own_memory_does_not_count() {
        let load = Load { memory_used_bytes: Some(90), processes: Some(vec![process(OWN, 75)]), ..quiet() };
        assert!(watched(std::slice::from_ref(&load), false).0.unwrap().is_idle());
        let load = Load { processes: Some(vec![process(OWN, 74)]), ..load };
        assert!(watched(&[load], false).0.is_err());
    }

    #[test]
    fn a_gpu_that_becomes_free_is_waited_for() {
        let working = Load { utilisation_percent: Some(80), ..quiet() };
        let after = |num: usize| [vec![working.clone(); num], vec![quiet()]].concat();
        let report = watched(&after(11), false).0.unwrap();
        assert!(report.is_idle());
        assert_eq!(report.readings.len(), 16);
        // One reading later no quiet second can follow.
        assert!(watched(&after(12), false).0.is_err());
        // A busy moment starts the second anew.
        let report = watched(&[quiet(), quiet(), quiet(), working.clone(), quiet()], false).0.unwrap();
        assert_eq!(report.readings.len(), 9);
        // Who allows a busy GPU does not wait for it.
        let (report, num_pauses) = watched(&[working], true);
        assert_eq!((report.unwrap().readings.len(), num_pauses), (1, 0));
    }

    #[test]
    fn a_failed_reading_is_returned() {
        let failing = || Err(Error::Io { what: "reading".into(), why: "lost".into() });
        assert!(matches!(watch("x".into(), true, OWN, failing, || ()), Err(Error::Io { .. })));
    }
}
