//! Copies of rows that are not read again soon: streaming stores leave the caches to what is.

use super::Level;
#[cfg(target_arch = "x86_64")]
use super::level::Isa;

/// Bytes that one call writes above which streaming stores win: below, the reader finds the rows in the cache (derived: half of a 32 MiB
/// last-level cache, the smallest of current servers' CPUs).
pub(crate) const STREAM_BYTES: usize = 16 << 20;

/// How rows are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Store {
    /// Through the caches.
    Cached,
    /// Around them, where the instruction set can. [`finish`] must follow before anybody is told.
    Streaming,
}

impl Store {
    /// The better way for a call that writes `num_bytes`.
    pub fn for_bytes(num_bytes: usize) -> Self {
        if num_bytes >= STREAM_BYTES { Store::Streaming } else { Store::Cached }
    }
}

/// Copies `src` to `dst`, which has the same length.
#[inline]
pub(crate) fn copy(level: Level, store: Store, src: &[u8], dst: &mut [u8]) {
    assert_eq!(src.len(), dst.len(), "copy: length");
    match (store, level.0) {
        // SAFETY: a Level is only made after the features of its instruction set were detected.
        #[cfg(target_arch = "x86_64")]
        (Store::Streaming, Isa::Avx512) => unsafe { stream_avx512(src, dst) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (Store::Streaming, Isa::Avx2) => unsafe { stream_avx2(src, dst) },
        _ => dst.copy_from_slice(src),
    }
}

/// Orders streaming stores of this thread before its later ones. Without it a release does not cover them.
#[inline]
pub(crate) fn finish(store: Store) {
    #[cfg(target_arch = "x86_64")]
    if store == Store::Streaming {
        // SAFETY: SSE is part of every x86-64.
        unsafe { std::arch::x86_64::_mm_sfence() };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = store;
}

/// Asks for the cache lines of `num_bytes` bytes from `offset` on, if they are inside `row`. Changes speed only.
#[inline(always)]
pub(crate) fn prefetch(row: &[u8], offset: usize, num_bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (offset..(offset + num_bytes).min(row.len())).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch accesses nothing that the program sees; the address is inside the row besides.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (row, offset, num_bytes);
}

#[cfg(target_arch = "x86_64")]
macro_rules! stream {
    ($name:ident, $features:literal, $vector:ty, $load:ident, $store:ident) => {
        #[target_feature(enable = $features)]
        fn $name(src: &[u8], dst: &mut [u8]) {
            use std::arch::x86_64::*;
            const WIDTH: usize = size_of::<$vector>();
            let head = dst.as_ptr().align_offset(WIDTH).min(dst.len());
            let (src_head, src) = src.split_at(head);
            let (dst_head, dst) = dst.split_at_mut(head);
            dst_head.copy_from_slice(src_head);
            let body = src.len() / WIDTH * WIDTH;
            let (from, to) = (src.as_ptr(), dst.as_mut_ptr());
            let mut at = 0;
            while at < body {
                // SAFETY: at + WIDTH <= body <= the length of both; `to` is aligned to WIDTH after the head.
                unsafe { $store(to.add(at).cast(), $load(from.add(at).cast())) };
                at += WIDTH;
            }
            dst[body..].copy_from_slice(&src[body..]);
        }
    };
}
#[cfg(target_arch = "x86_64")]
stream!(stream_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512);
#[cfg(target_arch = "x86_64")]
stream!(stream_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_store_length_and_offset_copies() {
        let src: Vec<u8> = (0..400u32).map(|i| (i * 7 + 1) as u8).collect();
        for level in Level::available() {
            for store in [Store::Cached, Store::Streaming] {
                for len in [0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 256] {
                    for offset in [0, 1, 16, 32, 63] {
                        let mut dst = vec![0u8; 400];
                        copy(level, store, &src[3..3 + len], &mut dst[offset..offset + len]);
                        finish(store);
                        assert_eq!(dst[offset..offset + len], src[3..3 + len], "{level:?} {store:?} {len} {offset}");
                        assert!(dst[..offset].iter().chain(&dst[offset + len..]).all(|&b| b == 0));
                    }
                }
            }
        }
    }
}
