//! One case of `moe bench cast`: its tensors, the ways to cast them, and what each must give.
#![forbid(unsafe_code)]

use std::cell::RefCell;

use moe_kernels::gpu::plain_cast::{PeerCast, Tensors, plain_cast};
use moe_kernels::gpu::{Buffer, Stream};
use moe_kernels::ops::cast::{Block, Formula, List, Operands, Options, ScaleLayout, Scaling, cast, cast_grouped};
use moe_kernels::random::{SplitMix64, symmetric_f32};
use moe_kernels::tensor::Layout;
use moe_kernels::{Backend, Cuda, DType, Result, TensorView, TensorViewMut};

use super::slots::bytes;

/// Sets of buffers that take turns: a case is larger than twice the cache divided by this (derived: 0.2 GB, H200's cache is 60 MiB), or has several places in each.
pub const NUM_SETS: usize = 2;
/// Bytes that calls of a small case go through before they come back to their first place (derived: four times H200's cache).
const ROTATED_BYTES: usize = 240 << 20;
/// Where tensors begin (spec: what an allocator gives).
const ALIGN: usize = 256;
/// Bytes of random input, repeated (arbitrary: larger than what is in flight).
const PATTERN_BYTES: usize = 32 << 20;

/// One case.
#[derive(Debug, Clone)]
pub struct Case {
    /// What it is about: shapes, types, scales, counts, padding, current.
    pub group: &'static str,
    pub set: String,
    pub name: String,
    pub from: DType,
    pub to: DType,
    pub rows: Vec<usize>,
    pub columns: usize,
    pub scaling: Scaling,
    pub pad_rows: usize,
}

impl Case {
    /// No matrices yet, one scale each, no padding.
    pub fn bf16_to_e4m3(group: &'static str) -> Self {
        let (from, to) = (DType::BF16, DType::E4M3);
        Case {
            group,
            set: String::new(),
            name: String::new(),
            from,
            to,
            rows: Vec::new(),
            columns: 0,
            scaling: Scaling::Given,
            pad_rows: 1,
        }
    }

    pub fn total_rows(&self) -> usize {
        self.rows.iter().sum()
    }

    fn padded_rows(&self) -> usize {
        self.rows.iter().map(|rows| rows.next_multiple_of(self.pad_rows)).sum()
    }

    /// Bytes that must be read and written; scales and greatest magnitudes are not counted.
    pub fn moved_bytes(&self) -> u64 {
        (self.columns * (self.total_rows() * self.from.size() + 2 * self.padded_rows() * self.to.size())) as u64
    }

    /// Places that its tensors have in each buffer, one behind the other. What is cast as a list too is large, or measured for its calls.
    fn num_places(&self) -> usize {
        if self.has_list() { 1 } else { ROTATED_BYTES.div_ceil(NUM_SETS * self.moved_bytes() as usize) }
    }

    /// Calls after which the first tensors come again.
    pub fn num_turns(&self) -> usize {
        NUM_SETS * self.num_places()
    }

    /// Where the tensor of call `i` begins in its buffer, if it has so many bytes.
    fn place(&self, i: usize, bytes: usize) -> usize {
        i / NUM_SETS % self.num_places() * bytes.next_multiple_of(ALIGN)
    }

    /// Whether it is also cast as a list.
    pub fn has_list(&self) -> bool {
        matches!(self.group, "shapes" | "counts" | "host" | "scales")
    }

    /// Whether the plain kernel and a peer can do it.
    fn is_plain(&self) -> bool {
        self.has_list() && self.scaling == Scaling::Given
    }

    fn options(&self) -> Options<'static> {
        Options { pad_rows: self.pad_rows, ..Options::with_scaling(self.scaling) }
    }

    fn offsets(&self) -> Vec<i64> {
        let mut offsets = vec![0];
        self.rows.iter().for_each(|rows| offsets.push(offsets[offsets.len() - 1] + *rows as i64));
        offsets
    }

    fn blocks(&self) -> Option<(usize, usize, DType)> {
        let Scaling::Block { block, formula, .. } = self.scaling else { return None };
        let (lines, length) = match block {
            Block::Row128 => (1, 128),
            Block::Square128 => (128, 128),
            Block::Row32 => (1, 32),
        };
        Some((lines, length, if formula == Formula::Mx { DType::E8M0 } else { DType::F32 }))
    }

    /// Shapes and strides of the scales of both copies.
    fn scale_layouts(&self) -> Result<Option<[Layout; 2]>> {
        let Some((lines, length, dtype)) = self.blocks() else { return Ok(None) };
        let Scaling::Block { layout, .. } = self.scaling else { return Ok(None) };
        let num_blocks = |rows: &usize| rows.next_multiple_of(self.pad_rows).div_ceil(length);
        let along: usize = self.rows.iter().map(num_blocks).sum();
        let of_rows = if lines == 1 { self.padded_rows() } else { along };
        let (across, of_columns) = (self.columns.div_ceil(length), self.columns.div_ceil(lines));
        let aligned = |n: usize| n.next_multiple_of(16 / dtype.size()); // spec: rows a multiple of 16 bytes apart
        let strided = |shape: [usize; 2]| Layout::strided("bench", dtype, &shape, &[aligned(shape[1]), 1]);
        Ok(Some(match layout {
            ScaleLayout::RowMajor => {
                [Layout::contiguous("bench", dtype, &[of_rows, across])?, Layout::contiguous("bench", dtype, &[of_columns * along])?]
            }
            _ => [strided([across, of_rows])?, strided([along, of_columns])?],
        }))
    }

    /// As [`scale_layouts`](Self::scale_layouts), of one of its matrices alone, whose scales have two extents in every layout.
    fn scale_layouts_of_one(&self, rows: usize) -> Result<Option<[Layout; 2]>> {
        let one = Case { rows: vec![rows], ..self.clone() };
        let (Some([of_rows, of_columns]), Some((lines, length, dtype))) = (one.scale_layouts()?, one.blocks()) else { return Ok(None) };
        // The layout of a group's column scales is flat when it is row-major.
        let is_flat = of_columns.shape().len() == 1;
        let shape = [self.columns.div_ceil(lines), one.padded_rows().div_ceil(length)];
        Ok(Some([of_rows, if is_flat { Layout::contiguous("bench", dtype, &shape)? } else { of_columns }]))
    }

    /// Where the scales of each matrix of a list begin, of one copy, and how many bytes they take in all.
    fn scale_places(&self, copy: usize) -> Result<(Vec<(usize, Layout)>, usize)> {
        let (mut places, mut at) = (Vec::new(), 0usize);
        for &rows in &self.rows {
            let Some(layouts) = self.scale_layouts_of_one(rows)? else { break };
            places.push((at, layouts[copy]));
            at = (at + layouts[copy].extent_bytes()).next_multiple_of(ALIGN);
        }
        Ok((places, at))
    }
}

/// Memory that all cases share.
pub struct Memory {
    stream: Stream,
    /// Of each set.
    x: Vec<Buffer>,
    row: Vec<RefCell<Buffer>>,
    column: Vec<RefCell<Buffer>>,
    row_scales: RefCell<Buffer>,
    column_scales: RefCell<Buffer>,
    /// Scale, greatest magnitude and inverse of each matrix.
    scale: Buffer,
    amax: RefCell<Buffer>,
    scale_inv: RefCell<Buffer>,
    offsets: Buffer,
    padded_offsets: Buffer,
    pattern: Vec<u8>,
    pattern_dtype: Option<DType>,
}

/// Most matrices of a case.
const MAX_MATRICES: usize = 2048;

impl Memory {
    /// Enough for every one of the cases.
    pub fn new(stream: &Stream, cases: &[Case]) -> Result<Self> {
        let most = |bytes: &dyn Fn(&Case) -> usize| {
            cases.iter().map(|case| case.num_places() * bytes(case).next_multiple_of(ALIGN)).max().unwrap_or(0) + ALIGN
        };
        let device = stream.device();
        let set = |len: usize| (0..NUM_SETS).map(move |_| Buffer::new(device, len));
        let cell = |buffer: Result<Buffer>| buffer.map(RefCell::new);
        // A copy may be cast to a wider type on the way (padding first).
        let copies = most(&|case| case.padded_rows() * case.columns * if case.group == "padding" { 2 } else { case.to.size() });
        let columns = most(&|case| case.padded_rows() * case.columns * case.to.size());
        let inputs = most(&|case| case.total_rows() * case.columns * case.from.size());
        let mut scales = [0; 2];
        for case in cases {
            if let Some(layouts) = case.scale_layouts()? {
                scales = [0, 1].map(|i| scales[i].max(layouts[i].extent_bytes()));
            }
        }
        let words = || Buffer::new(device, MAX_MATRICES * 4);
        let scale_values: Vec<u8> = (0..MAX_MATRICES).flat_map(|i| [1.0f32, 37.7, 0.5][i % 3].to_le_bytes()).collect();
        Ok(Memory {
            stream: stream.clone(),
            x: set(inputs).collect::<Result<_>>()?,
            row: set(copies).map(cell).collect::<Result<_>>()?,
            column: set(columns).map(cell).collect::<Result<_>>()?,
            row_scales: cell(Buffer::new(device, scales[0] + ALIGN))?,
            column_scales: cell(Buffer::new(device, scales[1] + ALIGN))?,
            scale: Buffer::from_bytes(stream, &scale_values)?,
            amax: cell(words())?,
            scale_inv: cell(words())?,
            offsets: Buffer::new(device, (MAX_MATRICES + 1) * 8)?,
            padded_offsets: Buffer::new(device, (MAX_MATRICES + 1) * 8)?,
            pattern: Vec::new(),
            pattern_dtype: None,
        })
    }

    /// Fills the inputs with numbers of this type, mostly below 1 in magnitude and some that saturate.
    pub fn fill(&mut self, dtype: DType) -> Result<()> {
        if self.pattern_dtype == Some(dtype) {
            return Ok(());
        }
        let random = SplitMix64::new(7);
        let values: Vec<f32> = (0..PATTERN_BYTES / dtype.size())
            .map(|i| symmetric_f32(random.at(i as u64)) * [1.0, 4.0, 0.01, 900.0][if i % 257 == 0 { 3 } else { i % 3 }])
            .collect();
        self.pattern = bytes(dtype, &values);
        self.pattern_dtype = Some(dtype);
        for x in &self.x {
            let first = PATTERN_BYTES.min(x.len());
            x.upload(&self.stream, 0, &self.pattern[..first])?;
            let mut done = first;
            while done < x.len() {
                let more = done.min(x.len() - done) / PATTERN_BYTES.min(done) * PATTERN_BYTES.min(done);
                let more = if more == 0 { x.len() - done } else { more };
                x.copy_from(&self.stream, done, x, 0, more)?;
                done += more;
            }
        }
        Ok(())
    }

    /// Bytes of the input from `at` on.
    fn input(&self, at: usize, len: usize) -> Vec<u8> {
        (at..at + len).map(|i| self.pattern[i % self.pattern.len()]).collect()
    }
}

/// Outputs of lists: their tensors are cut once, before the time is taken.
pub struct ListMemory {
    row: Buffer,
    column: Buffer,
    amax: Buffer,
    scale_inv: Buffer,
    /// Of the rows and of the columns.
    scales: [Buffer; 2],
}

impl ListMemory {
    /// Enough for every one of the cases.
    pub fn new(stream: &Stream, cases: &[Case]) -> Result<Self> {
        let most = cases.iter().filter(|case| case.has_list()).map(|case| case.total_rows() * case.columns).max().unwrap_or(0);
        let (device, words) = (stream.device(), MAX_MATRICES * 4);
        let buffer = |len| Buffer::new(device, len);
        let mut scale_bytes = [0; 2];
        for case in cases.iter().filter(|case| case.has_list()) {
            for (copy, most) in scale_bytes.iter_mut().enumerate() {
                *most = case.scale_places(copy)?.1.max(*most);
            }
        }
        Ok(ListMemory {
            row: buffer(most + ALIGN)?,
            column: buffer(most + ALIGN)?,
            amax: buffer(words)?,
            scale_inv: buffer(words)?,
            scales: [buffer(scale_bytes[0])?, buffer(scale_bytes[1])?],
        })
    }
}

/// The group whose tensors are not made for each call.
const AT_HAND: &str = "grouped, at hand";
/// The same, launched programmatically.
const AT_HAND_EARLY: &str = "grouped, at hand, early";

/// One way to cast.
pub struct Way<'a> {
    pub name: &'static str,
    /// Queues call `i`.
    pub run: Box<dyn Fn(usize) -> Result<()> + 'a>,
}

/// A case in memory.
pub struct Held<'a> {
    case: &'a Case,
    memory: &'a Memory,
    offsets: Vec<i64>,
    scale_layouts: Option<[Layout; 2]>,
    /// The operands of the list form of each set.
    lists: Vec<RefCell<Vec<Operands<'a>>>>,
    /// Lists that are made once, of each set.
    prepared: Vec<RefCell<List<'a>>>,
    /// The operands of a group, made once: what the host's part of a call costs without making them.
    groups: Vec<RefCell<Operands<'a>>>,
}

/// Memories of lists that a case needs: for those that are checked at each call, and for those that are made once.
pub const NUM_LISTS: usize = 2 * NUM_SETS;

/// The tensors of a group of one scale a matrix, without padding.
fn group<'a>(case: &Case, memory: &'a Memory, set: usize, list: &'a mut ListMemory) -> Result<Operands<'a>> {
    let (rows, columns) = (case.total_rows(), case.columns);
    let of = |dtype, shape: &[usize]| Layout::contiguous("bench", dtype, shape);
    let words = of(DType::F32, &[case.rows.len()])?;
    Ok(Operands::new(memory.x[set].view(0, of(case.from, &[rows, columns])?)?)
        .scale(memory.scale.view(0, words)?)
        .row(list.row.view_mut(0, of(case.to, &[rows, columns])?)?)
        .column(list.column.view_mut(0, of(case.to, &[rows * columns])?)?)
        .amax(list.amax.view_mut(0, words)?)
        .scale_inv(list.scale_inv.view_mut(0, words)?))
}

/// The matrices of a list: their inputs are those of the group, their outputs lie as those of the group do.
fn operands<'a>(case: &Case, memory: &'a Memory, set: usize, list: &'a mut ListMemory) -> Result<Vec<Operands<'a>>> {
    let (offsets, columns) = (case.offsets(), case.columns);
    let cut = |layout: &dyn Fn(usize) -> Result<Layout>, at: &dyn Fn(usize) -> usize| {
        (0..case.rows.len()).map(|i| Ok((at(i), layout(i)?))).collect::<Result<Vec<_>>>()
    };
    let start = |i: usize| offsets[i] as usize * columns;
    let of = |shape: [usize; 2], dtype| Layout::contiguous("bench", dtype, &shape);
    let word = cut(&|_| Layout::contiguous("bench", DType::F32, &[1]), &|i| 4 * i)?;
    let rows = list.row.views_mut(&cut(&|i| of([case.rows[i], columns], case.to), &start)?)?;
    let transposed = list.column.views_mut(&cut(&|i| of([columns, case.rows[i]], case.to), &start)?)?;
    let (amax, scale_inv) = (list.amax.views_mut(&word)?, list.scale_inv.views_mut(&word)?);
    let [of_rows, of_columns] = &mut list.scales;
    let mut scales = of_rows.views_mut(&case.scale_places(0)?.0)?.into_iter().zip(of_columns.views_mut(&case.scale_places(1)?.0)?);
    let outputs = rows.into_iter().zip(transposed).zip(amax.into_iter().zip(scale_inv));
    let matrix = |(i, ((row, column), (amax, scale_inv)))| {
        let x = memory.x[set].view(start(i) * case.from.size(), of([case.rows[i], columns], case.from)?)?;
        let operands = Operands::new(x).row(row).column(column).amax(amax);
        Ok(match scales.next() {
            Some((of_rows, of_columns)) => operands.row_scales(of_rows).column_scales(of_columns),
            None => operands.scale(memory.scale.view(4 * i, Layout::contiguous("bench", DType::F32, &[1])?)?).scale_inv(scale_inv),
        })
    };
    outputs.enumerate().map(matrix).collect()
}

impl<'a> Held<'a> {
    pub fn new(case: &'a Case, memory: &'a Memory, lists: &'a mut [ListMemory]) -> Result<Self> {
        let offsets = case.offsets();
        let words: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
        memory.offsets.upload(&memory.stream, 0, &words)?;
        let padded = Case { rows: case.rows.iter().map(|rows| rows.next_multiple_of(case.pad_rows)).collect(), ..case.clone() };
        let words: Vec<u8> = padded.offsets().iter().flat_map(|offset| offset.to_le_bytes()).collect();
        memory.padded_offsets.upload(&memory.stream, 0, &words)?;
        let mut held = Held {
            case,
            memory,
            offsets,
            scale_layouts: case.scale_layouts()?,
            lists: Vec::new(),
            prepared: Vec::new(),
            groups: Vec::new(),
        };
        if case.has_list() {
            let (lists, others) = lists.split_at_mut(NUM_SETS);
            let (for_prepared, for_groups) = others.split_at_mut(NUM_SETS);
            let backend = Backend::Cuda(Cuda::on(memory.stream.clone()));
            for (set, (list, for_prepared)) in lists.iter_mut().zip(for_prepared).enumerate() {
                held.lists.push(RefCell::new(operands(case, memory, set, list)?));
                let prepared = List::new(&backend, operands(case, memory, set, for_prepared)?, case.options())?;
                held.prepared.push(RefCell::new(prepared));
            }
            if case.group == "host" {
                for (set, list) in for_groups.iter_mut().enumerate() {
                    held.groups.push(RefCell::new(group(case, memory, set, list)?));
                }
            }
        }
        Ok(held)
    }

    /// Every way that can do this case, ours first.
    pub fn ways(&self, peer: Option<&'a PeerCast>) -> Vec<Way<'_>> {
        let backend = Backend::Cuda(Cuda::on(self.memory.stream.clone()));
        let early = Backend::Cuda(Cuda::on(self.memory.stream.clone()).programmatic(true));
        let mut ways = vec![Way { name: "grouped", run: Box::new(self.grouped(backend.clone())) }];
        if self.case.group == "padding" {
            let backend = backend.clone();
            ways.push(Way { name: "pad, then cast", run: Box::new(move |i| self.padded_first(&backend, i)) });
        }
        if self.case.has_list() {
            if self.case.group == "host" {
                let [of_hand, of_hand_early] = [backend.clone(), early.clone()];
                ways.push(Way { name: AT_HAND, run: Box::new(move |i| self.at_hand(&of_hand, i)) });
                ways.push(Way { name: "grouped, early", run: Box::new(self.grouped(early.clone())) });
                ways.push(Way { name: AT_HAND_EARLY, run: Box::new(move |i| self.at_hand(&of_hand_early, i)) });
                ways.push(Way { name: "prepared, early", run: Box::new(move |i| self.prepared(&early, i)) });
            }
            let of_list = backend.clone();
            ways.push(Way { name: "list", run: Box::new(move |i| self.list(&of_list, i)) });
            ways.push(Way { name: "prepared", run: Box::new(move |i| self.prepared(&backend, i)) });
        }
        if self.case.is_plain() {
            ways.push(Way {
                name: "base",
                run: Box::new(|i| self.with_tensors(i, |tensors| plain_cast(&self.memory.stream, tensors, &self.offsets))),
            });
            if let Some(peer) = peer {
                ways.push(Way { name: "peer", run: Box::new(move |i| self.peer(peer, i)) });
            }
        }
        ways
    }

    /// The driver's copy of half of the bytes: the ceiling.
    pub fn copy(&self, i: usize) -> Result<()> {
        let (from, to) = (&self.memory.x[i % NUM_SETS], &self.memory.x[(i + 1) % NUM_SETS]);
        let bytes = (self.case.moved_bytes() as usize / 2).min(from.len());
        let at = self.case.place(i, bytes);
        to.copy_from(&self.memory.stream, at, from, at, bytes)
    }

    fn layout(&self, dtype: DType, shape: &[usize]) -> Result<Layout> {
        Layout::contiguous("bench", dtype, shape)
    }

    fn grouped(&self, backend: Backend) -> impl Fn(usize) -> Result<()> + '_ {
        // Sums over all matrices, which are no part of a call.
        let (total_rows, padded) = (self.case.total_rows(), self.case.padded_rows());
        move |i| {
            let (case, memory, set) = (self.case, self.memory, i % NUM_SETS);
            let (mut row, mut column) = (memory.row[set].borrow_mut(), memory.column[set].borrow_mut());
            let (mut row_scales, mut column_scales) = (memory.row_scales.borrow_mut(), memory.column_scales.borrow_mut());
            let (mut amax, mut scale_inv) = (memory.amax.borrow_mut(), memory.scale_inv.borrow_mut());
            let num = case.rows.len();
            let words = self.layout(DType::F32, &[num])?;
            let x = self.layout(case.from, &[total_rows, case.columns])?;
            let at = case.place(i, padded * case.columns * case.to.size());
            let mut operands = Operands::new(memory.x[set].view(case.place(i, x.extent_bytes()), x)?)
                .row(row.view_mut(at, self.layout(case.to, &[padded, case.columns])?)?)
                .column(column.view_mut(at, self.layout(case.to, &[padded * case.columns])?)?)
                .amax(amax.view_mut(0, words)?);
            match self.scale_layouts {
                Some([of_rows, of_columns]) => {
                    operands = operands.row_scales(row_scales.view_mut(0, of_rows)?).column_scales(column_scales.view_mut(0, of_columns)?);
                }
                None => operands = operands.scale_inv(scale_inv.view_mut(0, words)?),
            }
            if case.scaling == Scaling::Given {
                operands = operands.scale(memory.scale.view(0, words)?);
            }
            let offsets = memory.offsets.view(0, self.layout(DType::I64, &[num + 1])?)?;
            cast_grouped(&backend, &mut operands, offsets, &case.options())
        }
    }

    /// Padding as a pass of its own: a padded copy of the input, then the cast of that.
    fn padded_first(&self, backend: &Backend, i: usize) -> Result<()> {
        let (case, memory, set) = (self.case, self.memory, i % NUM_SETS);
        let (padded, num) = (case.padded_rows(), case.rows.len());
        {
            let mut between = memory.row[1 - set].borrow_mut();
            let mut operands = Operands::new(memory.x[set].view(0, self.layout(case.from, &[case.total_rows(), case.columns])?)?)
                .row(between.view_mut(0, self.layout(case.from, &[padded, case.columns])?)?);
            let offsets = memory.offsets.view(0, self.layout(DType::I64, &[num + 1])?)?;
            cast_grouped(backend, &mut operands, offsets, &Options { pad_rows: case.pad_rows, ..Options::default() })?;
        }
        let between = memory.row[1 - set].borrow();
        let (mut row, mut column) = (memory.row[set].borrow_mut(), memory.column[set].borrow_mut());
        let (mut amax, mut scale_inv) = (memory.amax.borrow_mut(), memory.scale_inv.borrow_mut());
        let words = self.layout(DType::F32, &[num])?;
        let mut operands = Operands::new(between.view(0, self.layout(case.from, &[padded, case.columns])?)?)
            .scale(memory.scale.view(0, words)?)
            .row(row.view_mut(0, self.layout(case.to, &[padded, case.columns])?)?)
            .column(column.view_mut(0, self.layout(case.to, &[padded * case.columns])?)?)
            .amax(amax.view_mut(0, words)?)
            .scale_inv(scale_inv.view_mut(0, words)?);
        let offsets = memory.padded_offsets.view(0, self.layout(DType::I64, &[num + 1])?)?;
        cast_grouped(backend, &mut operands, offsets, &Options::default())
    }

    /// The group of tensors that are made already, but for its offsets.
    fn at_hand(&self, backend: &Backend, i: usize) -> Result<()> {
        let offsets = self.memory.offsets.view(0, self.layout(DType::I64, &[self.offsets.len()])?)?;
        cast_grouped(backend, &mut self.groups[i % NUM_SETS].borrow_mut(), offsets, &self.case.options())
    }

    fn list(&self, backend: &Backend, i: usize) -> Result<()> {
        cast(backend, &mut self.lists[i % NUM_SETS].borrow_mut(), &self.case.options())
    }

    fn prepared(&self, backend: &Backend, i: usize) -> Result<()> {
        self.prepared[i % NUM_SETS].borrow_mut().cast(backend)
    }

    fn with_tensors(&self, i: usize, run: impl FnOnce(&Tensors<'_>) -> Result<()>) -> Result<()> {
        let (case, memory, set) = (self.case, self.memory, i % NUM_SETS);
        let (mut row, mut column) = (memory.row[set].borrow_mut(), memory.column[set].borrow_mut());
        let (mut amax, mut scale_inv) = (memory.amax.borrow_mut(), memory.scale_inv.borrow_mut());
        let (rows, words) = (case.total_rows(), self.layout(DType::F32, &[case.rows.len()])?);
        run(&Tensors {
            x: memory.x[set].view(0, self.layout(case.from, &[rows, case.columns])?)?,
            scale: memory.scale.view(0, words)?,
            row: row.view_mut(0, self.layout(case.to, &[rows, case.columns])?)?,
            column: column.view_mut(0, self.layout(case.to, &[rows * case.columns])?)?,
            amax: amax.view_mut(0, words)?,
            scale_inv: scale_inv.view_mut(0, words)?,
        })
    }

    fn peer(&self, peer: &PeerCast, i: usize) -> Result<()> {
        let offsets = self.memory.offsets.view(0, self.layout(DType::I64, &[self.offsets.len()])?)?;
        self.with_tensors(i, |tensors| peer.run(&self.memory.stream, tensors, &self.offsets, &offsets))
    }

    /// Runs one way once and compares three matrices with the CPU's cast; what is wrong, if anything. Lists and tensors at hand write elsewhere: see [`check_list`].
    pub fn check(&self, way: &Way<'_>) -> Result<Option<String>> {
        let (case, memory) = (self.case, self.memory);
        let stream = &memory.stream;
        if way.name == "list" || way.name.starts_with("prepared") || [AT_HAND, AT_HAND_EARLY].contains(&way.name) {
            return Ok(None);
        }
        let copy_bytes = case.padded_rows() * case.columns * case.to.size();
        for copy in [&memory.row[0], &memory.column[0]] {
            copy.borrow().fill(stream, 0, copy_bytes, 0xFF)?;
        }
        memory.amax.borrow().fill(stream, 0, 4 * case.rows.len(), 0)?;
        (way.run)(0)?;
        let (row, column, amax) = (memory.row[0].borrow(), memory.column[0].borrow(), memory.amax.borrow());
        compare(case, memory, way.name, [&row, &column, &amax])
    }
}

/// As [`Held::check`], of the list form: of a call, and of a list that is made once.
pub fn check_list(case: &Case, memory: &Memory, lists: &mut [ListMemory]) -> Result<Option<String>> {
    let (stream, list) = (&memory.stream, &mut lists[0]);
    let copy_bytes = case.total_rows() * case.columns;
    let backend = Backend::Cuda(Cuda::on(stream.clone()));
    for way in ["list", "prepared"] {
        list.row.fill(stream, 0, copy_bytes, 0xFF)?;
        list.column.fill(stream, 0, copy_bytes, 0xFF)?;
        list.amax.fill(stream, 0, 4 * case.rows.len(), 0)?;
        let mut matrices = operands(case, memory, 0, list)?;
        if way == "list" {
            cast(&backend, &mut matrices, &case.options())?;
        } else {
            List::new(&backend, matrices, case.options())?.cast(&backend)?;
        }
        let wrong = compare(case, memory, way, [&list.row, &list.column, &list.amax])?;
        if wrong.is_some() {
            return Ok(wrong);
        }
    }
    Ok(None)
}

/// The first matrix, the one in the middle and the last.
fn compare(case: &Case, memory: &Memory, way: &str, [row, column, amax]: [&Buffer; 3]) -> Result<Option<String>> {
    let (offsets, columns, num) = (case.offsets(), case.columns, case.rows.len());
    let size = case.to.size();
    for i in [0, num / 2, num - 1] {
        let (rows, padded) = (case.rows[i], case.rows[i].next_multiple_of(case.pad_rows));
        let before: usize = case.rows[..i].iter().map(|rows| rows.next_multiple_of(case.pad_rows)).sum();
        let input_bytes = columns * case.from.size();
        let x = memory.input(offsets[i] as usize * input_bytes, rows * input_bytes);
        let mut want = [vec![0; padded * columns * size], vec![0; padded * columns * size]];
        let mut want_amax = [0u8; 4];
        {
            let [row, column] = &mut want;
            let scale = [[1.0f32, 37.7, 0.5][i % 3]];
            let mut scales = Vec::new();
            let mut operands = Operands::new(TensorView::from_bytes(&x, case.from, &[rows, columns])?)
                .row(TensorViewMut::from_bytes(row, case.to, &[padded, columns])?)
                .column(TensorViewMut::from_bytes(column, case.to, &[columns, padded])?)
                .amax(TensorViewMut::from_bytes(&mut want_amax, DType::F32, &[1])?);
            if case.scaling == Scaling::Given {
                operands = operands.scale(TensorView::from_slice(&scale, &[1])?);
            }
            if let Some(layouts) = case.scale_layouts_of_one(rows)? {
                scales.extend(layouts.map(|layout| vec![0u8; layout.extent_bytes()]));
                let (first, second) = scales.split_at_mut(1);
                operands = operands
                    .row_scales(TensorViewMut::new(&mut first[0], layouts[0])?)
                    .column_scales(TensorViewMut::new(&mut second[0], layouts[1])?);
            }
            cast(&Backend::cpu(), &mut [operands], &case.options())?;
        }
        let mut got = vec![0; padded * columns * size];
        for (name, buffer, want) in [("row", row, &want[0]), ("column", column, &want[1])] {
            buffer.download(&memory.stream, before * columns * size, &mut got)?;
            if let Some(at) = (0..got.len()).find(|&at| got[at] != want[at]) {
                return Ok(Some(format!(
                    "{} {} {}, {way}: byte {at} of {name} of matrix {i} is {}, expected {}",
                    case.group, case.set, case.name, got[at], want[at]
                )));
            }
        }
        let mut word = [0; 4];
        amax.download(&memory.stream, 4 * i, &mut word)?;
        if word != want_amax {
            return Ok(Some(format!(
                "{} {} {}, {way}: amax of matrix {i} is {word:?}, expected {want_amax:?}",
                case.group, case.set, case.name
            )));
        }
    }
    Ok(None)
}
