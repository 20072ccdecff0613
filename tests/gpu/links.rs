//! What the links between GPUs can do, as far as it can be known in advance.

use moe_kernels::gpu::Device;
use moe_kernels::measure::link::{Way, link_ceiling};

use super::memory::names;
use super::{Needs, Outcome, Test, ensure, gpu, report, same};

pub const TRIALS: &[(&str, Needs, Test)] =
    &[("ceilings of links", Needs::TwoGpusAlone, ceilings), ("links that there are not", Needs::Gpu, no_links)];

fn ceilings() -> Outcome {
    let devices = [Device::open(0)?, Device::open(1)?];
    names("no vector for the other GPU", link_ceiling(&devices, 15), "bytes", &["15", "16 or more"])?;
    // From one vector on, and no whole number of them.
    for bytes in [16, (1 << 20) + 5, 64 << 20] {
        let links = link_ceiling(&devices, bytes)?;
        same("GPUs and bytes", (links.num_gpus, links.bytes), (2, bytes / 16 * 16))?;
        same("beyond the cache", links.is_beyond_cache, bytes > 1 << 20 || links.is_beyond_cache)?;
        let ways = [("a kernel writes", &links.write), ("a kernel reads", &links.read), ("copy engine", &links.copy_engine)];
        for (i, (name, Way { alone, together })) in ways.into_iter().enumerate() {
            let [one, all] = [alone, together].map(|transfer| transfer.bytes_per_second / 1e9);
            report(format!("{bytes:9} bytes: {name}: {one:.1} GB/s alone, {all:.1} with all directions busy"));
            ensure(one > 0.0 && one.is_finite() && all > 0.0, format!("{one} and {all} GB/s"))?;
            for transfer in [alone, together] {
                same("a grid", transfer.num_blocks.is_some_and(|num| num > 0), i < 2)?;
                ensure(transfer.seconds.min > 0.0 && transfer.seconds.median <= transfer.seconds.max, "times")?;
            }
            // Both directions do not help each other; small copies are too short for a firm word.
            if bytes >= 64 << 20 {
                ensure(all <= 1.1 * one, format!("{name}: {all} GB/s of all is more than {one} alone"))?;
            }
        }
        let trip = links.round_trip;
        report(format!("{bytes:9} bytes: round trip {:.2} us ({:.2} to {:.2})", trip.median * 1e6, trip.min * 1e6, trip.max * 1e6));
        // No light is that fast, and nothing that polls is that slow.
        ensure(trip.min > 1e-7 && trip.median < 1e-3, format!("{} s", trip.median))?;
    }
    Ok(())
}

fn no_links() -> Outcome {
    let (device, _) = gpu()?;
    names("one GPU", link_ceiling(std::slice::from_ref(&device), 1 << 20), "devices", &["[0]", "2 to 8"])?;
    names("a GPU and itself", link_ceiling(&[device.clone(), device], 1 << 20), "devices", &["[0, 0]", "different"])
}
