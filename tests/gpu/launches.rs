//! Launches with every attribute, and launches that fail.

use moe_kernels::gpu::{Buffer, Geometry, Stream};
use moe_kernels::{Error, Result};

use super::kernels::{Form, KERNELS, Nothing, Scale, Test as Kernel, Together, check_scale, painted, read, scale, scaled, words};
use super::{Needs, Outcome, Test, ensure, gpu, same};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("launches with every combination of attributes", Needs::Gpu, attributes),
    ("a chain of programmatic launches", Needs::Gpu, chain),
    ("grids", Needs::Gpu, grids),
    ("launches that fail", Needs::Gpu, failures),
    ("resources of kernels", Needs::Gpu, resources),
    ("a bad address ends the context, not the process", Needs::Gpu, bad_address),
];

fn launch_together(stream: &Stream, form: Form, num_blocks: u32, memory: &Buffer) -> Result<()> {
    let Form { smem_bytes, cluster, cooperative, programmatic } = form;
    let kernel = KERNELS.get("test", stream, Kernel::Together(form))?;
    let at = |word: u32| memory.address().address + 4 * u64::from(word);
    let parameters = Together { sums: at(0), turned: at(num_blocks), arrivals: at(2 * num_blocks) };
    let geometry = Geometry { grid: [num_blocks, 1, 1], threads: 256, smem_bytes, cluster, cooperative, programmatic };
    // SAFETY: the kernel is `together` on the stream's device, `Together` is its struct; the callers wait for the stream while the memory lives.
    unsafe { kernel.launch(stream, &geometry, &parameters) }
}

fn attributes() -> Outcome {
    let (device, stream) = gpu()?;
    let is_hopper = device.compute_capability() >= (9, 0);
    let mut num_forms = 0;
    // 2 KiB need no opt-in, 100 KiB and the most of a block do; clusters of 16 are beyond the portable size (spec: 8).
    let sizes = [2 << 10, 100 << 10, device.properties().max_smem_bytes & !3];
    for smem_bytes in sizes {
        for cluster in if is_hopper { &[1u32, 2, 8, 16][..] } else { &[1] } {
            for bits in 0..if is_hopper { 4 } else { 2 } {
                let form = Form { smem_bytes, cluster: *cluster, cooperative: bits & 1 != 0, programmatic: bits & 2 != 0 };
                check_together(&stream, form).map_err(|failed| format!("{form:?}: {}", failed.message().unwrap_or("failed")))?;
                num_forms += 1;
            }
        }
    }
    super::report(format!("{num_forms} combinations of attributes"));
    Ok(())
}

fn check_together(stream: &Stream, form: Form) -> Outcome {
    let kernel = KERNELS.get("test", stream, Kernel::Together(form))?;
    let mut num_blocks = 2 * form.cluster;
    let geometry =
        Geometry { grid: [num_blocks, 1, 1], threads: 256, smem_bytes: form.smem_bytes, cluster: form.cluster, ..Geometry::default() };
    if form.cluster > 1 {
        let num = kernel.max_active_clusters(stream, &geometry)?;
        ensure(num > 0, "no cluster of this geometry fits")?;
        num_blocks = num.min(2) * form.cluster;
    }
    let memory = words(stream, &vec![0; 2 * num_blocks as usize + 1])?;
    launch_together(stream, form, num_blocks, &memory)?;
    let num_words = form.smem_bytes / 4;
    // The sum of what a block wrote to its shared memory, as the kernel computes it.
    let block_sum = |block: u32| (0..num_words).fold(0u32, |sum, i| sum.wrapping_add(block.wrapping_mul(1_000_003).wrapping_add(i)));
    let neighbour = |block: u32| block / form.cluster * form.cluster + (block % form.cluster + 1) % form.cluster;
    let sums: Vec<u32> = (0..num_blocks).map(|block| block_sum(neighbour(block))).collect();
    let turned = (0..num_blocks).map(|block| if form.cooperative { sums[((block + 1) % num_blocks) as usize] } else { 0 });
    let arrivals = if form.cooperative { num_blocks } else { 0 };
    let want: Vec<u32> = sums.iter().copied().chain(turned).chain([arrivals]).collect();
    same("sums, turned sums, arrivals", read(stream, &memory)?, want)
}

fn chain() -> Outcome {
    let (device, stream) = gpu()?;
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    let input = painted(100_000, 4);
    let buffer = words(&stream, &input)?;
    let here = buffer.address().address;
    let programmatic = device.compute_capability() >= (9, 0);
    for addend in 0..50 {
        scale(&stream, kernel, Scale { from: here, to: here, num: 100_000, addend }, programmatic)?;
    }
    let want = (0..50).fold(input, |words, addend| scaled(&words, 3, addend));
    ensure(read(&stream, &buffer)? == want, "a link of the chain did not wait for the one before it")
}

fn grids() -> Outcome {
    let (_, stream) = gpu()?;
    let kernel = KERNELS.get("test", &stream, Kernel::Nothing)?;
    for grid in [[0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1], [3, 65535, 1], [2, 3, 5], [1 << 22, 1, 1]] {
        let geometry = Geometry { grid, threads: 32, ..Geometry::default() };
        // SAFETY: the kernel is `nothing` on this device, `Nothing` is its struct; it uses no memory.
        unsafe { kernel.launch(&stream, &geometry, &Nothing::default()) }.map_err(|error| format!("{grid:?}: {error}"))?;
        stream.synchronize()?;
    }
    Ok(())
}

fn failures() -> Outcome {
    let (device, stream) = gpu()?;
    let kernel = KERNELS.get("test", &stream, Kernel::Nothing)?;
    let plain = Geometry { threads: 256, ..Geometry::default() };
    let too_large = device.properties().max_smem_bytes + 1024;
    let mut cases = vec![
        ("threads", Geometry { threads: 1025, ..plain }),
        ("no threads", Geometry { threads: 0, ..plain }),
        ("shared memory without the opt-in", Geometry { smem_bytes: 100 << 10, ..plain }),
        ("more shared memory than there is", Geometry { smem_bytes: too_large, ..plain }),
        ("grid", Geometry { grid: [1, 65536, 1], ..plain }),
        ("a cooperative grid that does not fit", Geometry { grid: [1 << 20, 1, 1], cooperative: true, ..plain }),
    ];
    if device.compute_capability() >= (9, 0) {
        cases.push(("a cluster that does not divide the grid", Geometry { grid: [3, 1, 1], cluster: 2, ..plain }));
        cases.push(("a cluster that is too large", Geometry { grid: [64, 1, 1], cluster: 64, ..plain }));
    }
    for (case, geometry) in cases {
        // SAFETY: the kernel is `nothing` on this device, `Nothing` is its struct; it uses no memory.
        match unsafe { kernel.launch(&stream, &geometry, &Nothing::default()) } {
            Err(Error::Gpu { call: "cuLaunchKernelEx", code, name }) if code != 0 && name.starts_with("CUDA_ERROR") => {
                super::report(format!("{case}: {name} ({code})"));
            }
            other => return Err(format!("{case}: {other:?}").into()),
        }
        // Nothing sticks.
        check_scale(&stream, 100, 1).map_err(|failed| format!("after {case}: {}", failed.message().unwrap_or("failed")))?;
    }
    match KERNELS.get("test", &stream, Kernel::WrongEntry) {
        Err(Error::Gpu { call: "cuModuleGetFunction", name, .. }) => same("name", name.as_str(), "CUDA_ERROR_NOT_FOUND")?,
        other => return Err(format!("an entry that the program lacks: {other:?}").into()),
    }
    check_scale(&stream, 100, 2)
}

fn resources() -> Outcome {
    let (device, stream) = gpu()?;
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    let resources = kernel.resources(&device)?;
    let is_plausible = (4..=64).contains(&resources.registers) && resources.local_bytes == 0 && resources.max_threads == 1024;
    ensure(is_plausible, format!("{resources:?}"))?;
    let blocks = kernel.max_active_blocks(&device, 256, 0)?;
    same("blocks of 256 threads on an SM", blocks, device.properties().max_threads_per_sm / 256)?;
    let form = Form { smem_bytes: 100 << 10, cluster: 1, cooperative: false, programmatic: false };
    let large = KERNELS.get("test", &stream, Kernel::Together(form))?;
    let blocks = large.max_active_blocks(&device, 256, form.smem_bytes)?;
    same("blocks with 100 KiB on an SM", blocks, device.properties().smem_bytes_per_sm / (101 << 10))?;
    Ok(())
}

fn bad_address() -> Outcome {
    let lines = super::child::run_in_child("fault", &[])?;
    ensure(lines.contains("every call after it says so"), lines)
}
