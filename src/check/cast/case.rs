//! One call of cast with guarded outputs, against the oracle.

use crate::backend::Backend;
use crate::check::Failed;
use crate::check::guarded::{Guarded, POISON};
use crate::ensure;
use crate::ops::cast::{List, Operands, Options, ScaleLayout, Scaling, cast, cast_grouped, status};
use crate::oracle::cast::{self as oracle, Cast, Cell, Grid};
use crate::oracle::{compare, float};
use crate::random::SplitMix64;
use crate::tensor::{DType, Layout, TensorView, TensorViewMut};

/// One call.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) from: DType,
    pub(super) to: DType,
    /// Rows and columns of each matrix.
    pub(super) shapes: Vec<[usize; 2]>,
    pub(super) is_grouped: bool,
    /// Also as a [`List`] that is made once.
    pub(super) is_prepared: bool,
    pub(super) row: bool,
    pub(super) column: bool,
    pub(super) scaling: Scaling,
    pub(super) pad_rows: usize,
    pub(super) reset_amax: bool,
    /// Whether amax is asked for, and scales and their inverses where the scaling has them.
    pub(super) extras: bool,
    /// Element type of block scales.
    pub(super) scale_dtype: DType,
    /// Elements between a buffer's start and an aligned address; also between the rows of strided views.
    pub(super) gap: usize,
    /// Value of the noop flag.
    pub(super) noop: Option<u32>,
    pub(super) seed: u64,
}

impl Case {
    /// A list or a group of matrices, both copies, nothing special.
    pub(super) fn new(from: DType, to: DType, shapes: Vec<[usize; 2]>, scaling: Scaling) -> Self {
        Case {
            from,
            to,
            shapes,
            is_grouped: false,
            is_prepared: false,
            row: true,
            column: true,
            scaling,
            pad_rows: 1,
            reset_amax: false,
            extras: true,
            scale_dtype: DType::F32,
            gap: 0,
            noop: None,
            seed: 1,
        }
    }

    /// Runs on every variant of the backend; returns 1, the number of cases.
    pub(super) fn run(&self, variants: &[(String, Backend)]) -> Result<usize, Failed> {
        let mut tensors = self.tensors()?;
        for (name, backend) in variants {
            for is_prepared in [false, true].into_iter().filter(|is_prepared| self.is_prepared || !is_prepared) {
                let what = if is_prepared { "made once: " } else { "" };
                let result = self.run_on(backend, &mut tensors, is_prepared);
                result.map_err(|failed| Failed(format!("{name}: {what}{}: {self:?}", failed.0)))?;
            }
        }
        Ok(1)
    }

    fn run_on(&self, backend: &Backend, tensors: &mut [Tensors], is_prepared: bool) -> Result<(), Failed> {
        tensors.iter_mut().for_each(Tensors::reset);
        let noop = self.noop.map(|flag| Held::new(DType::U32, &flag.to_le_bytes())).transpose()?;
        let noop = noop.as_ref().map(|flag| flag.view(backend)).transpose()?;
        let options = Options { noop, ..self.options() };
        if self.is_grouped {
            // Both offset types, by turns.
            let offsets = self.offsets();
            let held = if self.seed.is_multiple_of(2) {
                Held::new(DType::I32, &offsets.iter().flat_map(|&o| (o as i32).to_le_bytes()).collect::<Vec<_>>())?
            } else {
                Held::new(DType::I64, &offsets.iter().flat_map(|&o| o.to_le_bytes()).collect::<Vec<_>>())?
            };
            cast_grouped(backend, &mut tensors[0].operands(backend)?, held.view(backend)?, &options)?;
        } else {
            let mut operands = tensors.iter_mut().map(|t| t.operands(backend)).collect::<Result<Vec<_>, _>>()?;
            if is_prepared {
                List::new(backend, operands, options)?.cast(backend)?;
            } else {
                cast(backend, &mut operands, &options)?;
            }
        }
        for t in tensors.iter_mut() {
            t.buffers().try_for_each(|b| b.guarded.fetch(backend))?;
        }
        tensors.iter().try_for_each(Tensors::check)
    }

    fn options(&self) -> Options<'static> {
        Options { scaling: self.scaling, pad_rows: self.pad_rows, reset_amax: self.reset_amax, noop: None }
    }

    fn offsets(&self) -> Vec<i64> {
        let ends = self.shapes.iter().scan(0, |sum, [rows, _]| {
            *sum += *rows as i64;
            Some(*sum)
        });
        std::iter::once(0).chain(ends).collect()
    }

    /// Inputs, outputs, and what the oracle wants of them: one set for each matrix, or one for a group.
    fn tensors(&self) -> Result<Vec<Tensors>, Failed> {
        let inputs: Vec<Vec<u8>> = self
            .shapes
            .iter()
            .enumerate()
            .map(|(i, [rows, columns])| values(self.from, rows * columns, self.seed.wrapping_mul(1009).wrapping_add(i as u64)))
            .collect();
        let scales: Vec<f32> = (0..self.shapes.len()).map(|i| [1.0, 0.37, -3.0, 1e4, 2e-6][(i + self.seed as usize) % 5]).collect();
        let has_scale = self.extras && self.scaling == Scaling::Given;
        let casts: Vec<Cast> = inputs
            .iter()
            .zip(&self.shapes)
            .zip(&scales)
            .map(|((bytes, &shape), &scale)| {
                let x = float::values(self.from, bytes);
                oracle::cast(&x, shape, self.from, self.to, if has_scale { scale } else { 1.0 }, &self.options())
            })
            .collect();
        let mut all = if self.is_grouped {
            vec![self.group(&inputs, &casts)?]
        } else {
            let each = inputs.iter().zip(&self.shapes).zip(&casts);
            each.map(|((bytes, &shape), cast)| self.matrix(bytes, shape, cast)).collect::<Result<Vec<_>, _>>()?
        };
        let per_tensors = self.shapes.len() / all.len().max(1);
        for (i, (t, (scales, casts))) in
            all.iter_mut().zip(scales.chunks(per_tensors.max(1)).zip(casts.chunks(per_tensors.max(1)))).enumerate()
        {
            t.scale =
                has_scale.then(|| Held::new(DType::F32, &scales.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<_>>())).transpose()?;
            if self.extras {
                t.amax = Some(self.amax(casts, i)?);
            }
            if self.extras && !matches!(self.scaling, Scaling::Block { .. }) {
                let mut scale_inv = Buffer::new("scale_inv", DType::F32, &[casts.len()], 1, 0)?;
                casts.iter().enumerate().for_each(|(i, cast)| scale_inv.want(4 * i, &cast.scale_inv.to_le_bytes()));
                t.scale_inv = Some(scale_inv);
            }
            if self.extras && self.is_grouped {
                let mut word = Buffer::new("status", DType::U32, &[1], 1, 0)?;
                word.want(0, &status::GOOD.to_le_bytes());
                t.status = Some(word);
            }
            if self.noop.is_some_and(|flag| flag != 0) {
                t.buffers().for_each(Buffer::want_nothing);
            }
        }
        Ok(all)
    }

    fn amax(&self, casts: &[Cast], first: usize) -> Result<Buffer, Failed> {
        let mut amax = Buffer::new("amax", DType::F32, &[casts.len()], 1, 0)?;
        for (i, cast) in casts.iter().enumerate() {
            // What is stored before: nothing, more than most, a negative value, a little.
            let before = [0.0, 1e30, -1.0, 0.25f32][(first + i) % 4];
            amax.initial[4 * i..][..4].copy_from_slice(&before.to_le_bytes());
            amax.want(4 * i, &oracle::raised(before, cast.amax, self.reset_amax).to_le_bytes());
        }
        Ok(amax)
    }

    fn matrix(&self, bytes: &[u8], [rows, columns]: [usize; 2], cast: &Cast) -> Result<Tensors, Failed> {
        let mut t = Tensors::new(self.from, bytes, [rows, columns], rows, self.gap)?;
        if self.row {
            t.row = Some(Buffer::rows("row", self.to, [cast.padded, columns], self.gap)?);
            let row = t.row.as_mut().expect("just made");
            row.want_rows(0, columns, &cast.row);
        }
        if self.column {
            t.column = Some(Buffer::rows("column", self.to, [columns, cast.padded], self.gap)?);
            t.column.as_mut().expect("just made").want_rows(0, cast.padded, &cast.column);
        }
        if let Scaling::Block { layout, block, .. } = self.scaling {
            let make = |name, grid: &Grid, lines: usize| -> Result<Buffer, Failed> {
                let cells = grid.cells(layout, block);
                let shape = list_scale_shape(self.scaling, lines, if name == "row_scales" { columns } else { cast.padded });
                let mut buffer = Buffer::scales(name, self.scale_dtype, shape, layout, self.gap)?;
                cells.iter().for_each(|cell| buffer.want_cell(cell.i * buffer.stride + cell.j, cell));
                Ok(buffer)
            };
            t.row_scales = self.row.then(|| make("row_scales", &cast.row_scales, cast.padded)).transpose()?;
            t.column_scales = self.column.then(|| make("column_scales", &cast.column_scales, columns)).transpose()?;
        }
        Ok(t)
    }

    /// One buffer for all matrices, a little longer than needed.
    fn group(&self, inputs: &[Vec<u8>], casts: &[Cast]) -> Result<Tensors, Failed> {
        let columns = self.shapes[0][1];
        let rows: usize = self.shapes.iter().map(|[rows, _]| rows).sum();
        let spare = self.seed as usize % 3;
        let mut t = Tensors::new(self.from, &inputs.concat(), [rows, columns], rows + spare, self.gap)?;
        let padded: usize = casts.iter().map(|cast| cast.padded).sum();
        if self.row {
            let mut row = Buffer::rows("row", self.to, [padded + spare, columns], self.gap)?;
            let mut first = 0;
            for cast in casts {
                row.want_rows(first, columns, &cast.row);
                first += cast.padded;
            }
            t.row = Some(row);
        }
        if self.column {
            let mut column = Buffer::new("column", self.to, &[(padded + spare) * columns], 1, self.gap)?;
            column.want(0, &casts.iter().flat_map(|cast| cast.column.clone()).collect::<Vec<_>>());
            t.column = Some(column);
        }
        if self.row {
            t.row_scales = self.group_row_scales(casts, padded, columns, spare)?;
        }
        if self.column {
            t.column_scales = self.group_column_scales(casts, columns, spare)?;
        }
        Ok(t)
    }

    fn group_row_scales(&self, casts: &[Cast], padded: usize, columns: usize, spare: usize) -> Result<Option<Buffer>, Failed> {
        let Scaling::Block { layout, block, .. } = self.scaling else { return Ok(None) };
        // Lines of blocks (packed: lines) of the matrices follow each other.
        let lines_of = |cast: &Cast| if layout == ScaleLayout::PackedE8m0 { cast.row_scales.lines } else { cast.row_scales.line_blocks };
        let mut shape = list_scale_shape(self.scaling, padded, columns);
        let total: usize = casts.iter().map(lines_of).sum();
        let lines_at = usize::from(layout != ScaleLayout::RowMajor);
        shape[lines_at] = total + spare;
        let mut buffer = Buffer::scales("row_scales", self.scale_dtype, shape, layout, self.gap)?;
        let mut first = 0;
        for cast in casts {
            for cell in cast.row_scales.cells(layout, block) {
                let (i, j) = if lines_at == 0 { (cell.i + first, cell.j) } else { (cell.i, cell.j + first) };
                buffer.want_cell(i * buffer.stride + j, &cell);
            }
            first += lines_of(cast);
        }
        Ok(Some(buffer))
    }

    fn group_column_scales(&self, casts: &[Cast], columns: usize, spare: usize) -> Result<Option<Buffer>, Failed> {
        let Scaling::Block { layout, block, .. } = self.scaling else { return Ok(None) };
        // Blocks of a line (packed: words) of the matrices follow each other.
        let blocks_of = |cast: &Cast| match layout {
            ScaleLayout::RowMajor => cast.column_scales.blocks * cast.column_scales.line_blocks,
            ScaleLayout::ColumnMajor => cast.column_scales.blocks,
            ScaleLayout::PackedE8m0 => cast.column_scales.blocks.div_ceil(4),
        };
        let total: usize = casts.iter().map(blocks_of).sum();
        let mut buffer = if layout == ScaleLayout::RowMajor {
            Buffer::new("column_scales", self.scale_dtype, &[total + spare], 1, self.gap)?
        } else {
            let [_, lines] = list_scale_shape(self.scaling, columns, 0);
            Buffer::scales("column_scales", self.scale_dtype, [total + spare, lines], layout, self.gap)?
        };
        let mut first = 0;
        for cast in casts {
            let grid = &cast.column_scales;
            for cell in grid.cells(layout, block) {
                let at = if layout == ScaleLayout::RowMajor {
                    first + cell.i * grid.blocks + cell.j
                } else {
                    (first + cell.i) * buffer.stride + cell.j
                };
                buffer.want_cell(at, &cell);
            }
            first += blocks_of(cast);
        }
        Ok(Some(buffer))
    }
}

/// Shape of a scale tensor of a copy with `lines` lines of `length` elements.
fn list_scale_shape(scaling: Scaling, lines: usize, length: usize) -> [usize; 2] {
    use crate::ops::cast::Block;
    let Scaling::Block { block, layout, .. } = scaling else { unreachable!("called for block scales") };
    let (l, k) = match block {
        Block::Row128 => (lines, length.div_ceil(128)),
        Block::Square128 => (lines.div_ceil(128), length.div_ceil(128)),
        Block::Row32 => (lines, length.div_ceil(32)),
    };
    match layout {
        ScaleLayout::RowMajor => [l, k],
        ScaleLayout::ColumnMajor => [k, l],
        ScaleLayout::PackedE8m0 => [k.div_ceil(4), lines],
    }
}

/// Elements with everything that a conversion can get wrong. The seed decides how many of them are special: none, few, many, or nothing but NaN.
pub(super) fn values(dtype: DType, num: usize, seed: u64) -> Vec<u8> {
    let mut random = SplitMix64::stream(7, seed);
    let specials = [
        f32::NAN,
        -f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        -0.0,
        0.0,
        f32::MAX,
        f32::MIN_POSITIVE,
        f32::from_bits(1),
        448.0,
        464.0,
        -465.0,
        57344.0,
        61440.0,
        240.0,
        65504.0,
        65520.0,
        0.0009765625, // a tie below E4M3's smallest step
        0.0146484375, // a tie below its smallest normal value
    ];
    let one_in = [0, 200, 8, 1][seed as usize % 4];
    // Also magnitudes whose scale overflows, and is E8M0's least.
    let least_exponent = if seed % 8 == 4 { -144 } else { -12 };
    let mut bytes = Vec::with_capacity(num * dtype.size());
    for _ in 0..num {
        let x = match one_in {
            1 if seed % 16 == 3 => f32::NAN,
            2.. if random.below(one_in) == 0 => specials[random.below(specials.len() as u64) as usize],
            // Magnitudes of 2^-12 to 2^12: subnormals, normals and overflow of E4M3.
            _ => random.next_f32() * 2f32.powi(random.below(25) as i32 + least_exponent),
        };
        float::push(dtype, x, &mut bytes);
    }
    bytes
}

/// The tensors of one [`Operands`].
struct Tensors {
    x: Guarded,
    x_layout: Layout,
    scale: Option<Held>,
    row: Option<Buffer>,
    column: Option<Buffer>,
    row_scales: Option<Buffer>,
    column_scales: Option<Buffer>,
    amax: Option<Buffer>,
    scale_inv: Option<Buffer>,
    status: Option<Buffer>,
}

impl Tensors {
    /// The input: `capacity` rows, of which `bytes` has the first.
    fn new(dtype: DType, bytes: &[u8], [rows, columns]: [usize; 2], capacity: usize, gap: usize) -> Result<Self, Failed> {
        let size = dtype.size();
        let stride = columns + gap;
        let x_layout = Layout::strided("check", dtype, &[capacity, columns], &[stride, 1])?;
        let mut x = Guarded::at_offset(x_layout.extent_bytes(), gap * size);
        for r in (0..rows).filter(|_| columns > 0) {
            x.bytes_mut()[r * stride * size..][..columns * size].copy_from_slice(&bytes[r * columns * size..][..columns * size]);
        }
        Ok(Tensors {
            x,
            x_layout,
            scale: None,
            row: None,
            column: None,
            row_scales: None,
            column_scales: None,
            amax: None,
            scale_inv: None,
            status: None,
        })
    }

    fn buffers(&mut self) -> impl Iterator<Item = &mut Buffer> {
        [
            &mut self.row,
            &mut self.column,
            &mut self.row_scales,
            &mut self.column_scales,
            &mut self.amax,
            &mut self.scale_inv,
            &mut self.status,
        ]
        .into_iter()
        .flatten()
    }

    fn reset(&mut self) {
        self.buffers().for_each(|b| b.guarded.bytes_mut().copy_from_slice(&b.initial));
    }

    fn operands(&mut self, backend: &Backend) -> Result<Operands<'_>, Failed> {
        fn view<'b>(backend: &Backend, buffer: &'b mut Option<Buffer>) -> Result<Option<TensorViewMut<'b>>, Failed> {
            buffer.as_mut().map(|b| b.guarded.view_mut(backend, 0, b.layout)).transpose()
        }
        Ok(Operands {
            x: self.x.view(backend, 0, self.x_layout)?,
            scale: self.scale.as_ref().map(|s| s.view(backend)).transpose()?,
            row: view(backend, &mut self.row)?,
            column: view(backend, &mut self.column)?,
            row_scales: view(backend, &mut self.row_scales)?,
            column_scales: view(backend, &mut self.column_scales)?,
            amax: view(backend, &mut self.amax)?,
            scale_inv: view(backend, &mut self.scale_inv)?,
            status: view(backend, &mut self.status)?,
        })
    }

    fn check(&self) -> Result<(), Failed> {
        let all = [&self.row, &self.column, &self.row_scales, &self.column_scales, &self.amax, &self.scale_inv, &self.status];
        all.into_iter().flatten().try_for_each(Buffer::check)
    }
}

/// A tensor that is read.
pub(super) struct Held {
    guarded: Guarded,
    layout: Layout,
}

impl Held {
    pub(super) fn new(dtype: DType, bytes: &[u8]) -> Result<Self, Failed> {
        Self::shaped(dtype, &[bytes.len() / dtype.size()], bytes)
    }

    pub(super) fn shaped(dtype: DType, shape: &[usize], bytes: &[u8]) -> Result<Self, Failed> {
        let mut guarded = Guarded::new(bytes.len());
        guarded.bytes_mut().copy_from_slice(bytes);
        Ok(Held { guarded, layout: Layout::contiguous("check", dtype, shape)? })
    }

    pub(super) fn view(&self, backend: &Backend) -> Result<TensorView<'_>, Failed> {
        self.guarded.view(backend, 0, self.layout)
    }
}

/// An output, what it holds before, and what it must hold afterwards.
struct Buffer {
    name: &'static str,
    dtype: DType,
    guarded: Guarded,
    layout: Layout,
    /// Row stride in elements.
    stride: usize,
    initial: Vec<u8>,
    want: Vec<u8>,
    is_written: Vec<bool>,
}

impl Buffer {
    fn new(name: &'static str, dtype: DType, shape: &[usize], stride: usize, gap: usize) -> Result<Self, Failed> {
        let strides = if shape.len() == 1 { vec![1] } else { vec![stride, 1] };
        let layout = Layout::strided("check", dtype, shape, &strides)?;
        let bytes = layout.extent_bytes();
        let initial = vec![POISON; bytes];
        let guarded = Guarded::at_offset(bytes, gap * dtype.size());
        Ok(Buffer { name, dtype, guarded, layout, stride, want: initial.clone(), initial, is_written: vec![false; bytes] })
    }

    fn rows(name: &'static str, dtype: DType, [rows, columns]: [usize; 2], gap: usize) -> Result<Self, Failed> {
        Self::new(name, dtype, &[rows, columns], columns + gap, gap)
    }

    fn scales(name: &'static str, dtype: DType, shape: [usize; 2], layout: ScaleLayout, gap: usize) -> Result<Self, Failed> {
        let stride = shape[1] + gap;
        // 16 bytes: DeepGEMM's and Transformer Engine's alignment.
        let stride = if layout == ScaleLayout::RowMajor { stride } else { stride.next_multiple_of(16 / dtype.size()) };
        Self::new(name, dtype, &shape, stride, gap)
    }

    fn want_nothing(&mut self) {
        self.want.copy_from_slice(&self.initial);
        self.is_written.fill(false);
    }

    fn want(&mut self, at: usize, bytes: &[u8]) {
        self.want[at..][..bytes.len()].copy_from_slice(bytes);
        self.is_written[at..][..bytes.len()].fill(true);
    }

    /// Contiguous rows, from row `first` on.
    fn want_rows(&mut self, first: usize, columns: usize, bytes: &[u8]) {
        let size = self.dtype.size();
        if columns > 0 {
            for (r, row) in bytes.chunks(columns * size).enumerate() {
                self.want((first + r) * self.stride * size, row);
            }
        }
    }

    fn want_cell(&mut self, element: usize, cell: &Cell) {
        let at = element * self.dtype.size() + cell.byte;
        match (self.dtype, cell.stored) {
            (DType::F32, Some(stored)) => self.want(at, &stored.to_le_bytes()),
            (_, Some(stored)) => self.want(at, &[oracle::e8m0(stored)]),
            (_, None) => self.want(at, &[0]),
        }
    }

    fn check(&self) -> Result<(), Failed> {
        self.guarded.check(self.name)?;
        let got = self.guarded.bytes();
        for (i, &byte) in got.iter().enumerate().filter(|(i, _)| !self.is_written[*i]) {
            ensure!(byte == self.want[i], "{}: byte {i} is {byte:#04x}, it was not to be written", self.name);
        }
        compare::equal(self.name, self.dtype, &[got.len() / self.dtype.size()], got, &self.want)?;
        Ok(())
    }
}
