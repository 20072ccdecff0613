//! Allocations that a thread has looked up, so that a hot call need not ask the driver about each address again.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::tensor::DeviceAddress;

/// An allocation.
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    bytes: u64,
    /// Ordinal of its device.
    device: u32,
    /// Frees before it was looked up.
    num_freed: u64,
}

/// Places of the table (arbitrary: the tensors of a model's layers; 8 KiB a thread).
const PLACES: usize = 256;
/// An allocation of this many bytes has a place for each such part of the address space, a smaller one for each small part. Derived: the driver maps
/// memory in pages of 2 MiB, and no two allocations begin within 256 bytes.
const LARGE_BYTES_LOG2: u32 = 21;
const SMALL_BYTES_LOG2: u32 = 8;

thread_local! {
    static KNOWN: [Cell<Range>; PLACES] = const { [const { Cell::new(Range { start: 0, bytes: 0, device: 0, num_freed: 0 }) }; PLACES] };
}

/// Buffers that were freed: what was known of them, and of all others, is forgotten.
static NUM_FREED: AtomicU64 = AtomicU64::new(0);

fn place(address: u64, part_log2: u32) -> usize {
    // Multiplicative hashing: the golden ratio's bits spread neighbours over the table; its top 8 bits choose among 256 places.
    const { assert!(PLACES == 1 << 8) };
    ((address >> part_log2).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize
}

/// Whether an allocation of the device that this thread has looked up contains the address.
pub(super) fn contains(DeviceAddress { device, address }: DeviceAddress) -> bool {
    let num_freed = num_freed();
    KNOWN.with(|known| {
        [LARGE_BYTES_LOG2, SMALL_BYTES_LOG2].into_iter().any(|part_log2| {
            let range = known[place(address, part_log2)].get();
            address.wrapping_sub(range.start) < range.bytes && range.device == device && range.num_freed == num_freed
        })
    })
}

/// To be asked before an address is looked up, for [`add`].
pub(super) fn num_freed() -> u64 {
    NUM_FREED.load(Ordering::Relaxed)
}

/// An address was looked up, after so many frees: it lies in this allocation.
pub(super) fn add(DeviceAddress { device, address }: DeviceAddress, start: u64, bytes: u64, num_freed: u64) {
    let part_log2 = if bytes >> LARGE_BYTES_LOG2 > 0 { LARGE_BYTES_LOG2 } else { SMALL_BYTES_LOG2 };
    KNOWN.with(|known| known[place(address, part_log2)].set(Range { start, bytes, device, num_freed }));
}

/// Memory was freed: nothing is known any more, on any thread.
pub(super) fn forget() {
    NUM_FREED.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_looked_up_is_known_until_something_is_freed() {
        let at = |device, address| DeviceAddress { device, address };
        let (small, large) = (0x7f00_0000_0200, 0x7f10_0000_0000);
        // Other tests of this process may free buffers at any time: a round without one is enough.
        let round = || {
            assert!(!contains(at(0, small + 5 + (1 << 30))));
            let before = num_freed();
            add(at(0, small + 5), small, 1000, before);
            add(at(0, large + 77), large, 64 << 20, before);
            let found =
                [contains(at(0, small + 5)), contains(at(0, small)), contains(at(0, large)), contains(at(0, large + (1 << 21) - 1))];
            let others =
                [contains(at(1, small + 5)), contains(at(0, small - 1)), contains(at(0, small + 1000)), contains(at(0, large - 1))];
            assert_eq!(others, [false; 4]);
            found == [true; 4]
        };
        assert!((0..100).any(|_| round()));
        forget();
        assert!(!contains(at(0, small + 5)) && !contains(at(0, large)));
        // Freed between the look and the note of it.
        let before = num_freed();
        forget();
        add(at(0, large), large, 64 << 20, before);
        assert!(!contains(at(0, large)));
        // Another thread has not looked.
        add(at(0, large), large, 64 << 20, num_freed());
        std::thread::spawn(move || assert!(!contains(at(0, large)))).join().unwrap();
    }
}
