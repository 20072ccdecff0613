//! Moving a tile's bytes: transposition, stores that pass the caches by, prefetch, and output memory that many threads share.

use std::marker::PhantomData;

use crate::cpu::Level;
#[cfg(target_arch = "x86_64")]
use crate::cpu::level::Isa;

/// Rows of a tile: a scale block of 128 rows lies in one tile, and a transposed fp8 line of it is two cache lines (derived).
pub(super) const TILE_ROWS: usize = 128;
/// Columns of a tile: long enough for the hardware's prefetch along a row, short enough that a tile of fp8 stays in the L2 (measured on Zen 4:
/// 512 is 15 % slower, 2048 no faster).
pub(super) const TILE_COLUMNS: usize = 1024;
/// Columns that are transposed at once (derived: four levels of unpack instructions exchange 16 rows with 16 columns of bytes).
pub(super) const LINES: usize = 16;
/// Bytes added to a row of a tile's buffer, so that rows of one column do not share a set of the L1 (derived: one cache line).
const ROW_GAP: usize = 64;

/// Bytes of a cache line (spec: x86-64).
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Bytes from one row to the next in a tile's buffer of elements of `size` bytes.
pub(super) const fn tile_stride(size: usize) -> usize {
    TILE_COLUMNS * size + ROW_GAP
}

/// Output bytes that several threads write, each its own part.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    start: *mut u8,
    len: usize,
    borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: a Shared is an exclusive borrow of plain bytes; `slice`'s contract keeps the parts of different threads apart.
unsafe impl Send for Shared<'_> {}
// SAFETY: as above.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(super) fn new(bytes: &'a mut [u8]) -> Self {
        Shared { start: bytes.as_mut_ptr(), len: bytes.len(), borrow: PhantomData }
    }

    /// `len` bytes from `at` on.
    ///
    /// # Safety
    /// While the result lives, no other result of this function on a copy of `self` overlaps it.
    ///
    /// # Panics
    /// When they are not inside: the operation's validator excludes it.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn slice(&self, at: usize, len: usize) -> &mut [u8] {
        assert!(at <= self.len && len <= self.len - at, "output of {} bytes: {len} at {at}", self.len);
        // SAFETY: inside the borrow of `new` (checked above), and alone by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}

/// Copies `src` to `dst`, of the same length; with `stream`, the whole cache lines of `dst` go past the caches, and [`finish`](crate::cpu::copy::finish) must follow.
#[inline]
pub(super) fn store(level: Level, dst: &mut [u8], src: &[u8], stream: bool) {
    assert_eq!(dst.len(), src.len(), "store: bytes");
    #[cfg(target_arch = "x86_64")]
    if stream && matches!(level.0, Isa::Avx512 | Isa::Avx2) {
        let head = dst.as_ptr().align_offset(LINE).min(dst.len());
        let body = (dst.len() - head) / LINE * LINE;
        dst[..head].copy_from_slice(&src[..head]);
        dst[head + body..].copy_from_slice(&src[head + body..]);
        let (dst, src) = (&mut dst[head..][..body], &src[head..][..body]);
        // SAFETY: the level proves the instructions; the slices are of the same whole number of lines, `dst` is aligned to one or empty.
        return unsafe {
            match level.0 {
                Isa::Avx512 => x86::stream_avx512(dst, src),
                _ => x86::stream_avx2(dst, src),
            }
        };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (level, stream);
    dst.copy_from_slice(src);
}

/// Writes columns `column..column + LINES` of a tile's buffer to `out`, each as a line of the first `rows` rows. Lines that are not wanted are
/// empty. With `stream` as [`store`].
///
/// # Panics
/// If the columns are not inside the buffer or a line is neither empty nor of `rows` elements.
pub(super) fn transpose(level: Level, size: usize, tile: &[u8], column: usize, rows: usize, out: &mut [&mut [u8]; LINES], stream: bool) {
    assert!(column + LINES <= TILE_COLUMNS && rows <= TILE_ROWS, "transpose: column {column}, {rows} rows");
    assert!(tile.len() >= TILE_ROWS * tile_stride(size), "transpose: bytes of the tile");
    assert!(out.iter().all(|line| line.is_empty() || line.len() == rows * size), "transpose: bytes of the lines");
    #[cfg(target_arch = "x86_64")]
    if size == 1 && matches!(level.0, Isa::Avx512 | Isa::Avx2) {
        let are_whole = out.iter().all(|line| line.len() == rows && line.as_ptr().addr().is_multiple_of(LINE)) && rows.is_multiple_of(LINE);
        if stream && are_whole {
            // Straight from registers: bursts of stores that pass the caches would stall the arithmetic (measured: a third slower).
            let lines = out.each_mut().map(|line| line.as_mut_ptr());
            // SAFETY: the level proves the instructions; the tile has all its rows (asserted), each line `rows` aligned bytes.
            return unsafe { x86::transpose(level, &tile[column..], rows, &lines, true) };
        }
        let mut lines = Lines([[0; TILE_ROWS]; LINES]);
        let pointers = lines.0.each_mut().map(|line| line.as_mut_ptr());
        // SAFETY: as above; each line has TILE_ROWS bytes, which is `rows` rounded up to a multiple of 64 or more.
        unsafe { x86::transpose(level, &tile[column..], rows, &pointers, false) };
        for (out, line) in out.iter_mut().zip(&lines.0) {
            store(level, out, &line[..out.len()], stream);
        }
        return;
    }
    match size {
        1 => transpose_elements::<1>(level, tile, column, rows, out, stream),
        2 => transpose_elements::<2>(level, tile, column, rows, out, stream),
        _ => transpose_elements::<4>(level, tile, column, rows, out, stream),
    }
}

/// Transposed bytes on their way to unaligned lines.
#[cfg(target_arch = "x86_64")]
#[repr(align(64))]
struct Lines([[u8; TILE_ROWS]; LINES]);

fn transpose_elements<const SIZE: usize>(
    level: Level,
    tile: &[u8],
    column: usize,
    rows: usize,
    out: &mut [&mut [u8]; LINES],
    stream: bool,
) {
    let mut lines = [[[0; SIZE]; TILE_ROWS]; LINES];
    for (r, row) in tile.chunks(tile_stride(SIZE)).take(rows).enumerate() {
        let elements = &row.as_chunks::<SIZE>().0[column..][..LINES];
        for (line, element) in lines.iter_mut().zip(elements) {
            line[r] = *element;
        }
    }
    for (out, line) in out.iter_mut().zip(&lines) {
        store(level, out, &line.as_flattened()[..out.len()], stream);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Isa, LINES, Level, TILE_ROWS, tile_stride};
    /// # Safety
    /// AVX-512; `dst` is aligned to 64 bytes, both slices have the same length, a multiple of 64.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn stream_avx512(dst: &mut [u8], src: &[u8]) {
        for (d, s) in dst.chunks_exact_mut(64).zip(src.chunks_exact(64)) {
            // SAFETY: both chunks have 64 bytes and `d` is aligned to 64 (this function's contract).
            unsafe { _mm512_stream_si512(d.as_mut_ptr().cast(), _mm512_loadu_si512(s.as_ptr().cast())) }
        }
    }

    /// # Safety
    /// AVX2; as [`stream_avx512`].
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stream_avx2(dst: &mut [u8], src: &[u8]) {
        for (d, s) in dst.chunks_exact_mut(32).zip(src.chunks_exact(32)) {
            // SAFETY: both chunks have 32 bytes and `d` is aligned to 32 (this function's contract).
            unsafe { _mm256_stream_si256(d.as_mut_ptr().cast(), _mm256_loadu_si256(s.as_ptr().cast())) }
        }
    }

    /// Transposes 16 x 16 bytes inside each 128-bit lane of 16 registers, by four rounds of unpack: each pairs register i with i + 8, so that
    /// one bit of the row number moves into the byte number.
    ///
    /// Written out, because the optimiser leaves a loop over the rounds rolled and the registers in memory (measured: four times slower).
    macro_rules! ladder {
        ($registers:expr, $lo:ident, $hi:ident) => {{
            let a = ladder!(round $registers, $lo, $hi, 0 1 2 3 4 5 6 7);
            let a = ladder!(round a, $lo, $hi, 0 1 2 3 4 5 6 7);
            let a = ladder!(round a, $lo, $hi, 0 1 2 3 4 5 6 7);
            ladder!(round a, $lo, $hi, 0 1 2 3 4 5 6 7)
        }};
        (round $a:expr, $lo:ident, $hi:ident, $($i:literal)*) => {
            [$($lo($a[$i], $a[$i + 8]), $hi($a[$i], $a[$i + 8])),*]
        };
    }

    /// Writes LINES columns of `tile` as lines of `rows` bytes, rounded up to a multiple of 64.
    ///
    /// # Safety
    /// `level` is AVX-512 or AVX2; `tile` holds LINES bytes of each of TILE_ROWS rows; each of `lines` may be written for `rows` bytes, rounded up to a
    /// multiple of 64 and at most TILE_ROWS, and with `stream` is aligned to 64.
    pub(super) unsafe fn transpose(level: Level, tile: &[u8], rows: usize, lines: &[*mut u8; LINES], stream: bool) {
        debug_assert!(rows <= TILE_ROWS && tile.len() >= (TILE_ROWS - 1) * tile_stride(1) + LINES);
        // SAFETY: this function's contract.
        unsafe {
            match level.0 {
                Isa::Avx512 => transpose_avx512(tile, rows, lines, stream),
                _ => transpose_avx2(tile, rows, lines, stream),
            }
        }
    }

    /// LINES bytes of row `row`.
    ///
    /// # Safety
    /// They are in `tile`.
    #[target_feature(enable = "sse2")]
    #[inline]
    unsafe fn load(tile: &[u8], row: usize) -> __m128i {
        // SAFETY: this function's contract.
        unsafe { _mm_loadu_si128(tile.as_ptr().add(row * tile_stride(1)).cast()) }
    }

    /// Rows r, r + 16, r + 32, r + 48 share a register, so that the ladder leaves 64 bytes of one column in each.
    ///
    /// # Safety
    /// As [`transpose`].
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn transpose_avx512(tile: &[u8], rows: usize, lines: &[*mut u8; LINES], stream: bool) {
        for first in (0..rows).step_by(64) {
            let mut registers = [_mm512_setzero_si512(); LINES];
            for (i, register) in registers.iter_mut().enumerate() {
                let row = first + i;
                // SAFETY: row + 48 < TILE_ROWS, which is a multiple of 64.
                *register = unsafe {
                    let r = _mm512_castsi128_si512(load(tile, row));
                    let r = _mm512_inserti32x4::<1>(r, load(tile, row + 16));
                    let r = _mm512_inserti32x4::<2>(r, load(tile, row + 32));
                    _mm512_inserti32x4::<3>(r, load(tile, row + 48))
                };
            }
            let registers = ladder!(registers, _mm512_unpacklo_epi8, _mm512_unpackhi_epi8);
            for (&line, &register) in lines.iter().zip(&registers) {
                // SAFETY: the contract of `transpose`: 64 bytes from `first` on are in the line, and aligned if streamed.
                unsafe {
                    let line = line.add(first).cast();
                    if stream { _mm512_stream_si512(line, register) } else { _mm512_storeu_si512(line, register) }
                }
            }
        }
    }

    /// Rows r and r + 16 share a register. Both halves of a cache line are stored one after the other, or each would be written alone.
    ///
    /// # Safety
    /// As [`transpose`].
    #[target_feature(enable = "avx2")]
    unsafe fn transpose_avx2(tile: &[u8], rows: usize, lines: &[*mut u8; LINES], stream: bool) {
        for first in (0..rows).step_by(64) {
            let half = |first: usize| {
                let mut registers = [_mm256_setzero_si256(); LINES];
                for (i, register) in registers.iter_mut().enumerate() {
                    // SAFETY: first + i + 16 < TILE_ROWS, which is a multiple of 32.
                    let (low, high) = unsafe { (load(tile, first + i), load(tile, first + i + 16)) };
                    *register = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high);
                }
                ladder!(registers, _mm256_unpacklo_epi8, _mm256_unpackhi_epi8)
            };
            let (upper, lower) = (half(first), half(first + 32));
            for (&line, (&upper, &lower)) in lines.iter().zip(upper.iter().zip(&lower)) {
                // SAFETY: the contract of `transpose`: 64 bytes from `first` on are in the line, and aligned if streamed.
                unsafe {
                    let line: *mut __m256i = line.add(first).cast();
                    if stream {
                        _mm256_stream_si256(line, upper);
                        _mm256_stream_si256(line.add(1), lower);
                    } else {
                        _mm256_storeu_si256(line, upper);
                        _mm256_storeu_si256(line.add(1), lower);
                    }
                }
            }
        }
    }
}

/// What becomes of a row besides going into the tile's buffer.
pub(super) struct Beside<'a> {
    /// The row of the row copy, or nothing.
    pub(super) row: &'a mut [u8],
    /// Whether that is stored past the caches.
    pub(super) stream: bool,
    /// The row of the input that will be read a tile later, or nothing.
    pub(super) next: &'a [u8],
}

#[cfg(target_arch = "x86_64")]
impl Beside<'_> {
    /// Whether the row can be stored past the caches one vector at a time.
    pub(super) fn is_aligned_stream(&self) -> bool {
        self.stream && self.row.as_ptr().addr().is_multiple_of(LINE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::guarded::Guarded;
    use crate::cpu::copy::{Store, finish};

    #[test]
    fn every_element_moves_to_its_place_at_every_level() {
        for size in [1, 2, 4] {
            let stride = tile_stride(size);
            let tile: Vec<u8> = (0..TILE_ROWS * stride).map(|i| (i * 31 + i / 251) as u8).collect(); // arbitrary, no short period
            for (level, stream, offset) in Level::available().into_iter().flat_map(|l| [(l, false, 0), (l, true, 0), (l, true, 3)]) {
                for (column, rows, num_lines) in
                    [(0, TILE_ROWS, LINES), (TILE_COLUMNS - LINES, 1, 5), (48, 33, 16), (16, 64, 16), (32, 0, 16)]
                {
                    let mut lines: Vec<Guarded> =
                        (0..LINES).map(|i| Guarded::at_offset(if i < num_lines { rows * size } else { 0 }, offset)).collect();
                    let mut out = lines.iter_mut();
                    let mut out = std::array::from_fn(|_| out.next().expect("LINES of them").bytes_mut());
                    transpose(level, size, &tile, column, rows, &mut out, stream);
                    finish(Store::Streaming);
                    for (i, line) in lines.iter().enumerate() {
                        line.check("line").unwrap();
                        for (r, got) in line.bytes().chunks(size).enumerate() {
                            let want = &tile[r * stride + (column + i) * size..][..size];
                            assert_eq!(got, want, "{level:?}, size {size}, column {column}, line {i}, row {r}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn stores_copy_at_every_level_length_and_offset() {
        let src: Vec<u8> = (0..512).map(|i| (i * 7) as u8).collect();
        for level in Level::available() {
            for (offset, len) in [(0, 64), (0, 512), (0, 63), (1, 64), (32, 128), (5, 0)] {
                let mut out = Guarded::at_offset(len, offset);
                store(level, out.bytes_mut(), &src[..len], true);
                finish(Store::Streaming);
                out.check("store").unwrap();
                assert_eq!(out.bytes(), &src[..len], "{level:?} {offset} {len}");
            }
        }
    }
}
