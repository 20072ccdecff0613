//! Figures as people read them.
#![forbid(unsafe_code)]

/// Seconds as `870 ns`, `12.3 us`, `4.56 ms` or `7.89 s`: three digits.
pub fn duration(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s < 1e-6 => (s * 1e9, "ns"),
        s if s < 1e-3 => (s * 1e6, "us"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    format!("{} {unit}", three_digits(value))
}

/// Bytes as `512 B`, `1.50 KiB`, `2.00 MiB`, `1.03 GiB`: powers of 1024, as memory is counted.
pub fn bytes(bytes: u64) -> String {
    match bytes {
        b if b < 1 << 10 => format!("{b} B"),
        b if b < 1 << 20 => format!("{} KiB", three_digits(b as f64 / f64::from(1 << 10))),
        b if b < 1 << 30 => format!("{} MiB", three_digits(b as f64 / f64::from(1 << 20))),
        b => format!("{} GiB", three_digits(b as f64 / f64::from(1 << 30))),
    }
}

/// Bytes moved in some time as `GB/s` (powers of 1000, as links are rated); `-` when nothing moved or no time passed.
pub fn rate(bytes: u64, seconds: f64) -> String {
    if bytes == 0 || seconds <= 0.0 {
        return "-".into();
    }
    three_digits(bytes as f64 / seconds / 1e9)
}

/// A count with a comma every three digits.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A part of a whole as `12.3 %`; `-` of nothing.
pub fn percent(part: f64, whole: f64) -> String {
    if whole > 0.0 { format!("{:.1} %", 100.0 * part / whole) } else { "-".into() }
}

/// A bar of `width` cells filled to `fraction` (kept within 0 and 1): of block characters to an eighth of a cell, or of `#` alone.
pub fn bar(fraction: f64, width: usize, ascii: bool) -> String {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let filled = if fraction.is_nan() { 0.0 } else { fraction.clamp(0.0, 1.0) } * width as f64;
    let mut text = String::new();
    if ascii {
        text.extend(std::iter::repeat_n('#', filled.round() as usize));
    } else {
        let eighths = (filled * 8.0).round() as usize;
        text.extend(std::iter::repeat_n('█', eighths / 8));
        text.extend((!eighths.is_multiple_of(8)).then(|| EIGHTHS[eighths % 8]));
    }
    let empty = width.saturating_sub(text.chars().count());
    text.extend(std::iter::repeat_n(' ', empty));
    text
}

/// Three significant digits from 1 on, two decimals below.
fn three_digits(value: f64) -> String {
    let decimals = match value {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        let durations = [0.0, 8.7e-7, 1.234e-5, 4.56e-3, 0.999, 7.894, 123.4].map(duration);
        assert_eq!(durations, ["0.00 ns", "870 ns", "12.3 us", "4.56 ms", "999 ms", "7.89 s", "123 s"]);
        let sizes = [0, 1023, 1024, 1536, 1 << 20, 1_105_954_734, 22_656_000_000].map(bytes);
        assert_eq!(sizes, ["0 B", "1023 B", "1.00 KiB", "1.50 KiB", "1.00 MiB", "1.03 GiB", "21.1 GiB"]);
        assert_eq!([rate(12_340_000_000, 1.0), rate(0, 1.0), rate(1, 0.0)], ["12.3", "-", "-"]);
        assert_eq!([0, 999, 1000, 12805, 1_234_567].map(count), ["0", "999", "1,000", "12,805", "1,234,567"]);
        assert_eq!([percent(1.0, 8.0), percent(0.0, 0.0)], ["12.5 %", "-"]);
    }

    #[test]
    fn bars_keep_their_width() {
        for fraction in [f64::NAN, -1.0, 0.0, 0.01, 0.5, 0.999, 1.0, 7.0] {
            for ascii in [true, false] {
                assert_eq!(bar(fraction, 10, ascii).chars().count(), 10);
            }
        }
        assert_eq!([bar(0.5, 4, true), bar(0.5, 4, false), bar(0.40625, 4, false)], ["##  ", "██  ", "█▋  "]);
    }
}
