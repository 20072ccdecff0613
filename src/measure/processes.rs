//! The same measurement in several processes: what differs from process to process (addresses, clocks, caches) shows only there.
#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::Statistics;
use crate::error::{Error, Result};

/// The option that [`run`] adds, as `--process=INDEX`: a program that uses it declares it, hidden, and then prints JSON lines and nothing else.
pub const OPTION: &str = "--process";

/// Between two looks whether a process has ended (arbitrary; short against the start of a process).
const PERIOD: Duration = Duration::from_millis(5);

/// How long an ended process's output may stay open, for children that it left (arbitrary).
const GRACE: Duration = Duration::from_secs(1);

/// Most of a failed process's stderr that an error quotes (arbitrary: its end says why).
const MAX_QUOTE: usize = 4000;

/// `true` for the processes that measure their arms in reversed order: every second one.
pub fn is_reversed(process: usize) -> bool {
    process % 2 == 1
}

/// Runs this very program `num_processes` times, one after another, with `args` and `--process=0`, `--process=1`, .. behind them, and returns the
/// JSON objects that each printed, one a line, by process. Their environment is this process's; their stdin is empty.
///
/// Call it before this process opens a GPU: two contexts on one device disturb each other.
///
/// # Errors
/// [`Error::Io`] when a process cannot be started, fails (with the end of its stderr), prints something else, or has not ended after `bound`; it is
/// killed then, and no other is started.
pub fn run<S: AsRef<OsStr>>(num_processes: usize, args: &[S], bound: Duration) -> Result<Vec<Vec<Map<String, Value>>>> {
    let program = std::env::current_exe().map_err(|error| Error::Io { what: "finding this program".into(), why: error.to_string() })?;
    run_program(&program, num_processes, args, bound)
}

/// Brings together what [`run`] collected: for each line of the first process, that line and the [`Statistics::of_medians`] of its `field` and of the
/// same field in every other process's line with equal values of `keys`.
///
/// # Errors
/// [`Error::Invalid`] when a process lacks the line or has it twice, printed more lines, or `field` is not the [`Statistics`] of a measurement.
pub fn medians(all: &[Vec<Map<String, Value>>], keys: &[&str], field: &str) -> Result<Vec<(Map<String, Value>, Statistics)>> {
    let Some(first) = all.first() else { return Ok(Vec::new()) };
    let invalid = |what: String, got: String, want: String| Error::invalid("processes", what, got, want);
    if let Some((process, lines)) = all.iter().enumerate().find(|(_, lines)| lines.len() != first.len()) {
        return Err(invalid(
            format!("number of lines of process {process}"),
            lines.len().to_string(),
            format!("{}, as of process 0", first.len()),
        ));
    }
    let combine = |line: &Map<String, Value>| {
        let name = || keys.iter().map(|key| format!("{key} {}", line.get(*key).unwrap_or(&Value::Null))).collect::<Vec<_>>().join(", ");
        let of_process = |(process, lines): (usize, &Vec<Map<String, Value>>)| {
            let same = |other: &&Map<String, Value>| keys.iter().all(|key| other.get(*key) == line.get(*key));
            let mut found = lines.iter().filter(same);
            let (Some(other), None) = (found.next(), found.next()) else {
                let number = lines.iter().filter(same).count().to_string();
                return Err(invalid(format!("number of lines with {} of process {process}", name()), number, "1".into()));
            };
            let value = other.get(field).cloned().unwrap_or_default();
            serde_json::from_value::<Statistics>(value.clone()).map_err(|error| {
                invalid(format!("`{field}` of {} of process {process}", name()), value.to_string(), format!("statistics ({error})"))
            })
        };
        let statistics = all.iter().enumerate().map(of_process).collect::<Result<Vec<_>>>()?;
        let combined = Statistics::of_medians(&statistics)
            .ok_or_else(|| invalid(format!("`{field}` of {}", name()), "no number".into(), "a number".into()))?;
        Ok((line.clone(), combined))
    };
    first.iter().map(combine).collect()
}

fn run_program<S: AsRef<OsStr>>(program: &Path, num_processes: usize, args: &[S], bound: Duration) -> Result<Vec<Vec<Map<String, Value>>>> {
    (0..num_processes).map(|process| run_one(program, (process, num_processes), args, bound)).collect()
}

fn run_one<S: AsRef<OsStr>>(
    program: &Path,
    (process, num): (usize, usize),
    args: &[S],
    bound: Duration,
) -> Result<Vec<Map<String, Value>>> {
    let option = format!("{OPTION}={process}");
    let failed = |why: String| {
        let words = [program.as_os_str()].into_iter().chain(args.iter().map(AsRef::as_ref)).chain([OsStr::new(&option)]);
        let line: Vec<_> = words.map(OsStr::to_string_lossy).collect();
        Error::Io { what: format!("process {} of {num}, `{}`", process + 1, line.join(" ")), why }
    };
    let mut child = Command::new(program)
        .args(args)
        .arg(&option)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(format!("cannot be started: {error}")))?;
    let stdout = drained(child.stdout.take());
    let stderr = drained(child.stderr.take());
    let status = wait(&mut child, bound);
    let stderr = || {
        let text = stderr.recv_timeout(GRACE).unwrap_or_default();
        let end = String::from_utf8_lossy(&text[text.len().saturating_sub(MAX_QUOTE)..]).trim().to_owned();
        if end.is_empty() { "nothing on stderr".into() } else { end }
    };
    match status {
        Ok(Some(status)) if status.success() => {}
        Ok(Some(status)) => return Err(failed(format!("{status}: {}", stderr()))),
        Ok(None) => return Err(failed(format!("had not ended after {bound:?} and was killed: {}", stderr()))),
        Err(error) => return Err(failed(format!("cannot be waited for: {error}"))),
    }
    let output = stdout.recv_timeout(GRACE).map_err(|_| failed("has ended, but its output is held open".into()))?;
    let lines = output.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
    lines
        .map(|line| {
            serde_json::from_slice(line)
                .map_err(|error| failed(format!("printed `{}`, which is no JSON object: {error}", String::from_utf8_lossy(line))))
        })
        .collect()
}

/// All that a pipe gives, read by a thread of its own, so that the writer never waits.
fn drained(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What was read before an error is worth having.
            let _ = pipe.read_to_end(&mut bytes);
        }
        // Nobody listens any more after a failure.
        let _ = sender.send(bytes);
    });
    receiver
}

/// How the process ended; `None` when it was killed after `bound`.
fn wait(child: &mut Child, bound: Duration) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= bound {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(PERIOD);
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// Processes of a shell; the option that is added is its `$0`.
    fn shell(script: &str, num_processes: usize, bound: Duration) -> Result<Vec<Vec<Map<String, Value>>>> {
        run_program(Path::new("/bin/sh"), num_processes, &["-c", script], bound)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn objects_are_collected_in_order() {
        let script = r#"echo "{\"option\":\"$0\",\"line\":1}"; echo; echo '{"line":2}'"#;
        let all = shell(script, 3, LONG).unwrap();
        assert_eq!(all.len(), 3);
        for (process, lines) in all.iter().enumerate() {
            assert_eq!(lines[0]["option"], format!("--process={process}"));
            assert_eq!((lines.len(), &lines[1]["line"]), (2, &Value::from(2)));
        }
        assert!(shell("exit 1", 0, LONG).unwrap().is_empty());
        assert_eq!([0, 1, 2, 3].map(is_reversed), [false, true, false, true]);
    }

    #[test]
    fn medians_go_by_key() {
        let line = |k: u64, arm: &str, samples: &[f64]| {
            let object = serde_json::json!({ "k": k, "arm": arm, "seconds": Statistics::of(samples).unwrap() });
            object.as_object().unwrap().clone()
        };
        // The second process printed in another order.
        let all = [
            vec![line(1, "ours", &[1.0, 2.0, 9.0]), line(1, "theirs", &[4.0]), line(2, "ours", &[7.0])],
            vec![line(2, "ours", &[8.0]), line(1, "theirs", &[6.0]), line(1, "ours", &[3.0])],
        ];
        let combined = medians(&all, &["k", "arm"], "seconds").unwrap();
        let figures: Vec<_> =
            combined.iter().map(|(line, s)| (line["arm"].as_str().unwrap(), s.median, s.min, s.max, s.num_samples)).collect();
        assert_eq!(figures, [("ours", 2.5, 2.0, 3.0, 2), ("theirs", 5.0, 4.0, 6.0, 2), ("ours", 7.5, 7.0, 8.0, 2)]);
        assert!(medians(&[], &["k"], "seconds").unwrap().is_empty());
        let refused = |all: &[Vec<_>], keys: &[&str], field, why: &str| {
            let message = medians(all, keys, field).unwrap_err().to_string();
            assert!(message.contains(why), "{message}");
        };
        refused(&all, &["k"], "seconds", "number of lines with k 1 of process 0 is 2");
        refused(&all, &["k", "arm"], "bytes", "`bytes` of k 1, arm \"ours\" of process 0 is null");
        refused(&[all[0].clone(), all[1][..2].to_vec()], &["k", "arm"], "seconds", "number of lines of process 1 is 2");
        let other = [all[0].clone(), [&all[1][..2], &[line(3, "ours", &[1.0])]].concat()];
        refused(&other, &["k", "arm"], "seconds", "number of lines with k 1, arm \"ours\" of process 1 is 0");
    }

    #[test]
    fn more_than_a_pipe_holds() {
        let script = r#"i=0; while [ $i -lt 3000 ]; do echo '{"k":"0123456789012345678901234567890123456789"}'; echo noise-of-its-own >&2; i=$((i+1)); done"#;
        assert_eq!(shell(script, 1, LONG).unwrap()[0].len(), 3000);
    }

    #[test]
    fn failures_say_which_process_and_why() {
        let script = r#"case $0 in *=1) echo it broke >&2; exit 3;; esac; echo '{}'"#;
        let message = shell(script, 2, LONG).unwrap_err().to_string();
        assert!(["process 2 of 2", "exit status: 3: it broke"].iter().all(|part| message.contains(part)), "{message}");
        for text in ["hello", "[1]", "{"] {
            let message = shell(&format!("echo '{text}'"), 1, LONG).unwrap_err().to_string();
            assert!(message.contains(&format!("printed `{text}`")), "{message}");
        }
        let message = run_program(Path::new("/nonexistent/program"), 1, &["a"], LONG).unwrap_err().to_string();
        assert!(message.contains("cannot be started"), "{message}");
    }

    #[test]
    fn a_process_that_hangs_is_killed() {
        let start = Instant::now();
        let message = shell("echo waiting >&2; exec sleep 600", 2, Duration::from_millis(300)).unwrap_err().to_string();
        assert!(message.contains("had not ended after 300ms and was killed: waiting"), "{message}");
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
