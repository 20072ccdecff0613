//! What the program prints: lines and tables on stdout, progress and errors on stderr.
#![forbid(unsafe_code)]

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moe_kernels::{Error, Result};

/// Columns of a line where there is no terminal to ask, and the most on a terminal (arbitrary; longer lines are tiring to read).
const WIDTH: u16 = 100;

/// Work that takes less than this shows no progress (the program's promise: bars on work over a second).
const PROGRESS_AFTER: Duration = Duration::from_secs(1);

/// Stdout. Once its reader has gone (`moe info | head -1`), lines are dropped: the exit status still tells the verdict.
pub struct Output {
    closed: bool,
    is_terminal: bool,
}

impl Output {
    /// Stdout as it is now.
    pub fn new() -> Self {
        Output { closed: false, is_terminal: io::stdout().is_terminal() }
    }

    /// Nothing is printed: for tests.
    #[cfg(test)]
    pub fn closed() -> Self {
        Output { closed: true, is_terminal: false }
    }

    /// `true` when only plain ASCII characters should be drawn.
    pub fn is_plain(&self) -> bool {
        !self.is_terminal
    }

    /// Prints a line.
    pub fn line(&mut self, text: impl Display) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(())
            }
            Err(error) => Err(Error::Io { what: "writing to stdout".into(), why: error.to_string() }),
        }
    }

    /// Prints a heading: an empty line before it.
    pub fn heading(&mut self, text: impl Display) -> Result<()> {
        self.line(format_args!("\n{text}"))
    }

    /// Prints `head` and a text in as many lines as the width asks for, those after the first indented by `indent`.
    pub fn paragraph(&mut self, head: &str, indent: usize, text: &str) -> Result<()> {
        let mut line = format!("{head:<indent$}");
        let mut is_empty = true;
        for word in text.split_whitespace() {
            if !is_empty && line.chars().count() + 1 + word.chars().count() > usize::from(self.width()) {
                self.line(&line)?;
                line = " ".repeat(indent);
                is_empty = true;
            }
            if !is_empty {
                line.push(' ');
            }
            line.push_str(word);
            is_empty = false;
        }
        self.line(line)
    }

    /// Prints a table; columns whose header starts with `<` are aligned to the left, the others to the right.
    pub fn table(&mut self, header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Result<()> {
        let mut table = Table::new();
        let rule = if self.is_plain() { '-' } else { '─' };
        table.load_style(TableStyle::new().header_separator(LineStyle::none().fill(rule).junction(rule)));
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(self.width());
        table.set_header(header.iter().map(|name| name.trim_start_matches('<')));
        for row in rows {
            table.add_row(row);
        }
        for (column, name) in table.column_iter_mut().zip(header) {
            column.set_padding((0, 2));
            column.set_cell_alignment(if name.starts_with('<') { CellAlignment::Left } else { CellAlignment::Right });
        }
        self.line(table.trim_fmt())
    }

    /// Columns of a line.
    pub fn width(&self) -> u16 {
        let terminal = if self.is_terminal { Table::new().width() } else { None };
        terminal.map_or(WIDTH, |width| width.min(WIDTH))
    }
}

/// Prints an error on stderr.
pub fn error(error: &Error) {
    // With stderr gone too there is nobody left to tell.
    let _ = writeln!(io::stderr().lock(), "error: {error}");
}

/// Prints a line on stderr that is no error of its own.
pub fn warning(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// A progress bar on stderr that appears after a second, never where stderr is no terminal, and is gone when it is dropped.
pub struct Progress {
    bar: ProgressBar,
    _stop: Sender<()>,
}

impl Progress {
    /// A bar of `num_steps`, or a spinner for 1.
    pub fn new(num_steps: usize, message: impl Into<String>) -> Self {
        let bar = ProgressBar::with_draw_target(Some(num_steps as u64), ProgressDrawTarget::hidden());
        let template = if num_steps > 1 { "{spinner} {msg} {wide_bar} {pos}/{len} {elapsed}" } else { "{spinner} {msg} {elapsed}" };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(message.into());
        let (stop, stopped) = channel::<()>();
        let shown = bar.clone();
        // Without the thread there is no bar, which is no reason to stop the work.
        let _ = thread::Builder::new().name("progress".into()).spawn(move || {
            if stopped.recv_timeout(PROGRESS_AFTER) == Err(RecvTimeoutError::Timeout) && !shown.is_finished() {
                shown.set_draw_target(ProgressDrawTarget::stderr());
                shown.enable_steady_tick(Duration::from_millis(100)); // arbitrary: looks alive
            }
        });
        Progress { bar, _stop: stop }
    }

    /// Counts a step.
    pub fn step(&self) {
        self.bar.inc(1);
    }

    /// Says what is going on.
    pub fn message(&self, message: impl Into<String>) {
        self.bar.set_message(message.into());
    }

    /// Runs `print` with the bar out of the way.
    pub fn suspend<R>(&self, print: impl FnOnce() -> R) -> R {
        self.bar.suspend(print)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
