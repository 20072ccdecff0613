//! A loaded kernel, and its launch.

use std::ffi::{CString, c_void};

use super::device::Device;
use super::driver::{Handle, LaunchAttribute, LaunchConfig};
use super::program::{Carveout, Program};
use super::stream::Stream;
use crate::error::{Error, Result};

/// How many blocks of what size run, and how. Attributes may be combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub smem_bytes: u32,
    /// Blocks of a cluster along the first dimension; 1 for none.
    pub cluster: u32,
    /// All blocks run at the same time, or the launch fails: for blocks that wait for each other.
    pub cooperative: bool,
    /// May start before the kernel ahead of it in the stream has ended; the kernel waits for it itself.
    pub programmatic: bool,
}

impl Default for Geometry {
    fn default() -> Self {
        Geometry { grid: [1; 3], threads: 32, smem_bytes: 0, cluster: 1, cooperative: false, programmatic: false }
    }
}

/// What the driver reports of a loaded kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Local memory of a thread: spills and arrays that are indexed at run time.
    pub local_bytes: u32,
    /// Static shared memory of a block.
    pub smem_bytes: u32,
    /// Most threads of a block.
    pub max_threads: u32,
}

/// A kernel that is loaded on a device. It stays loaded until the process ends: others may be running while one would be unloaded.
#[derive(Debug, Clone, Copy)]
pub struct Kernel {
    function: Handle,
}

// SAFETY: a function of a module may be launched from any thread (spec: CUDA driver API, thread safety).
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads machine code: takes the entry, allows it the dynamic shared memory of the program, its carve-out and clusters of any size.
    pub(super) fn load(device: &Device, program: &Program, image: &[u8]) -> Result<Self> {
        let driver = device.driver();
        let entry =
            CString::new(program.entry).map_err(|_| Error::invalid("load", "entry", "a name with a zero byte", "a name without"))?;
        let _bound = device.bind()?;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the image is a whole cubin: the compiler made it, or its checksum was right.
        unsafe { driver.module_load(&mut module, image.as_ptr().cast()) }?;
        // SAFETY: the module is alive; both pointers outlive the call.
        if let Err(error) = unsafe { driver.module_function(&mut function, module, entry.as_ptr()) } {
            // SAFETY: nothing of the module is in use.
            unsafe { driver.module_unload(module) }?;
            return Err(error);
        }
        let kernel = Kernel { function };
        let set = |attribute: i32, value: i32| {
            // SAFETY: the function is alive; these attributes take any value.
            unsafe { driver.function_set_attribute(function, attribute, value) }
        };
        // Numbers of CUfunction_attribute (spec: cuda.h): 8 largest dynamic shared memory, 9 preferred carve-out in per cent, 14 clusters above 8.
        if program.smem_bytes > 0 {
            set(8, program.smem_bytes as i32)?;
        }
        if program.carveout == Carveout::Shared {
            set(9, 100)?;
        }
        if device.compute_capability() >= (9, 0) {
            set(14, 1)?;
        }
        Ok(kernel)
    }

    /// Registers and memory, as the driver reports them.
    pub fn resources(&self, device: &Device) -> Result<Resources> {
        let number = |attribute: i32| {
            let mut value = 0;
            let _bound = device.bind()?;
            // SAFETY: the function is alive, and the number outlives the call.
            unsafe { device.driver().function_attribute(&mut value, attribute, self.function) }.map(|()| value as u32)
        };
        // Numbers of CUfunction_attribute (spec: cuda.h).
        Ok(Resources { registers: number(4)?, local_bytes: number(3)?, smem_bytes: number(1)?, max_threads: number(0)? })
    }

    /// Blocks of this size that one multiprocessor holds.
    pub fn max_active_blocks(&self, device: &Device, threads: u32, smem_bytes: u32) -> Result<u32> {
        let mut blocks = 0;
        let _bound = device.bind()?;
        // SAFETY: the function is alive, and the number outlives the call.
        unsafe { device.driver().max_active_blocks(&mut blocks, self.function, threads as i32, smem_bytes as usize) }?;
        Ok(blocks as u32)
    }

    /// Clusters of this geometry that the device holds.
    pub fn max_active_clusters(&self, stream: &Stream, geometry: &Geometry) -> Result<u32> {
        let mut clusters = 0;
        let attributes = Attributes::of(geometry);
        let device = stream.device();
        let _bound = device.bind()?;
        // SAFETY: the function is alive; the number, the configuration and its attributes outlive the call.
        unsafe { device.driver().max_active_clusters(&mut clusters, self.function, &attributes.config(stream, geometry)) }?;
        Ok(clusters as u32)
    }

    /// Queues the kernel with one struct of parameters. A grid without blocks is nothing to do.
    ///
    /// # Errors
    /// [`Error::Gpu`] from the driver.
    ///
    /// # Safety
    /// The kernel is loaded on the stream's device, `P` is the struct that it takes, and whatever its addresses name stays valid until it has run.
    pub unsafe fn launch<P: Copy>(&self, stream: &Stream, geometry: &Geometry, parameters: &P) -> Result<()> {
        if geometry.grid.contains(&0) {
            return Ok(());
        }
        let attributes = Attributes::of(geometry);
        let config = attributes.config(stream, geometry);
        let parameters: [*const c_void; 1] = [std::ptr::from_ref(parameters).cast()];
        let device = stream.device();
        let _bound = device.bind()?;
        // SAFETY: function, stream, configuration, attributes and parameters are alive; the driver copies the parameters before it returns.
        unsafe { device.driver().launch(&config, self.function, parameters.as_ptr(), std::ptr::null()) }
    }
}

/// The attributes of a launch, which the configuration points to.
struct Attributes {
    list: [LaunchAttribute; 3],
    num: u32,
}

impl Attributes {
    fn of(geometry: &Geometry) -> Self {
        let none = LaunchAttribute { id: 0, pad: 0, value: [0; 16] };
        let mut attributes = Attributes { list: [none; 3], num: 0 };
        // Numbers of CUlaunchAttributeID (spec: cuda.h).
        if geometry.cooperative {
            attributes.push(2, &[1]);
        }
        if geometry.cluster > 1 {
            attributes.push(4, &[geometry.cluster, 1, 1]);
        }
        if geometry.programmatic {
            attributes.push(6, &[1]);
        }
        attributes
    }

    fn push(&mut self, id: u32, value: &[u32]) {
        let attribute = &mut self.list[self.num as usize];
        attribute.id = id;
        attribute.value[..value.len()].copy_from_slice(value);
        self.num += 1;
    }

    fn config(&self, stream: &Stream, geometry: &Geometry) -> LaunchConfig {
        LaunchConfig {
            grid: geometry.grid,
            block: [geometry.threads, 1, 1],
            smem_bytes: geometry.smem_bytes,
            stream: stream.raw(),
            attributes: self.list.as_ptr(),
            num_attributes: self.num,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_combine() {
        let of = |cooperative, cluster, programmatic| {
            let attributes = Attributes::of(&Geometry { cooperative, cluster, programmatic, ..Geometry::default() });
            attributes.list[..attributes.num as usize].iter().map(|a| (a.id, a.value[0])).collect::<Vec<_>>()
        };
        assert_eq!(of(false, 1, false), []);
        assert_eq!(of(true, 1, true), [(2, 1), (6, 1)]);
        assert_eq!(of(true, 8, true), [(2, 1), (4, 8), (6, 1)]);
    }
}
