//! Statistics of repeated measurements.
#![forbid(unsafe_code)]

use std::fmt;

/// Median, spread and extremes of samples, in their unit.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Statistics {
    /// Number of samples.
    pub num_samples: usize,
    /// Middle sample; mean of the two middle ones of an even number.
    pub median: f64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Standard deviation (n - 1); 0 for one sample.
    pub sd: f64,
    /// Least sample.
    pub min: f64,
    /// Greatest sample.
    pub max: f64,
    /// 10th percentile, by linear interpolation.
    pub p10: f64,
    /// 90th percentile, by linear interpolation.
    pub p90: f64,
}

impl Statistics {
    /// Statistics of at least one sample; `None` without samples or with a NaN among them.
    pub fn of(samples: &[f64]) -> Option<Self> {
        if samples.is_empty() || samples.iter().any(|x| x.is_nan()) {
            return None;
        }
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len() as f64;
        let mean = sorted.iter().sum::<f64>() / n;
        let squares = sorted.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>();
        let quantile = |q: f64| {
            let position = q * (n - 1.0);
            let (below, above) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
            below + (above - below) * position.fract()
        };
        Some(Statistics {
            num_samples: sorted.len(),
            median: quantile(0.5),
            mean,
            sd: if sorted.len() > 1 { (squares / (n - 1.0)).sqrt() } else { 0.0 },
            min: sorted[0],
            max: sorted[sorted.len() - 1],
            p10: quantile(0.1),
            p90: quantile(0.9),
        })
    }

    /// Of the same measurement repeated in separate processes: statistics whose samples are the medians of `processes`. So `median` is the
    /// median of the medians, `min` and `max` are the least and the greatest of them. `None` as for [`Statistics::of`].
    pub fn of_medians(processes: &[Statistics]) -> Option<Self> {
        Statistics::of(&processes.iter().map(|process| process.median).collect::<Vec<_>>())
    }

    /// The same samples in another unit: every one times `factor`, which must be above 0.
    pub fn scaled(self, factor: f64) -> Self {
        let Statistics { num_samples, median, mean, sd, min, max, p10, p90 } = self;
        let [median, mean, sd, min, max, p10, p90] = [median, mean, sd, min, max, p10, p90].map(|value| value * factor);
        Statistics { num_samples, median, mean, sd, min, max, p10, p90 }
    }
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.4} ({:.4} to {:.4}, n = {})", self.median, self.min, self.max, self.num_samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_samples() {
        let s = Statistics::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((s.median, s.mean, s.min, s.max), (2.5, 2.5, 1.0, 4.0));
        assert!((s.sd - (5.0f64 / 3.0).sqrt()).abs() < 1e-12);
        assert!((s.p10 - 1.3).abs() < 1e-12 && (s.p90 - 3.7).abs() < 1e-12);
        assert_eq!(Statistics::of(&[]), None);
        assert_eq!(Statistics::of(&[1.0, f64::NAN]), None);
        assert_eq!(Statistics::of(&[7.0]).unwrap().sd, 0.0);
    }

    #[test]
    fn processes_count_by_their_medians() {
        let of = |samples: &[f64]| Statistics::of(samples).unwrap();
        // The second process has an outlier that its median hides; the third is slow as a whole.
        let all = Statistics::of_medians(&[of(&[1.0, 2.0, 3.0]), of(&[1.0, 1.5, 99.0]), of(&[7.0, 8.0, 9.0])]).unwrap();
        assert_eq!((all.num_samples, all.median, all.min, all.max), (3, 2.0, 1.5, 8.0));
        assert_eq!(Statistics::of_medians(&[]), None);
        let seconds = of(&[0.5, 1.5]);
        assert_eq!(seconds.scaled(1e3), of(&[500.0, 1500.0]));
        let text = serde_json::to_string(&seconds).unwrap();
        assert_eq!(serde_json::from_str::<Statistics>(&text).unwrap(), seconds);
    }
}
