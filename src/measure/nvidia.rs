//! The NVIDIA GPUs of this machine, as NVML, the driver's management library, describes them.
#![forbid(unsafe_code)]

use std::env;
use std::path::PathBuf;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};

use crate::error::{Error, Result};
use crate::gpu;

const OP: &str = "measure";

/// Where NVML may be: the loader's own search first, then the folders of container runtimes and of WSL, which no loader knows by itself.
const LIBRARIES: [&str; 3] = ["libnvidia-ml.so.1", "/usr/local/nvidia/lib64/libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1"];

/// The driver and its GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Nvidia {
    /// Version of the driver.
    pub driver: String,
    /// The newest CUDA that the driver runs, for example `13.0`.
    pub cuda: String,
    /// Every GPU, in NVML's order, which is that of the PCI bus.
    pub gpus: Vec<Gpu>,
}

/// What is known about a GPU, and its state when it was asked. What NVML does not tell is empty or `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Gpu {
    /// NVML's index, which is not always CUDA's ordinal.
    pub index: u32,
    /// Product name.
    pub name: String,
    /// Identity of the board, `GPU-...`.
    pub uuid: String,
    /// Address on the PCI bus, `domain:bus:device.function`.
    pub pci_bus_id: String,
    /// Compute capability, major and minor.
    pub compute_capability: Option<(i32, i32)>,
    /// Clocks now and at most.
    pub clocks: Clocks,
    /// Temperature of the chip.
    pub temperature_celsius: Option<u32>,
    /// Power drawn now.
    pub power_milliwatts: Option<u32>,
    /// Power that it may draw.
    pub power_limit_milliwatts: Option<u32>,
    /// Error correction of the memory.
    pub ecc: Option<bool>,
    /// Multi-instance mode: the GPU is split.
    pub mig: Option<bool>,
    /// Persistence mode: the driver stays loaded without clients.
    pub persistence: Option<bool>,
    /// Reasons for clocks below the maximum, by NVML's names in lower case; `gpu_idle` is normal at rest.
    pub throttle_reasons: Vec<String>,
    /// What is going on on it.
    pub load: Load,
}

/// Clocks in MHz.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Clocks {
    /// Of the multiprocessors.
    pub sm_mhz: Option<u32>,
    /// Of the memory.
    pub memory_mhz: Option<u32>,
    /// Highest of the multiprocessors.
    pub max_sm_mhz: Option<u32>,
    /// Highest of the memory.
    pub max_memory_mhz: Option<u32>,
}

/// How busy a GPU is.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Load {
    /// Memory in use, without what the driver keeps for itself.
    pub memory_used_bytes: Option<u64>,
    /// Memory of the board.
    pub memory_total_bytes: Option<u64>,
    /// Per cent of the driver's last sampling period (up to a second) in which a kernel ran.
    pub utilisation_percent: Option<u32>,
    /// Per cent of that period in which memory was read or written.
    pub memory_utilisation_percent: Option<u32>,
    /// Processes with a compute context, this one included. `None` where they are not told.
    pub processes: Option<Vec<Process>>,
}

/// A process that uses a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Process {
    /// Process id, as the driver's machine counts them: inside a container it may be another than the process's own.
    pub pid: u32,
    /// Its program, empty when hidden.
    pub name: String,
    /// GPU memory that it holds.
    pub memory_bytes: Option<u64>,
}

impl Nvidia {
    /// Asks NVML about every GPU. Takes some milliseconds, more when the driver was not loaded.
    ///
    /// # Errors
    /// [`Error::Library`] without NVML, [`Error::Io`] when it does not answer.
    pub fn record() -> Result<Self> {
        Monitor::open()?.record()
    }
}

/// An open NVML: for readings that are repeated.
#[derive(Debug)]
pub struct Monitor {
    nvml: Nvml,
}

impl Monitor {
    /// Loads and starts NVML. Nothing else is loaded, no context is made.
    ///
    /// # Errors
    /// [`Error::Library`] without NVML, [`Error::Io`] when it does not start (no driver, no permission).
    pub fn open() -> Result<Self> {
        for library in LIBRARIES {
            match Nvml::builder().lib_path(library.as_ref()).init() {
                Ok(nvml) => return Ok(Monitor { nvml }),
                Err(NvmlError::LibloadingError(_)) => {}
                Err(error) => return Err(failed("starting NVML", &error)),
            }
        }
        Err(Error::Library { name: "libnvidia-ml.so.1".into(), searched: LIBRARIES.map(PathBuf::from).into() })
    }

    /// The driver and every GPU that this process may look at.
    ///
    /// # Errors
    /// [`Error::Io`] when NVML cannot count its GPUs.
    pub fn record(&self) -> Result<Nvidia> {
        let version = self.nvml.sys_cuda_driver_version().ok();
        Ok(Nvidia {
            driver: self.nvml.sys_driver_version().unwrap_or_default(),
            cuda: version.map(|v| format!("{}.{}", cuda_driver_version_major(v), cuda_driver_version_minor(v))).unwrap_or_default(),
            gpus: (0..self.num_gpus()?).filter_map(|index| self.gpu(index).ok()).collect(),
        })
    }

    /// One GPU by NVML's index; see [`Monitor::index_of`].
    ///
    /// # Errors
    /// [`Error::Io`] when there is none, or it is not accessible.
    pub fn gpu(&self, index: u32) -> Result<Gpu> {
        let device = self.device(index)?;
        let clock = |clock| device.clock_info(clock).ok();
        let max_clock = |clock| device.max_clock_info(clock).ok();
        Ok(Gpu {
            index,
            name: device.name().unwrap_or_default(),
            uuid: device.uuid().unwrap_or_default(),
            pci_bus_id: device.pci_info().map(|pci| pci.bus_id).unwrap_or_default(),
            compute_capability: device.cuda_compute_capability().ok().map(|c| (c.major, c.minor)),
            clocks: Clocks {
                sm_mhz: clock(Clock::SM),
                memory_mhz: clock(Clock::Memory),
                max_sm_mhz: max_clock(Clock::SM),
                max_memory_mhz: max_clock(Clock::Memory),
            },
            temperature_celsius: celsius(&device),
            power_milliwatts: device.power_usage().ok(),
            power_limit_milliwatts: device.enforced_power_limit().ok(),
            ecc: device.is_ecc_enabled().ok().map(|ecc| ecc.currently_enabled),
            mig: device.mig_mode().ok().map(|mig| mig.current != 0),
            persistence: device.is_in_persistent_mode().ok(),
            throttle_reasons: device.current_throttle_reasons().map(throttle_names).unwrap_or_default(),
            load: self.load_of(&device),
        })
    }

    /// How busy the GPU of NVML's `index` is.
    ///
    /// # Errors
    /// As [`Monitor::gpu`].
    pub fn load(&self, index: u32) -> Result<Load> {
        Ok(self.load_of(&self.device(index)?))
    }

    /// Temperature of the GPU of NVML's `index`; `None` when it is not told.
    pub fn temperature_celsius(&self, index: u32) -> Option<u32> {
        celsius(&self.device(index).ok()?)
    }

    /// NVML's index of CUDA's device `ordinal`: follows `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such device. [`Error::Unsupported`] when the GPUs of this machine differ and CUDA was not told to
    /// count them by their place on the bus (`CUDA_DEVICE_ORDER=PCI_BUS_ID`), or when it was told to see a part of a GPU.
    pub fn index_of(&self, ordinal: u32) -> Result<u32> {
        let visible = env::var("CUDA_VISIBLE_DEVICES").ok();
        let by_bus = env::var("CUDA_DEVICE_ORDER").is_ok_and(|order| order == "PCI_BUS_ID");
        let all = (0..self.num_gpus()?).map(|index| {
            let device = self.device(index).ok();
            let text = |get: fn(&Device<'_>) -> Result<String, NvmlError>| device.as_ref().and_then(|d| get(d).ok()).unwrap_or_default();
            (text(|d| d.name()), text(|d| d.uuid()))
        });
        index_among(ordinal, &all.collect::<Vec<_>>(), visible.as_deref(), by_bus)
    }

    /// NVML's index of an opened device, by its place on the bus.
    ///
    /// # Errors
    /// [`Error::Io`] when NVML does not see it.
    pub fn index_of_device(&self, device: &gpu::Device) -> Result<u32> {
        let bus_id = device.properties().pci_bus_id.as_str();
        let index = self.nvml.device_by_pci_bus_id(bus_id).and_then(|device| device.index());
        index.map_err(|error| failed(&format!("finding the GPU at {bus_id} through NVML"), &error))
    }

    fn num_gpus(&self) -> Result<u32> {
        self.nvml.device_count().map_err(|error| failed("counting the GPUs through NVML", &error))
    }

    fn device(&self, index: u32) -> Result<Device<'_>> {
        self.nvml.device_by_index(index).map_err(|error| failed(&format!("opening GPU {index} through NVML"), &error))
    }

    fn load_of(&self, device: &Device<'_>) -> Load {
        let memory = device.memory_info().ok();
        let utilisation = device.utilization_rates().ok();
        let process = |info: &nvml_wrapper::struct_wrappers::device::ProcessInfo| Process {
            pid: info.pid,
            // 256 is arbitrary: a longer path is cut.
            name: self.nvml.sys_process_name(info.pid, 256).unwrap_or_default(),
            memory_bytes: match info.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            },
        };
        Load {
            memory_used_bytes: memory.as_ref().map(|memory| memory.used),
            memory_total_bytes: memory.as_ref().map(|memory| memory.total),
            utilisation_percent: utilisation.as_ref().map(|utilisation| utilisation.gpu),
            memory_utilisation_percent: utilisation.as_ref().map(|utilisation| utilisation.memory),
            processes: device.running_compute_processes().ok().map(|all| all.iter().map(process).collect()),
        }
    }
}

fn celsius(device: &Device<'_>) -> Option<u32> {
    device.temperature(TemperatureSensor::Gpu).ok()
}

fn throttle_names(reasons: ThrottleReasons) -> Vec<String> {
    // `USER_DEFINED_CLOCKS` is an old name of another flag; iteration gives each bit once.
    reasons.iter_names().map(|(name, _)| name.to_lowercase()).collect()
}

fn failed(what: &str, error: &NvmlError) -> Error {
    Error::Io { what: what.into(), why: error.to_string() }
}

/// The index, among the (name, uuid) of `gpus`, of the device that CUDA calls `ordinal`.
fn index_among(ordinal: u32, gpus: &[(String, String)], visible: Option<&str>, by_bus: bool) -> Result<u32> {
    let unsupported = |what: &str, why: &str| Error::Unsupported { op: OP, what: what.into(), why: why.into() };
    let is_alike = gpus.windows(2).all(|pair| pair[0].0 == pair[1].0);
    let mut indices = Vec::new();
    for entry in visible
        .map_or_else(|| (0..gpus.len()).map(|i| i.to_string()).collect(), |list| list.split(',').map(str::to_owned).collect::<Vec<_>>())
    {
        let entry = entry.trim();
        if entry.starts_with("MIG-") {
            return Err(unsupported("CUDA_VISIBLE_DEVICES with a part of a GPU", "its load cannot be told from that of its neighbours"));
        }
        let index = match entry.parse::<usize>() {
            Ok(_) if !is_alike && !by_bus => {
                return Err(unsupported(
                    "a machine of different GPUs",
                    "CUDA's order of them is not known; set CUDA_DEVICE_ORDER=PCI_BUS_ID",
                ));
            }
            Ok(index) => Some(index).filter(|index| *index < gpus.len()),
            // The beginning of a uuid is enough where only one GPU has it.
            Err(_) => {
                let mut found = gpus.iter().enumerate().filter(|(_, (_, uuid))| entry.len() > "GPU-".len() && uuid.starts_with(entry));
                found.next().filter(|_| found.next().is_none()).map(|(index, _)| index)
            }
        };
        // CUDA ignores what follows an entry that it does not know (spec: CUDA programming guide, environment variables).
        let Some(index) = index else { break };
        indices.push(index as u32);
    }
    indices
        .get(ordinal as usize)
        .copied()
        .ok_or_else(|| Error::invalid(OP, "device ordinal", ordinal, format!("below {}, the number of visible GPUs", indices.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(names: &[&str]) -> Vec<(String, String)> {
        names.iter().enumerate().map(|(i, name)| (name.to_string(), format!("GPU-{i}a{i}"))).collect()
    }

    #[test]
    fn ordinals_follow_the_visible_devices() {
        let four = gpus(&["H200"; 4]);
        let index = |ordinal, visible| index_among(ordinal, &four, visible, false).ok();
        assert_eq!([0, 3, 4].map(|ordinal| index(ordinal, None)), [Some(0), Some(3), None]);
        assert_eq!([0, 1, 2].map(|ordinal| index(ordinal, Some("3, 1"))), [Some(3), Some(1), None]);
        assert_eq!([0, 1].map(|ordinal| index(ordinal, Some("GPU-2a,0"))), [Some(2), Some(0)]);
        // What follows an unknown entry is not seen, and nothing at all of an empty list.
        assert_eq!([0, 1].map(|ordinal| index(ordinal, Some("1,9,2"))), [Some(1), None]);
        assert_eq!([Some(""), Some("-1"), Some("GPU-"), Some("GPU-7")].map(|visible| index(0, visible)), [None; 4]);
        let same_start = ["GPU-aa", "GPU-ab"].map(|uuid| ("H200".to_owned(), uuid.to_owned()));
        assert_eq!(["GPU-ab", "GPU-a"].map(|entry| index_among(0, &same_start, Some(entry), false).ok()), [Some(1), None]);
        assert_eq!(["", "GPU-"].map(|entry| index_among(0, &same_start[..1], Some(entry), false).ok()), [None, None]);
        let message = index_among(2, &four, Some("1"), false).unwrap_err().to_string();
        assert!(message.contains("device ordinal is 2") && message.contains("below 1"), "{message}");
    }

    #[test]
    fn an_unknown_order_is_refused() {
        let mixed = gpus(&["H200", "A10"]);
        assert!(matches!(index_among(0, &mixed, None, false), Err(Error::Unsupported { .. })));
        assert_eq!(index_among(1, &mixed, None, true).ok(), Some(1));
        assert_eq!(index_among(0, &mixed, Some("GPU-1a1"), false).ok(), Some(1));
        assert!(matches!(index_among(0, &mixed, Some("MIG-1"), true), Err(Error::Unsupported { .. })));
    }

    #[test]
    fn reasons_have_names() {
        let reasons = ThrottleReasons::GPU_IDLE | ThrottleReasons::SW_POWER_CAP;
        assert_eq!(throttle_names(reasons), ["gpu_idle", "sw_power_cap"]);
        assert!(throttle_names(ThrottleReasons::empty()).is_empty());
    }

    #[test]
    fn absence_names_the_places() {
        match Nvidia::record() {
            Ok(nvidia) => assert!(!nvidia.driver.is_empty()),
            Err(Error::Library { name, searched }) => assert!(name.contains("nvidia-ml") && searched.len() == LIBRARIES.len()),
            Err(Error::Io { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}
