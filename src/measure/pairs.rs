//! Two variants measured in turns, so that drift of the machine falls on both.
#![forbid(unsafe_code)]

use std::fmt;
use std::time::Instant;

use super::Statistics;

/// What [`interleaved`] measured. Times are seconds; a ratio is `time of the reference / time of the subject` of one pair.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct Pairs {
    /// Times of the subject.
    pub subject: Statistics,
    /// Times of the reference.
    pub reference: Statistics,
    /// Ratios: above 1 the subject is faster.
    pub ratio: Statistics,
}

/// Runs `subject` and `reference` in turns, `num_pairs` times (at least once) after one unmeasured run of each, with the order inside a
/// pair reversed every time: in some studies the order of runs was the whole gain.
pub fn interleaved(num_pairs: usize, mut subject: impl FnMut(), mut reference: impl FnMut()) -> Pairs {
    let time = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        start.elapsed().as_secs_f64()
    };
    subject();
    reference();
    let (mut subjects, mut references) = (Vec::new(), Vec::new());
    for pair in 0..num_pairs.max(1) {
        if pair % 2 == 0 {
            subjects.push(time(&mut subject));
            references.push(time(&mut reference));
        } else {
            references.push(time(&mut reference));
            subjects.push(time(&mut subject));
        }
    }
    let ratios: Vec<f64> = references.iter().zip(&subjects).map(|(r, s)| r / s.max(f64::MIN_POSITIVE)).collect();
    let of = |samples: &[f64]| Statistics::of(samples).expect("at least one pair, and times are numbers");
    Pairs { subject: of(&subjects), reference: of(&references), ratio: of(&ratios) }
}

impl fmt::Display for Pairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ratio {}, subject {} s, reference {} s", self.ratio, self.subject, self.reference)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn runs_alternate() {
        let log = RefCell::new(String::new());
        let pairs = interleaved(3, || log.borrow_mut().push('s'), || log.borrow_mut().push('r'));
        assert_eq!(log.into_inner(), "srsrrssr");
        assert_eq!(pairs.ratio.num_samples, 3);
    }
}
