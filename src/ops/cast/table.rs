//! A list in the memory of a GPU: its matrices and their parts, uploaded once.

use super::check::Known;
use bytemuck::{Pod, Zeroable};

use super::gpu::{
    BlockMatrix, Call, Entry, KERNELS, MAX_BLOCKS, MAX_STEPS, Matrix, Packing, Parameters, ParametersOfAll, Step, geometry_of,
    too_many_parts,
};
use super::tuning::{self, Tile};
use super::variant::Form;
use super::{OP, Operands, Options, Scaling};
use crate::backend::Cuda;
use crate::error::{Error, Result};
use crate::gpu::{Buffer, Geometry, Kernel};
use crate::tensor::DType;

/// A checked list, ready to be cast.
#[derive(Debug)]
pub(super) struct Table {
    /// The matrices, then the parts.
    memory: Buffer,
    parameters: Parameters<Places>,
    launches: [Option<(Kernel, Geometry)>; MAX_STEPS],
}

/// `ParametersOf<true>` of locate.cuh, behind what all have.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Places {
    matrices: u64,
    parts: u64,
}

impl Table {
    /// Packs and uploads a checked list of at least one matrix, and loads its kernels; waits for the upload.
    ///
    /// # Errors
    /// [`Error::Unsupported`] while the stream is captured, [`Error::Memory`], those of the compiler and of the driver.
    pub(super) fn new(cuda: &Cuda, known: &Known, matrices: &[Operands<'_>], options: &Options<'_>) -> Result<Self> {
        if cuda.stream().is_capturing()? {
            return Err(Error::Unsupported {
                op: OP,
                what: "making a list while the stream is captured".into(),
                why: "its table is uploaded at once; make the list before the capture".into(),
            });
        }
        if matches!(known.scaling, Scaling::Block { .. }) {
            Self::of::<BlockMatrix>(cuda, known, matrices, options)
        } else {
            Self::of::<Matrix>(cuda, known, matrices, options)
        }
    }

    fn of<E: Entry>(cuda: &Cuda, known: &Known, matrices: &[Operands<'_>], options: &Options<'_>) -> Result<Self> {
        let mut entries = vec![E::default(); matrices.len()];
        let mut packing = Packing::new(&matrices[0]);
        matrices.iter().zip(&mut entries).for_each(|(o, entry)| packing.add(o, entry));
        packing.finish(known, matrices, 0)?;
        let (call, packed) = Call::of_list(cuda, known, &matrices[0], Form::Table, &packing).cut(cuda, &mut entries)?;
        let mut all = ParametersOfAll::new(known, options);
        all.in_order(cuda, known, packed.num_elements);
        all.num_matrices = u32::try_from(matrices.len())
            .map_err(|_| Error::invalid(OP, "matrices", format!("{} of them", matrices.len()), "fewer than 2^32"))?;
        let mut words: Vec<u8> = bytemuck::cast_slice(&entries).to_vec();
        // Parts at a boundary of 16 bytes.
        words.resize(words.len().next_multiple_of(16), 0);
        let parts_at = words.len();
        let has_block_scales = matches!(known.scaling, Scaling::Block { .. });
        let shape = PartShape {
            tile: call.tile,
            cut_rows: tuning::cut_rows(call.tile, has_block_scales),
            to: known.to,
            tail: tuning::tail(call.tile, cuda.device().properties().num_sms, packed.num_parts.into(), tuning::TABLE_TAIL),
        };
        all.num_parts = push_parts(&mut words, &mut entries, known.pad_rows, &shape)?;
        all.num_blocks = call.blocks(cuda, all.num_parts);
        let memory = Buffer::from_bytes(cuda.stream(), &words)?;
        let address = memory.address().address;
        let parameters = Parameters { all, matrices: Places { matrices: address, parts: address + parts_at as u64 } };
        let mut launches = [None; MAX_STEPS];
        for (launch, Step { variant, geometry }) in launches.iter_mut().zip(call.steps(&all)) {
            *launch = Some((KERNELS.load(cuda.device(), variant)?.0, geometry));
        }
        Ok(Table { memory, parameters, launches })
    }

    /// Queues the cast. Allocates nothing, and can be captured.
    pub(super) fn cast(&self, cuda: &Cuda) -> Result<()> {
        if cuda.device() != self.memory.device() {
            return Err(Error::invalid(
                OP,
                "backend",
                format!("{:?}", cuda.device()),
                format!("{:?}, as of the list", self.memory.device()),
            ));
        }
        for (i, (kernel, geometry)) in self.launches.iter().flatten().enumerate() {
            let geometry = geometry_of(cuda, i, *geometry);
            // SAFETY: the kernel was loaded for this device and takes this struct; table and tensors stay valid while the list lives, whose owner drops it
            // when the work has run, and the validator has checked that the views lie on the device and cover what the extents say.
            unsafe { kernel.launch(cuda.stream(), &geometry, &self.parameters) }?;
        }
        Ok(())
    }
}

/// `Entry` of locate.cuh behind its matrix.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct Place {
    number: u32,
    first_row: u32,
    num_rows: u32,
    first_column: u32,
    stack: u32,
    padding: u32,
}

const _: () = assert!((size_of::<Matrix>() + size_of::<Place>()).is_multiple_of(16), "as in locate.cuh");
const _: () = assert!((size_of::<BlockMatrix>() + size_of::<Place>()).is_multiple_of(16), "as in locate.cuh");

/// Appends the parts of all matrices in the order of their blocks; returns how many.
fn push_parts<E: Entry>(words: &mut Vec<u8>, entries: &mut [E], pad_rows: usize, shape: &PartShape) -> Result<u32> {
    let columns = u32::from(shape.tile.columns);
    let extents = |matrix: &Matrix| (matrix.num_rows.next_multiple_of(pad_rows as u32), matrix.num_columns.div_ceil(columns));
    // Rows of strips from the part on to the end: the last parts are lower, so that blocks end together.
    let mut left = entries.iter_mut().fold(0u64, |sum, entry| {
        let (height, num_strips) = extents(entry.matrix());
        sum + u64::from(height) * u64::from(num_strips)
    });
    let mut num_parts = 0;
    for (i, entry) in entries.iter_mut().enumerate() {
        let (height, num_strips) = extents(entry.matrix());
        let mut strip = 0;
        while strip < num_strips {
            let stack = shape.stack_of(height, left);
            for (first, rows) in shape.parts(height, left) {
                let place = Place { number: i as u32, first_row: first, num_rows: rows, first_column: strip * columns, stack, padding: 0 };
                let bytes = size_of::<E>() + size_of::<Place>();
                words.try_reserve(bytes).map_err(|_| Error::Memory {
                    what: "the parts of a list".into(),
                    need_bytes: (words.len() + bytes) as u64,
                    have_bytes: words.len() as u64,
                    change: "make lists of fewer matrices".into(),
                })?;
                words.extend_from_slice(bytemuck::bytes_of(entry));
                words.extend_from_slice(bytemuck::bytes_of(&place));
                num_parts += 1;
                if num_parts > MAX_BLOCKS {
                    return Err(too_many_parts());
                }
            }
            let num = stack.min(num_strips - strip);
            left -= u64::from(height) * u64::from(num);
            strip += num;
        }
    }
    Ok(num_parts as u32)
}

/// How strips are cut into parts.
struct PartShape {
    tile: Tile,
    /// Parts end at multiples of so many rows.
    cut_rows: u32,
    /// Rows of strips at the end that are cut into lower parts.
    tail: u64,
    to: DType,
}

impl PartShape {
    /// Strips that a part takes, behind whose start `left` rows of strips follow with its own.
    fn stack_of(&self, height: u32, left: u64) -> u32 {
        let rows = if left <= self.tail { self.tile.tail_rows() } else { self.tile.part_rows() };
        self.tile.stack_of(height, rows, self.to)
    }

    /// First row and rows of the parts of a strip, behind whose start `left` rows of strips follow with its own.
    fn parts(&self, height: u32, left: u64) -> impl Iterator<Item = (u32, u32)> {
        let whole = cut(0, height, self.tile.part_rows() as u32, self.cut_rows);
        whole.flat_map(move |(first, rows)| {
            let is_tail = left - u64::from(first) <= self.tail;
            cut(first, rows, if is_tail { self.tile.tail_rows() as u32 } else { rows }, self.cut_rows)
        })
    }
}

/// Cuts `rows` rows from `first` on into as few pieces of at most `most` rows as can be, as even as can be: `cut` of locate.cuh.
fn cut(first: u32, rows: u32, most: u32, cut_rows: u32) -> impl Iterator<Item = (u32, u32)> {
    let num = rows.div_ceil(most.max(1));
    let units = rows.div_ceil(cut_rows);
    (0..num).map(move |k| {
        let (least, larger) = (units / num, units % num);
        let at = |k: u32| ((k * least + k.min(larger)) * cut_rows).min(rows);
        (first + at(k), at(k + 1) - at(k))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strips_that_a_part_takes_fit_into_it() {
        let high = Tile { rows: 96, columns: 256, down: 3, stack: 3, tail: 1, blocks: 2 };
        let low = Tile { rows: 64, down: 4, ..high };
        // A third of the lower tile's rows, and of its last parts', are no whole vectors.
        let cases = [(high, 1001, 288, 144, 96), (high, 1000, 96, 48, 32), (low, 1001, 256, 128, 80), (low, 1000, 64, 32, 16)];
        for (tile, left, part_rows, two, three) in cases {
            let shape = PartShape { tile, cut_rows: 32, tail: 1000, to: DType::E4M3 };
            for height in 1..=300u32 {
                let stack = shape.stack_of(height, left);
                let wanted = match height {
                    _ if height <= three => 3,
                    _ if height <= two => 2,
                    _ => 1,
                };
                assert_eq!(stack, wanted, "{height} rows, {left} left");
                // Columns of whole vectors, and all of them in one part.
                assert!(stack == 1 || stack * height.next_multiple_of(16) <= part_rows, "{height} rows, {left} left");
                assert!(stack == 1 || shape.parts(height, left).eq([(0, height)]), "{height} rows, {left} left");
            }
        }
    }

    #[test]
    fn parts_cover_a_strip_once_and_the_last_are_low() {
        let tile = Tile { rows: 96, columns: 256, down: 3, stack: 3, tail: 1, blocks: 2 };
        for tail in [0, 100, 1000, u64::MAX] {
            let shape = PartShape { tile, cut_rows: 32, tail, to: DType::E4M3 };
            for height in [0, 1, 31, 32, 33, 96, 97, 288, 289, 300, 576, 1031, 4096] {
                for behind in [0, 50, 100_000] {
                    let left = u64::from(height) + behind;
                    let parts: Vec<_> = shape.parts(height, left).collect();
                    let mut next = 0;
                    for &(first, rows) in &parts {
                        assert_eq!(first, next);
                        assert!(rows > 0 && rows <= 288 && first % 32 == 0, "{height}: {rows} rows from {first}");
                        // The whole part that it belongs to begins at most 288 rows before it.
                        if left - u64::from(first) + 288 <= tail {
                            assert!(rows <= 96, "{height}: {rows} rows from {first}, {left} left, of the last {tail}");
                        }
                        next = first + rows;
                    }
                    assert_eq!(next, height);
                    if tail == 0 {
                        assert_eq!(parts.len(), height.div_ceil(288) as usize, "{height}: as few as can be");
                    }
                }
            }
        }
    }
}
