//! Any number of variants measured in turns, the order reversed every round.
#![forbid(unsafe_code)]

use super::{Cooldown, Cooled, Statistics};
use crate::error::{Error, Result};

/// One variant: a name, and what measures it once.
pub struct Arm<'a> {
    /// What the results are called.
    pub name: String,
    /// Samples in seconds, at least one.
    pub measure: Box<dyn FnMut() -> Result<Vec<f64>> + 'a>,
}

impl<'a> Arm<'a> {
    /// A variant that `measure` measures.
    pub fn new(name: impl Into<String>, measure: impl FnMut() -> Result<Vec<f64>> + 'a) -> Self {
        Arm { name: name.into(), measure: Box::new(measure) }
    }
}

/// What [`rounds`] measured.
#[derive(Debug, Clone, serde::Serialize)]
#[non_exhaustive]
pub struct Rounds {
    /// Each arm in the order in which they were given.
    pub arms: Vec<ArmTimes>,
    /// Every run in the order in which they happened.
    pub runs: Vec<ArmRun>,
    /// The temperature that each run waited for.
    pub start_celsius: Option<u32>,
}

/// Times of one arm.
#[derive(Debug, Clone, serde::Serialize)]
pub struct ArmTimes {
    /// Its name.
    pub name: String,
    /// Its samples of all rounds, in seconds.
    pub seconds: Statistics,
}

/// One run of one arm.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct ArmRun {
    /// Index of the arm.
    pub arm: usize,
    /// Index of the round.
    pub round: usize,
    /// The wait before it.
    pub cooled: Cooled,
    /// Median of its samples, in seconds.
    pub median_seconds: f64,
}

/// Measures `arms` in turns, `num_rounds` times (at least once) after an unmeasured turn of each, and waits for the start temperature before each
/// measured run. The order is reversed every round, and starts reversed when `reversed` is set, as in every second process of
/// [`processes`](super::processes): in some studies the order of runs was the whole gain.
///
/// ```
/// use moe_kernels::measure::{Arm, Cooldown, rounds};
///
/// let mut arms = [Arm::new("one", || Ok(vec![1.0])), Arm::new("two", || Ok(vec![2.0]))];
/// let measured = rounds(&mut arms, 3, false, &Cooldown::none())?;
/// assert_eq!(measured.runs.iter().map(|run| run.arm).collect::<Vec<_>>(), [0, 1, 1, 0, 0, 1]);
/// assert_eq!(measured.arms[1].seconds.median, 2.0);
/// # Ok::<(), moe_kernels::Error>(())
/// ```
///
/// # Errors
/// Those of the arms; [`Error::Invalid`] when one gives no sample or one that is no number.
pub fn rounds(arms: &mut [Arm<'_>], num_rounds: usize, reversed: bool, cooldown: &Cooldown) -> Result<Rounds> {
    for arm in arms.iter_mut() {
        (arm.measure)()?;
    }
    let mut samples: Vec<Vec<f64>> = vec![Vec::new(); arms.len()];
    let mut runs = Vec::new();
    for round in 0..num_rounds.max(1) {
        for turn in 0..arms.len() {
            let arm = if (round % 2 == 1) != reversed { arms.len() - 1 - turn } else { turn };
            let cooled = cooldown.wait();
            let measured = (arms[arm].measure)()?;
            let median_seconds = statistics(&arms[arm], &measured)?.median;
            samples[arm].extend(measured);
            runs.push(ArmRun { arm, round, cooled, median_seconds });
        }
    }
    let times = arms.iter().zip(&samples).map(|(arm, samples)| Ok(ArmTimes { name: arm.name.clone(), seconds: statistics(arm, samples)? }));
    Ok(Rounds { arms: times.collect::<Result<_>>()?, runs, start_celsius: cooldown.start_celsius() })
}

fn statistics(arm: &Arm<'_>, samples: &[f64]) -> Result<Statistics> {
    let want = "at least one, and each a number";
    Statistics::of(samples).ok_or_else(|| Error::invalid("measure", format!("samples of {}", arm.name), format!("{samples:?}"), want))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn order_is_reversed_every_round() {
        for (reversed, want) in [(false, "abcabccbaabc"), (true, "abccbaabccba")] {
            let log = RefCell::new(String::new());
            let arm = |name: char| {
                let log = &log;
                Arm::new(name, move || {
                    log.borrow_mut().push(name);
                    let start = f64::from(u32::from(name));
                    Ok(vec![start, start + 2.0])
                })
            };
            let measured = rounds(&mut [arm('a'), arm('b'), arm('c')], 3, reversed, &Cooldown::none()).unwrap();
            assert_eq!(*log.borrow(), want);
            for (arm, name) in measured.arms.iter().zip(['a', 'b', 'c']) {
                assert_eq!((arm.name.as_str(), arm.seconds.num_samples), (name.to_string().as_str(), 6));
                assert_eq!((arm.seconds.min, arm.seconds.max), (f64::from(u32::from(name)), f64::from(u32::from(name) + 2)));
            }
            let order: String = measured.runs.iter().map(|run| char::from(run.median_seconds as u8 - 1)).collect();
            assert_eq!(order, want[3..]);
        }
    }

    #[test]
    fn nothing_measured_is_no_result() {
        for samples in [vec![], vec![f64::NAN]] {
            let message =
                rounds(&mut [Arm::new("empty", move || Ok(samples.clone()))], 1, false, &Cooldown::none()).unwrap_err().to_string();
            assert!(message.contains("samples of empty"), "{message}");
        }
        assert!(rounds(&mut [], 1, false, &Cooldown::none()).unwrap().arms.is_empty());
    }
}
