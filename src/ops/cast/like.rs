//! Matrices of a list that are like the one before: known to be good in a few instructions each.
#![forbid(unsafe_code)]

use super::check::Memory;
use super::{Operands, Options, Scaling};
use crate::tensor::{Kind, Layout, TensorView, TensorViewMut};

/// What most matrices of a list are like: a checked one, of which others differ in addresses and in the number of rows alone. Those are known to be good
/// with some comparisons each, where [`one_of_list`](super::check::one_of_list) takes hundreds of instructions; every other one is for that to decide.
pub(super) struct Like<'m> {
    matrix: &'m Operands<'m>,
    /// Of its tensors.
    kinds: Kinds,
    pad_rows: usize,
    has_block_scales: bool,
    may_overlap: bool,
}

struct Kinds {
    x: Kind,
    scale: Kind,
    row: Kind,
    column: Kind,
    row_scales: Kind,
    column_scales: Kind,
    amax: Kind,
    scale_inv: Kind,
}

impl<'m> Like<'m> {
    /// Like a matrix of a list that was checked. `None` when one of its tensors lies elsewhere, as one without elements may.
    pub(super) fn of(memory: &impl Memory, matrix: &'m Operands<'m>, options: &Options<'_>) -> Option<Self> {
        let kind = |view: &Option<TensorViewMut<'_>>| view.as_ref().map_or(Kind::ABSENT, TensorViewMut::kind);
        let kinds = Kinds {
            x: matrix.x.kind(),
            scale: matrix.scale.as_ref().map_or(Kind::ABSENT, TensorView::kind),
            row: kind(&matrix.row),
            column: kind(&matrix.column),
            row_scales: kind(&matrix.row_scales),
            column_scales: kind(&matrix.column_scales),
            amax: kind(&matrix.amax),
            scale_inv: kind(&matrix.scale_inv),
        };
        let Kinds { x, scale, row, column, row_scales, column_scales, amax, scale_inv } = kinds;
        let is_here = |kind: Kind| kind == Kind::ABSENT || kind.device() == memory.device();
        let are_here = [x, scale, row, column, row_scales, column_scales, amax, scale_inv].into_iter().all(is_here);
        let has_block_scales = matches!(options.scaling, Scaling::Block { .. });
        are_here.then_some(Like { matrix, kinds, pad_rows: options.pad_rows, has_block_scales, may_overlap: memory.may_overlap() })
    }

    /// Whether `o` is such a matrix, and good: `true` only if `one_of_list` finds nothing wrong. What that asks of types, devices and presence holds when the
    /// kinds are equal. Bits that differ are gathered, and looked at once.
    #[inline(always)]
    pub(super) fn is_good(&self, o: &Operands<'_>) -> bool {
        let kinds = &self.kinds;
        let [rows, columns, _] = o.x.layout().first_dims();
        // Multiples of a power of two; a sum that wraps is for the whole check.
        let padded = rows.wrapping_add(self.pad_rows - 1) & !(self.pad_rows - 1);
        let of_scale = match &o.scale {
            Some(scale) => scale.kind().differs(kinds.scale) | differ(scale.layout().first_dims()[0], 1),
            None => Kind::ABSENT.differs(kinds.scale),
        };
        let (of_row, row) = copy_differs(&o.row, kinds.row, [padded, columns]);
        let (of_column, column) = copy_differs(&o.column, kinds.column, [columns, padded]);
        let differs = o.x.kind().differs(kinds.x)
            | u64::from(padded < rows)
            | of_scale
            | of_row
            | of_column
            | one_differs(&o.amax, kinds.amax)
            | one_differs(&o.scale_inv, kinds.scale_inv)
            | kind_differs(&o.row_scales, kinds.row_scales)
            | kind_differs(&o.column_scales, kinds.column_scales)
            | u64::from(o.status.is_some());
        let x = extent(o.x.address(), o.x.layout());
        let overlaps = self.may_overlap & (overlap(row, x) | overlap(column, x) | overlap(column, row));
        ((differs == 0) & !overlaps) && (!self.has_block_scales || self.has_equal_scales(o))
    }

    /// Whether the extents are the same, and the layouts of the scales of blocks, which follow from them.
    fn has_equal_scales(&self, o: &Operands<'_>) -> bool {
        let layout = |view: &Option<TensorViewMut<'_>>| view.as_ref().map(|view| *view.layout());
        let [scales, of_like] = [o, self.matrix].map(|o| [layout(&o.row_scales), layout(&o.column_scales)]);
        o.x.shape() == self.matrix.x.shape() && scales == of_like
    }
}

#[inline(always)]
fn differ(a: usize, b: usize) -> u64 {
    (a ^ b) as u64
}

#[inline(always)]
fn kind_differs(view: &Option<TensorViewMut<'_>>, kind: Kind) -> u64 {
    view.as_ref().map_or(Kind::ABSENT, TensorViewMut::kind).differs(kind)
}

/// Not 0 unless it is of this kind and has one element, or is absent as its kind is.
#[inline(always)]
fn one_differs(view: &Option<TensorViewMut<'_>>, kind: Kind) -> u64 {
    match view {
        Some(view) => view.kind().differs(kind) | differ(view.layout().first_dims()[0], 1),
        None => Kind::ABSENT.differs(kind),
    }
}

/// Not 0 unless it is of this kind and shape and its rows are apart, or is absent as its kind is; and where it lies.
#[inline(always)]
fn copy_differs(view: &Option<TensorViewMut<'_>>, kind: Kind, shape: [usize; 2]) -> (u64, Range) {
    match view {
        Some(view) => {
            let [rows, columns, stride] = view.layout().first_dims();
            let differs = differ(rows, shape[0]) | differ(columns, shape[1]) | u64::from((rows > 1) & (stride < columns));
            (view.kind().differs(kind) | differs, extent(view.address(), view.layout()))
        }
        None => (Kind::ABSENT.differs(kind), (0, 0)),
    }
}

/// First address and the one behind the last.
pub(super) type Range = (u64, u64);

#[inline(always)]
fn extent(address: u64, layout: &Layout) -> Range {
    (address, address.wrapping_add(layout.extent_bytes() as u64))
}

/// As [`extent`]; both 0 without bytes.
pub(super) fn range(address: u64, layout: &Layout) -> Range {
    if layout.extent_bytes() > 0 { extent(address, layout) } else { (0, 0) }
}

/// Whether they share bytes; also when one that is empty begins inside of the other, which is for the whole check.
#[inline(always)]
fn overlap(a: Range, b: Range) -> bool {
    (a.0 < b.1) & (b.0 < a.1)
}

/// Which of the large tensors of a matrix shares bytes with which.
pub(super) fn overlapping(x: Range, row: Range, column: Range) -> Option<(&'static str, &'static str)> {
    if overlap(row, x) {
        return Some(("row", "x"));
    }
    let with = if overlap(column, x) { "x" } else { "row" };
    (overlap(column, x) || overlap(column, row)).then_some(("column", with))
}

#[cfg(test)]
mod tests {
    use super::super::check::{list, one_of_list};
    use super::super::{Block, cast};
    use super::*;
    use crate::error::Error;
    use crate::random::SplitMix64;
    use crate::{Backend, Cpu, DType};

    fn host(dtype: DType, shape: &[usize], strides: &[usize]) -> TensorViewMut<'static> {
        let layout = Layout::strided("test", dtype, shape, strides).unwrap();
        let words: &'static mut [f32] = vec![0f32; layout.extent_bytes() / size_of::<f32>() + 1].leak();
        TensorViewMut::new(bytemuck::cast_slice_mut(words), layout).unwrap()
    }

    fn contiguous(dtype: DType, shape: &[usize]) -> TensorViewMut<'static> {
        let layout = Layout::contiguous("test", dtype, shape).unwrap();
        host(dtype, shape, layout.strides())
    }

    fn read(view: TensorViewMut<'static>) -> TensorView<'static> {
        let bytes: &'static TensorViewMut<'static> = Box::leak(Box::new(view));
        bytes.as_view()
    }

    /// A good matrix.
    fn matrix(rows: usize, columns: usize, options: &Options<'_>) -> Operands<'static> {
        let padded = rows.next_multiple_of(options.pad_rows);
        let o = Operands::new(read(contiguous(DType::BF16, &[rows, columns])))
            .row(contiguous(DType::E4M3, &[padded, columns]))
            .column(contiguous(DType::E4M3, &[columns, padded]))
            .amax(contiguous(DType::F32, &[1]));
        match options.scaling {
            Scaling::Given => o.scale(read(contiguous(DType::F32, &[1]))).scale_inv(contiguous(DType::F32, &[1])),
            _ => {
                let lines = [padded.next_multiple_of(4), columns.next_multiple_of(4)];
                let [of_row, of_column] = [columns.div_ceil(128), padded.div_ceil(128)];
                o.row_scales(host(DType::F32, &[of_row, padded], &[lines[0], 1])).column_scales(host(
                    DType::F32,
                    &[of_column, columns],
                    &[lines[1], 1],
                ))
            }
        }
    }

    /// Changes one thing, which is wrong or not.
    fn change(o: &mut Operands<'static>, random: &mut SplitMix64) {
        let (rows, columns) = (o.x.shape()[0], o.x.shape()[1]);
        let padded = o.row.as_ref().map_or(rows, |row| row.shape()[0]);
        let near = |extent: usize, random: &mut SplitMix64| (extent + random.below(3) as usize).saturating_sub(1);
        let other = |dtype: DType, random: &mut SplitMix64| [dtype, DType::F32, DType::E5M2, DType::F16][random.below(4) as usize];
        match random.below(14) {
            0 => o.x = read(contiguous(DType::BF16, &[near(rows, random), near(columns, random)])),
            1 => o.x = read(contiguous(other(DType::BF16, random), &[rows, columns])),
            2 => o.x = read(contiguous(DType::BF16, &[rows * columns])),
            3 => o.row = Some(contiguous(DType::E4M3, &[near(padded, random), near(columns, random)])),
            4 => o.row = Some(contiguous(other(DType::E4M3, random), &[padded, columns])),
            5 => o.row = Some(host(DType::E4M3, &[padded, columns], &[near(columns, random), 1])),
            6 => o.column = Some(host(DType::E4M3, &[columns, padded], &[near(padded, random), 1])),
            7 => o.column = Some(contiguous(DType::E4M3, &[near(columns, random), near(padded, random)])),
            8 => o.column = [None, Some(contiguous(DType::E4M3, &[columns, padded, 1]))][random.below(2) as usize].take(),
            9 => o.amax = [None, Some(contiguous(other(DType::F32, random), &[near(1, random)]))][random.below(2) as usize].take(),
            10 => o.scale_inv = [None, Some(contiguous(DType::F32, &[near(1, random)]))][random.below(2) as usize].take(),
            11 => o.scale = [None, Some(read(contiguous(DType::F32, &[near(1, random)])))][random.below(2) as usize],
            12 => o.row_scales = Some(host(DType::F32, &[near(columns.div_ceil(128), random), padded], &[padded.next_multiple_of(4), 1])),
            _ => o.status = [None, Some(contiguous(DType::U32, &[1]))][random.below(2) as usize].take(),
        }
    }

    #[test]
    fn matrices_like_the_one_before_are_checked_as_all_are() {
        let mut random = SplitMix64::new(3);
        let mut counts = [0; 3];
        for round in 0..4000 {
            let scaling = if round % 2 == 0 { Scaling::Given } else { Scaling::deep_gemm(Block::Row128) };
            let options = Options { pad_rows: [1, 16][round / 2 % 2], ..Options::with_scaling(scaling) };
            let columns = 1 + random.below(6) as usize;
            let first = matrix(random.below(20) as usize, columns, &options);
            // Of as many rows, or of others.
            let rows = if random.below(2) == 0 { first.x.shape()[0] } else { random.below(20) as usize };
            let mut second = matrix(rows, columns, &options);
            if random.below(4) > 0 {
                change(&mut second, &mut random);
            }
            let memory = Cpu::default();
            let want = one_of_list(&memory, 1, &second, &first, &options);
            let is_good = Like::of(&memory, &first, &options).expect("in host memory").is_good(&second);
            let mut num_seen = 0;
            let got = list(&memory, &[first, second], &options, |_| num_seen += 1);
            let text = |error: Option<Error>| error.map(|error| error.to_string());
            assert_eq!(text(got.err()), text(want.as_ref().err().cloned()), "round {round}");
            assert!(!is_good || want.is_ok(), "round {round}: {want:?}");
            assert_eq!(num_seen, if want.is_ok() { 2 } else { 1 });
            counts[if is_good { 0 } else { 1 + usize::from(want.is_ok()) }] += 1;
        }
        // Known at once, wrong, and good by the whole check.
        assert!(counts.iter().all(|count| *count > 100), "{counts:?}");
    }

    #[test]
    fn an_empty_list_has_options_that_are_checked() {
        let options = Options { pad_rows: 3, ..Options::default() };
        assert!(cast(&Backend::cpu(), &mut [], &options).is_err());
    }

    #[test]
    fn ranges_overlap_when_they_share_a_byte() {
        let apart = [(10, 20), (20, 30), (0, 10)];
        assert_eq!(overlapping(apart[0], apart[1], apart[2]), None);
        assert_eq!(overlapping((10, 20), (0, 0), (0, 0)), None);
        assert_eq!(overlapping((10, 20), (19, 30), (0, 11)), Some(("row", "x")));
        assert_eq!(overlapping((10, 20), (20, 30), (0, 11)), Some(("column", "x")));
        assert_eq!(overlapping((10, 20), (20, 30), (29, 31)), Some(("column", "row")));
    }
}
