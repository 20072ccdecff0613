//! Devices, buffers, pinned memory, and memory of others.

use moe_kernels::gpu::{Buffer, Device, Pinned};
use moe_kernels::tensor::Layout;
use moe_kernels::{DType, Error, Result};

use super::kernels::{KERNELS, Scale, Test as Kernel, check_scale, painted, read, scale, scaled, words};
use super::raw::{Raw, ok};
use super::{Needs, Outcome, Test, ensure, gpu, same};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("device and its properties", Needs::Gpu, properties),
    ("buffers", Needs::Gpu, buffers),
    ("ranges of buffers", Needs::Gpu, ranges),
    ("out of memory", Needs::Gpu, out_of_memory),
    ("pinned memory", Needs::Gpu, pinned),
    ("memory of others", Needs::Gpu, memory_of_others),
    ("addresses that are refused", Needs::Gpu, refused_addresses),
];

/// The call failed with `Invalid` that names `argument`, and its message has all of `parts`.
pub fn names<T: std::fmt::Debug>(case: &str, result: Result<T>, argument: &str, parts: &[&str]) -> Outcome {
    match &result {
        Err(error @ Error::Invalid { what, .. }) if what == argument => {
            let text = error.to_string();
            match parts.iter().find(|part| !text.contains(**part)) {
                Some(part) => Err(format!("{case}: `{text}` lacks `{part}`").into()),
                None => Ok(()),
            }
        }
        other => Err(format!("{case}: expected an error that names `{argument}`, got {other:?}").into()),
    }
}

fn properties() -> Outcome {
    let (device, _) = gpu()?;
    let properties = device.properties();
    let plausible = [
        ("name", properties.name.len() > 3 && properties.name.is_ascii()),
        // Spec: GPU-, then 8, 4, 4, 4 and 12 hexadecimal digits.
        ("uuid", properties.uuid.split('-').map(str::len).eq([3, 8, 4, 4, 4, 12])),
        ("pci_bus_id", properties.pci_bus_id.ends_with(".0") && properties.pci_bus_id.contains(':')),
        ("compute_capability", (5..20).contains(&properties.compute_capability.0) && properties.compute_capability.1 < 10),
        ("num_sms", (1..1000).contains(&properties.num_sms)),
        ("max_threads_per_block", properties.max_threads_per_block == 1024),
        ("max_threads_per_sm", [1024, 1536, 2048].contains(&properties.max_threads_per_sm)),
        ("registers_per_sm", properties.registers_per_sm == 65536),
        ("max_smem_bytes", (48 << 10..1 << 20).contains(&properties.max_smem_bytes)),
        ("smem_bytes_per_sm", (properties.max_smem_bytes..1 << 20).contains(&properties.smem_bytes_per_sm)),
        ("l2_bytes", (1 << 18..1 << 30).contains(&properties.l2_bytes)),
        ("memory_bytes", properties.memory_bytes > 1 << 30),
        ("warp_size", properties.warp_size == 32),
        ("cooperative_launch", properties.cooperative_launch),
    ];
    if let Some((name, _)) = plausible.iter().find(|(_, is_plausible)| !is_plausible) {
        return Err(format!("{name} is not plausible: {properties:?}").into());
    }
    let (free, total) = device.memory()?;
    ensure(free <= total && total <= properties.memory_bytes, format!("{free} free of {total}, {properties:?}"))?;
    ensure(Device::open(0)? == device, "the device was opened twice")?;
    let num = Device::count()?;
    names("an ordinal that no GPU has", Device::open(num), "ordinal", &[&num.to_string(), "number of GPUs"])?;
    names("the last ordinal", Device::open(u32::MAX), "ordinal", &["number of GPUs"])
}

fn buffers() -> Outcome {
    let (device, stream) = gpu()?;
    for len in [1usize, 255, 4096, (1 << 20) + 3] {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
        let buffer = Buffer::from_bytes(&stream, &bytes)?;
        same("len", buffer.len(), len)?;
        ensure(buffer.address().address % 256 == 0 && buffer.address().device == 0, "an allocation is aligned")?;
        let mut back = vec![0u8; len];
        buffer.download(&stream, 0, &mut back)?;
        ensure(back == bytes, format!("{len} bytes did not come back"))?;
        // A part: filled, copied to another buffer, at odd places.
        let (at, part) = (len / 3, len - len / 3 - len / 5);
        buffer.fill(&stream, at, part, 0x5A)?;
        let other = Buffer::from_bytes(&stream, &bytes)?;
        other.copy_from(&stream, 0, &buffer, at, part)?;
        other.upload(&stream, len - 1, &[9])?;
        let mut want = bytes.clone();
        want[..part].fill(0x5A);
        want[len - 1] = 9;
        other.download(&stream, 0, &mut back)?;
        ensure(back == want, format!("{len} bytes: a fill or a copy went elsewhere"))?;
        let mut tail = vec![0u8; part];
        buffer.download(&stream, at, &mut tail)?;
        ensure(tail.iter().all(|byte| *byte == 0x5A), "a part did not come back")?;
    }
    let empty = Buffer::new(&device, 0)?;
    ensure(empty.is_empty(), "nothing was asked for")?;
    empty.upload(&stream, 0, &[])?;
    empty.download(&stream, 0, &mut [])?;
    empty.fill(&stream, 0, 0, 1)?;
    empty.copy_from(&stream, 0, &empty, 0, 0)?;
    stream.synchronize()?;
    Ok(())
}

fn ranges() -> Outcome {
    let (device, stream) = gpu()?;
    let (mut buffer, large) = (Buffer::new(&device, 100)?, Buffer::new(&device, 1000)?);
    buffer.fill(&stream, 0, 100, 1)?;
    for (at, len) in [(0, 101), (100, 1), (101, 0), (50, 51), (usize::MAX, 1), (1, usize::MAX), (usize::MAX, usize::MAX)] {
        let case = format!("{len} bytes from {at}");
        if len < 1000 {
            names(&case, buffer.upload(&stream, at, &vec![0; len]), "range", &[&len.to_string(), "100"])?;
            names(&case, buffer.download(&stream, at, &mut vec![0; len]), "range", &[])?;
        }
        names(&case, buffer.fill(&stream, at, len, 0), "range", &[])?;
        names(&case, buffer.copy_from(&stream, at, &large, 0, len), "range", &[])?;
        names(&case, large.copy_from(&stream, 0, &buffer, at, len), "range", &[])?;
    }
    let layout = |shape: &[usize]| Layout::contiguous("test", DType::F32, shape);
    names("a view that is too large", buffer.view(0, layout(&[26])?), "range", &["104", "100"])?;
    names("a view that begins too late", buffer.view_mut(4, layout(&[25])?), "range", &["100"])?;
    names("a view at an odd byte", buffer.view(3, layout(&[5])?), "address", &["multiple of 4"])?;
    let view = buffer.view(4, layout(&[4, 6])?)?;
    same("the address of a view", view.device().map(|address| address.address), Some(buffer.address().address + 4))?;
    // None of them wrote.
    let mut bytes = vec![0; 100];
    buffer.download(&stream, 0, &mut bytes)?;
    ensure(bytes == [1; 100], "a refused call wrote")
}

fn out_of_memory() -> Outcome {
    let (device, stream) = gpu()?;
    let total = device.properties().memory_bytes;
    for bytes in [2 * total, 1 << 48, usize::MAX as u64] {
        match Buffer::new(&device, bytes as usize) {
            Err(Error::Memory { need_bytes, have_bytes, what, .. }) => {
                ensure(need_bytes == bytes && have_bytes <= total && have_bytes > 0, format!("{what}: {need_bytes}, {have_bytes}"))?;
                ensure(what.contains("device 0"), what)?;
            }
            other => return Err(format!("{bytes} bytes: {other:?}").into()),
        }
    }
    check_scale(&stream, 1000, 5)
}

fn pinned() -> Outcome {
    let (device, stream) = gpu()?;
    names("no bytes", Pinned::new(&device, 0), "len", &["at least 1"])?;
    let mut memory = Pinned::new(&device, 4000)?;
    ensure(memory.bytes() == [0; 4000], "it starts as zeros")?;
    let input = painted(1000, 3);
    memory.bytes_mut().copy_from_slice(bytemuck::cast_slice(&input));
    // A kernel reads it where it is, and writes it.
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    let here = memory.device_address()?;
    scale(&stream, kernel, Scale { from: here, to: here, num: 1000, addend: 8 }, false)?;
    stream.synchronize()?;
    ensure(memory.bytes() == bytemuck::cast_slice::<u32, u8>(&scaled(&input, 3, 8)), "a kernel did not reach pinned memory")?;
    // Copies go to it and from it.
    let buffer = Buffer::from_bytes(&stream, memory.bytes())?;
    memory.bytes_mut().fill(0);
    buffer.download(&stream, 0, memory.bytes_mut())?;
    ensure(memory.bytes() == bytemuck::cast_slice::<u32, u8>(&scaled(&input, 3, 8)), "a copy did not reach pinned memory")
}

/// A kernel reads and writes 1000 words at an address that another library allocated, and the address is adopted.
fn use_foreign(what: &str, address: u64) -> Outcome {
    let (device, stream) = gpu()?;
    for at in [0, 4, 400] {
        let adopted = device.adopt("test", "x", address + at).map_err(|error| format!("{what}, byte {at}: {error}"))?;
        same(what, (adopted.device, adopted.address), (0, address + at))?;
    }
    let input = painted(1000, 77);
    let from = words(&stream, &input)?;
    let kernel = KERNELS.get("test", &stream, Kernel::Scale { factor: 3 })?;
    let there = address + 400;
    scale(&stream, kernel, Scale { from: from.address().address, to: there, num: 1000, addend: 1 }, false)?;
    scale(&stream, kernel, Scale { from: there, to: from.address().address, num: 1000, addend: 2 }, false)?;
    ensure(read(&stream, &from)? == scaled(&scaled(&input, 3, 1), 3, 2), format!("{what}: wrong words"))
}

fn memory_of_others() -> Outcome {
    const BYTES: usize = 4 << 20;
    let (device, _) = gpu()?;
    let raw = Raw::open()?;
    let context = raw.primary(&device)?;
    let (mut plain, mut pooled, mut managed) = (0, 0, 0);
    let null = std::ptr::null_mut();
    raw.with_context(context, || {
        // SAFETY: the address outlives the call; the primary context is current.
        ok("cuMemAlloc", unsafe { (raw.allocate)(&mut plain, BYTES) })?;
        // SAFETY: as above; the null stream is that context's.
        ok("cuMemAllocAsync", unsafe { (raw.allocate_async)(&mut pooled, BYTES, null) })?;
        // SAFETY: as above; 1 is CU_MEM_ATTACH_GLOBAL.
        ok("cuMemAllocManaged", unsafe { (raw.allocate_managed)(&mut managed, BYTES, 1) })?;
        // SAFETY: the null stream is that of the current context.
        ok("cuStreamSynchronize", unsafe { (raw.stream_synchronize)(null) })
    })?;
    // No context is current on this thread now, and none of the addresses is a `Buffer`.
    use_foreign("cuMemAlloc", plain)?;
    use_foreign("cuMemAllocAsync", pooled)?;
    use_foreign("the middle of an allocation", plain + BYTES as u64 / 2 + 12)?;
    let middle = device.adopt("test", "x", managed);
    super::report(format!("managed memory is {}", if middle.is_ok() { "accepted" } else { "refused" }));
    // With another context of the device current, too.
    let mut number = 0;
    // SAFETY: the number outlives the call.
    ok("cuDeviceGet", unsafe { (raw.device_get)(&mut number, 0) })?;
    let mut other = null;
    // SAFETY: the handle outlives the call.
    ok("cuCtxCreate", unsafe { (raw.context_create)(&mut other, 0, number) })?;
    let result = use_foreign("with another context current", plain);
    same("the context that is current", raw.current()?, other)?;
    // SAFETY: the context was made above, and nothing uses it.
    ok("cuCtxDestroy", unsafe { (raw.context_destroy)(other) })?;
    result?;
    raw.with_context(context, || {
        // SAFETY: allocated above, and no kernel uses it any more.
        ok("cuMemFree", unsafe { (raw.free)(plain) })?;
        // SAFETY: as above.
        ok("cuMemFree", unsafe { (raw.free)(managed) })?;
        // SAFETY: as above.
        ok("cuMemFreeAsync", unsafe { (raw.free_async)(pooled, null) })
    })
}

fn refused_addresses() -> Outcome {
    let (device, _) = gpu()?;
    let (host, on_stack, pinned) = (vec![0u8; 1 << 20], 0u64, Pinned::new(&device, 4096)?);
    let cases = [
        ("host memory", host.as_ptr().addr() as u64 + 4096, "host memory"),
        ("the stack", (&raw const on_stack).addr() as u64, "host memory"),
        ("code", (refused_addresses as *const ()).addr() as u64, "host memory"),
        ("pinned memory", pinned.device_address()?, "pinned host memory"),
        ("pinned memory, by its pointer", pinned.bytes().as_ptr().addr() as u64 + 100, "pinned host memory"),
        ("null", 0, "no memory"),
        ("a small number", 0x1000, "no memory"),
        ("the last address", u64::MAX, "no memory"),
        ("no canonical address", 1 << 62, "no memory"),
    ];
    for (case, address, part) in cases {
        names(case, device.adopt("gate", "the weights", address), "the weights", &["gate", &format!("{address:#x}"), part, "device 0"])?;
    }
    let gone = {
        let buffer = Buffer::new(&device, 64 << 20)?;
        buffer.address().address
    };
    names("memory that was freed", device.adopt("gate", "x", gone), "x", &["no memory"])?;
    if Device::count()? > 1 {
        let second = Device::open(1)?;
        let there = Buffer::new(&second, 4096)?;
        names(
            "memory of another device",
            device.adopt("gate", "x", there.address().address),
            "x",
            &["memory of device 1", "memory of device 0"],
        )?;
        second.adopt("gate", "x", there.address().address)?;
    }
    Ok(())
}
