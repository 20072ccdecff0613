//! Statistics of repeated measurements.

use std::fmt;

/// Median, spread and extremes of samples, in their unit.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
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
}
