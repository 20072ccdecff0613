//! The header of a safetensors file on arbitrary bytes: it never panics, and what it accepts covers the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moe_kernels::layer::checkpoint::tensors::Header;

fuzz_target!(|data: &[u8]| {
    let Ok(header) = Header::parse(data, "fuzz".as_ref()) else { return };
    let ranges = header.ranges();
    assert!(ranges.windows(2).all(|pair| pair[0].1.end == pair[1].1.start));
    assert!(ranges.iter().all(|(_, range)| range.start <= range.end && range.end <= data.len()));
    assert_eq!(ranges.last().map_or(data.len(), |(_, range)| range.end), data.len());
});
