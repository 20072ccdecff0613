//! Waiting until a GPU is as cool as it was.
#![forbid(unsafe_code)]

use std::thread;
use std::time::{Duration, Instant};

use super::nvidia::Monitor;
use crate::gpu::Device;

/// Time between two readings of a temperature (arbitrary: a chip cools by a degree in seconds).
const PERIOD: Duration = Duration::from_millis(100);

/// Brings a GPU back to its temperature at the start before something is measured, so that no variant inherits the heat of the one before it.
#[derive(Debug)]
pub struct Cooldown {
    gpu: Option<(Monitor, u32)>,
    start_celsius: Option<u32>,
    bound: Duration,
}

/// One wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct Cooled {
    /// Temperature at its end; `None` when it is not known, and then nothing was waited for.
    pub celsius: Option<u32>,
    /// How long it took.
    pub seconds: f64,
    /// `false` when the bound came first.
    pub is_cool: bool,
}

impl Cooldown {
    /// Takes the present temperature of `device` as the one to come back to; each wait ends after `bound`. Without NVML it waits for nothing.
    pub fn new(device: &Device, bound: Duration) -> Self {
        let open = || {
            let monitor = Monitor::open().ok()?;
            let index = monitor.index_of_device(device).ok()?;
            Some((monitor, index))
        };
        let mut cooldown = Cooldown { gpu: open(), start_celsius: None, bound };
        cooldown.start_celsius = cooldown.celsius();
        cooldown
    }

    /// Waits for nothing: for a CPU.
    pub fn none() -> Self {
        Cooldown { gpu: None, start_celsius: None, bound: Duration::ZERO }
    }

    /// The temperature to come back to.
    pub fn start_celsius(&self) -> Option<u32> {
        self.start_celsius
    }

    /// The temperature now.
    pub fn celsius(&self) -> Option<u32> {
        self.gpu.as_ref().and_then(|(monitor, index)| monitor.temperature_celsius(*index))
    }

    /// Waits until the GPU is no warmer than it was, or the bound has passed.
    pub fn wait(&self) -> Cooled {
        let start = Instant::now();
        cool(self.start_celsius, self.bound, || self.celsius(), || start.elapsed(), || thread::sleep(PERIOD))
    }
}

fn cool(
    target: Option<u32>,
    bound: Duration,
    mut celsius: impl FnMut() -> Option<u32>,
    mut elapsed: impl FnMut() -> Duration,
    mut pause: impl FnMut(),
) -> Cooled {
    loop {
        let now = celsius();
        let time = elapsed();
        let is_cool = match (now, target) {
            (Some(now), Some(target)) => now <= target,
            _ => true,
        };
        if is_cool || time >= bound {
            return Cooled { celsius: now, seconds: time.as_secs_f64(), is_cool };
        }
        pause();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A GPU at `degrees` after 0, 1, .. seconds, the last one for ever.
    fn cooled(target: Option<u32>, bound: u64, degrees: &[Option<u32>]) -> Cooled {
        let seconds = Cell::new(0);
        let celsius = || degrees[(seconds.get() as usize).min(degrees.len() - 1)];
        cool(target, Duration::from_secs(bound), celsius, || Duration::from_secs(seconds.get()), || seconds.set(seconds.get() + 1))
    }

    #[test]
    fn waits_for_the_start_temperature() {
        let warm = [Some(43), Some(41), Some(40), Some(39)];
        assert_eq!(cooled(Some(40), 60, &warm), Cooled { celsius: Some(40), seconds: 2.0, is_cool: true });
        assert_eq!(cooled(Some(43), 60, &warm), Cooled { celsius: Some(43), seconds: 0.0, is_cool: true });
    }

    #[test]
    fn is_bounded_and_needs_a_thermometer() {
        assert_eq!(cooled(Some(30), 5, &[Some(50)]), Cooled { celsius: Some(50), seconds: 5.0, is_cool: false });
        assert_eq!(cooled(None, 5, &[Some(50)]), Cooled { celsius: Some(50), seconds: 0.0, is_cool: true });
        assert_eq!(cooled(Some(30), 5, &[None]), Cooled { celsius: None, seconds: 0.0, is_cool: true });
        assert_eq!(Cooldown::none().wait().celsius, None);
    }
}
