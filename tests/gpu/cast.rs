//! Casts on a GPU beyond the shared checks: what is only known when a call runs, captures, sizes, what is refused.

use moe_kernels::gpu::{Buffer, Graph, Stream};
use moe_kernels::ops::cast::{Block, List, Operands, Options, Scaling, cast, cast_grouped, status};
use moe_kernels::random::SplitMix64;
use moe_kernels::tensor::Layout;
use moe_kernels::{Backend, Cuda, DType, Error, Result, TensorView, TensorViewMut};

use super::{Needs, Outcome, Test, ensure, gpu, report, same};

pub const TRIALS: &[(&str, Needs, Test)] = &[
    ("cast: bad offsets are reported and nothing is written", Needs::Gpu, bad_offsets),
    ("cast: a captured group with other offsets", Needs::Gpu, other_offsets),
    ("cast: more than 2^31 elements", Needs::GpuAlone, large),
    ("cast: the same bytes 20 times", Needs::Gpu, determinism),
    ("cast: tensors that overlap", Needs::Gpu, overlapping),
    ("cast: rows that are too far apart", Needs::GpuAlone, far_rows),
    ("cast: lists that are made once", Needs::Gpu, lists),
    ("cast: current scaling in two streams", Needs::Gpu, current_in_streams),
    ("cast: tensors of a list that overlap", Needs::Gpu, overlapping_lists),
    ("cast: where a list can be made and cast", Needs::Gpu, places_of_lists),
];

/// Bytes on either side of an output that no call may write.
const GUARD: usize = 4096;

/// A group of `num` matrices in up to `capacity` rows, in bf16 and e4m3.
struct Group {
    stream: Stream,
    capacity: usize,
    columns: usize,
    num: usize,
    values: Vec<u8>,
    x: Buffer,
    offsets: Buffer,
    row: Buffer,
    column: Buffer,
    row_scales: Buffer,
    column_scales: Buffer,
    status: Buffer,
}

/// bf16 bits of numbers of magnitude 2^-8 to 4.
fn values(num: usize, seed: u64) -> Vec<u8> {
    let mut random = SplitMix64::new(seed);
    (0..num)
        .flat_map(|_| ((random.below(1 << 16) as u16 & 0x80FF) | 0x3B80).wrapping_add((random.below(9) as u16) << 7).to_le_bytes())
        .collect()
}

impl Group {
    fn new(stream: &Stream, capacity: usize, columns: usize, num: usize) -> Result<Self> {
        let buffer = |len: usize| Buffer::new(stream.device(), len);
        let values = values(capacity * columns, 1);
        let x = Buffer::from_bytes(stream, &values)?;
        let copy = || buffer(capacity * columns + 2 * GUARD);
        Ok(Group {
            stream: stream.clone(),
            capacity,
            columns,
            num,
            values,
            x,
            offsets: buffer(8 * (num + 1))?,
            row: copy()?,
            column: copy()?,
            row_scales: buffer(capacity.next_multiple_of(4) * columns.div_ceil(128) * 4)?,
            column_scales: buffer((capacity / 128 + num) * columns.next_multiple_of(4) * 4)?,
            status: buffer(4)?,
        })
    }

    fn set_offsets(&self, offsets: &[i64]) -> Result<()> {
        self.offsets.upload(&self.stream, 0, &offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect::<Vec<_>>())
    }

    fn poison(&self) -> Result<()> {
        for buffer in [&self.row, &self.column, &self.row_scales, &self.column_scales, &self.status] {
            buffer.fill(&self.stream, 0, buffer.len(), 0xFF)?;
        }
        Ok(())
    }

    /// Blocks along the columns at most.
    fn blocks(&self) -> usize {
        self.capacity / 128 + self.num
    }

    /// With copies of so many rows, and scales of so many blocks along the columns.
    fn cast(&mut self, options: &Options<'_>, rows: usize, blocks: usize) -> Result<()> {
        let columns = self.columns;
        let of = |dtype, shape: &[usize]| Layout::contiguous("test", dtype, shape);
        let mut operands = Operands::new(self.x.view(0, of(DType::BF16, &[self.capacity, columns])?)?)
            .row(self.row.view_mut(GUARD, of(DType::E4M3, &[rows, columns])?)?)
            .column(self.column.view_mut(GUARD, of(DType::E4M3, &[rows * columns])?)?)
            .status(self.status.view_mut(0, of(DType::U32, &[1])?)?);
        if options.scaling != Scaling::Given {
            let rows = self.capacity.next_multiple_of(4);
            operands = operands
                .row_scales(self.row_scales.view_mut(0, of(DType::F32, &[columns.div_ceil(128), rows])?)?)
                .column_scales(self.column_scales.view_mut(0, of(DType::F32, &[blocks, columns.next_multiple_of(4)])?)?);
        }
        let offsets = self.offsets.view(0, of(DType::I64, &[self.num + 1])?)?;
        cast_grouped(&Backend::Cuda(Cuda::on(self.stream.clone())), &mut operands, offsets, options)
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        let mut bytes = vec![0; buffer.len()];
        buffer.download(&self.stream, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn status(&self) -> Result<u32> {
        Ok(u32::from_le_bytes(*self.read(&self.status)?.first_chunk().expect("four bytes")))
    }

    /// What the copies, with their guards, and their scales must be.
    fn want(&self, options: &Options<'_>, offsets: &[i64]) -> Result<[Vec<u8>; 4]> {
        let (rows, columns) = (self.capacity, self.columns);
        let mut want = [&self.row, &self.column, &self.row_scales, &self.column_scales].map(|buffer| vec![0xFF; buffer.len()]);
        let [row, column, row_scales, column_scales] = &mut want;
        let copy = GUARD..GUARD + rows * columns;
        let mut operands = Operands::new(TensorView::from_bytes(&self.values, DType::BF16, &[rows, columns])?)
            .row(TensorViewMut::from_bytes(&mut row[copy.clone()], DType::E4M3, &[rows, columns])?)
            .column(TensorViewMut::from_bytes(&mut column[copy], DType::E4M3, &[rows * columns])?);
        if options.scaling != Scaling::Given {
            let held = [columns.div_ceil(128), rows.next_multiple_of(4)];
            operands = operands.row_scales(TensorViewMut::from_bytes(row_scales, DType::F32, &held)?);
            let held = [self.blocks(), columns.next_multiple_of(4)];
            operands = operands.column_scales(TensorViewMut::from_bytes(column_scales, DType::F32, &held)?);
        }
        cast_grouped(&Backend::cpu(), &mut operands, TensorView::from_slice(offsets, &[self.num + 1])?, options)?;
        Ok(want)
    }

    fn is_untouched(&self, what: &str) -> Outcome {
        for buffer in [&self.row, &self.column, &self.row_scales, &self.column_scales] {
            ensure(self.read(buffer)?.iter().all(|byte| *byte == 0xFF), format!("{what}: something was written"))?;
        }
        Ok(())
    }

    fn check(&self, what: &str, options: &Options<'_>, offsets: &[i64]) -> Outcome {
        let got = [&self.row, &self.column, &self.row_scales, &self.column_scales];
        for ((name, want), got) in ["row", "column", "row_scales", "column_scales"].iter().zip(self.want(options, offsets)?).zip(got) {
            ensure(self.read(got)? == want, format!("{what}: {name}"))?;
        }
        Ok(())
    }
}

/// Few matrices, and more than a block looks at in one go.
const NUMBERS: [usize; 2] = [5, 1100];

fn bad_offsets() -> Outcome {
    let (_, stream) = gpu()?;
    for num in NUMBERS {
        let mut group = Group::new(&stream, 600, 72, num)?;
        let good: Vec<i64> = (0..=num).map(|i| (i * 600 / num) as i64).collect();
        let with = |i: usize, offset: i64| {
            let mut offsets = good.clone();
            offsets[i] = offset;
            offsets
        };
        let cases = [
            ("good", good.clone(), 600, status::GOOD),
            ("not from 0", with(0, 1), 600, status::BAD_OFFSETS),
            ("negative", with(0, -1), 600, status::BAD_OFFSETS),
            ("decreasing", with(num - 1, good[num - 2] - 1), 600, status::BAD_OFFSETS),
            ("far below", with(num / 2, i64::MIN), 600, status::BAD_OFFSETS),
            ("past the end", with(num, 601), 600, status::BAD_OFFSETS),
            ("past 2^32", with(num, (1 << 32) + 600), 600, status::BAD_OFFSETS),
            ("in the middle past the end", with(num / 2, 10_000), 600, status::BAD_OFFSETS),
            ("short outputs", good.clone(), 599, status::SHORT_OUTPUTS),
        ];
        for scaling in [Scaling::Given, Scaling::deep_gemm(Block::Row128)] {
            for (name, offsets, rows, want) in &cases {
                let what = format!("{num} matrices, {name}, {scaling:?}");
                group.set_offsets(offsets)?;
                group.poison()?;
                group.cast(&Options::with_scaling(scaling), *rows, group.blocks())?;
                same(&format!("{what}: status"), group.status()?, *want)?;
                if *want == status::GOOD {
                    group.check(&what, &Options::with_scaling(scaling), offsets)?;
                } else {
                    group.is_untouched(&what)?;
                }
            }
            if scaling != Scaling::Given {
                let what = format!("{num} matrices, short scales");
                let blocks = good.windows(2).filter(|pair| pair[0] < pair[1]).count();
                for (blocks, want) in [(blocks, status::GOOD), (blocks - 1, status::SHORT_OUTPUTS)] {
                    group.set_offsets(&good)?;
                    group.poison()?;
                    group.cast(&Options::with_scaling(scaling), 600, blocks)?;
                    same(&format!("{what}: status"), group.status()?, want)?;
                }
                group.is_untouched(&what)?;
            }
            // With padding the sum of rows counts: every matrix takes a whole block of rows.
            group.set_offsets(&good)?;
            group.poison()?;
            group.cast(&Options { pad_rows: 128, ..Options::with_scaling(scaling) }, 600, group.blocks())?;
            same(&format!("{num} matrices, padded, {scaling:?}: status"), group.status()?, status::SHORT_OUTPUTS)?;
        }
    }
    Ok(())
}

fn other_offsets() -> Outcome {
    let (_, stream) = gpu()?;
    for (num, scaling) in NUMBERS.into_iter().flat_map(|num| [(num, Scaling::Given), (num, Scaling::deep_gemm(Block::Row128))]) {
        let (capacity, options) = (3000, Options::with_scaling(scaling));
        let mut group = Group::new(&stream, capacity, 264, num)?;
        group.set_offsets(&vec![0; num + 1])?;
        group.cast(&options, capacity, group.blocks())?;
        let graph = Graph::capture(&stream, || group.cast(&options, capacity, group.blocks()))?;
        let mut random = SplitMix64::new(num as u64);
        for round in 0..20 {
            // One matrix with everything, none with anything, multiples of 16 and not.
            let step = [1, 16, 1, 8][round % 4];
            let mut offsets: Vec<i64> = (0..=num).map(|_| random.below(capacity as u64 / step + 1) as i64 * step as i64).collect();
            offsets.sort_unstable();
            offsets[0] = 0;
            if round == 5 {
                offsets[1..].fill(capacity as i64);
            } else if round == 6 {
                offsets.fill(0);
            }
            group.set_offsets(&offsets)?;
            group.poison()?;
            graph.launch(&stream)?;
            same("status", group.status()?, status::GOOD)?;
            group.check(&format!("{num} matrices, {scaling:?}, replay {round}"), &options, &offsets)?;
        }
    }
    Ok(())
}

/// Element numbers, and byte numbers of the input, that 31 and 32 bits do not hold.
fn large() -> Outcome {
    let (device, stream) = gpu()?;
    let [rows, columns] = [131_088, 16_400]; // derived: 2^31 + 2.4 million elements, no power of two
    let elements = rows * columns;
    let (free, _) = device.memory()?;
    if free < 5 * elements as u64 {
        report(format_args!("2^31 elements need {} GB, {} GB are free: not run", 5 * elements / 1_000_000_000, free / 1_000_000_000));
        return Ok(());
    }
    let pattern = values(1 << 20, 9);
    let x = Buffer::new(&device, 2 * elements)?;
    x.upload(&stream, 0, &pattern)?;
    let mut done = pattern.len();
    while done < x.len() {
        let more = done.min(x.len() - done);
        x.copy_from(&stream, done, &x, 0, more)?;
        done += more;
    }
    let element = |row: usize, column: usize| {
        let at = (row * columns + column) * 2 % pattern.len();
        [pattern[at], pattern[at + 1]]
    };
    let (mut row, mut column) = (Buffer::new(&device, elements)?, Buffer::new(&device, elements)?);
    let cast_line = |line: &[u8]| -> Result<Vec<u8>> {
        let mut out = vec![0; line.len() / 2];
        let shape = [1, line.len() / 2];
        let operands = Operands::new(TensorView::from_bytes(line, DType::BF16, &shape)?);
        cast(&Backend::cpu(), &mut [operands.row(TensorViewMut::from_bytes(&mut out, DType::E4M3, &shape)?)], &Options::default())?;
        Ok(out)
    };
    for is_grouped in [false, true] {
        row.fill(&stream, 0, elements, 0xFF)?;
        column.fill(&stream, 0, elements, 0xFF)?;
        let backend = Backend::Cuda(Cuda::on(stream.clone()));
        let of = |dtype, shape: &[usize]| Layout::contiguous("test", dtype, shape);
        let transposed: &[usize] = if is_grouped { &[elements] } else { &[columns, rows] };
        let mut operands = Operands::new(x.view(0, of(DType::BF16, &[rows, columns])?)?)
            .row(row.view_mut(0, of(DType::E4M3, &[rows, columns])?)?)
            .column(column.view_mut(0, of(DType::E4M3, transposed)?)?);
        if is_grouped {
            let offsets = Buffer::from_bytes(&stream, &[0, rows as i64].map(i64::to_le_bytes).concat())?;
            cast_grouped(&backend, &mut operands, offsets.view(0, of(DType::I64, &[2])?)?, &Options::default())?;
        } else {
            cast(&backend, &mut [operands], &Options::default())?;
        }
        for r in [0, 1, 65_535, 65_536, rows / 2, rows - 17, rows - 1] {
            let line: Vec<u8> = (0..columns).flat_map(|c| element(r, c)).collect();
            let mut got = vec![0; columns];
            row.download(&stream, r * columns, &mut got)?;
            ensure(got == cast_line(&line)?, format!("row {r}, grouped {is_grouped}"))?;
        }
        for c in [0, 1, 255, 256, columns / 2, columns - 17, columns - 1] {
            let line: Vec<u8> = (0..rows).flat_map(|r| element(r, c)).collect();
            let mut got = vec![0; rows];
            column.download(&stream, c * rows, &mut got)?;
            ensure(got == cast_line(&line)?, format!("column {c}, grouped {is_grouped}"))?;
        }
    }
    Ok(())
}

fn determinism() -> Outcome {
    let (_, stream) = gpu()?;
    let mut group = Group::new(&stream, 3008, 520, 7)?;
    let offsets = [0, 16, 16, 1200, 1216, 2000, 2992, 3008];
    group.set_offsets(&offsets)?;
    for scaling in [Scaling::Given, Scaling::deep_gemm(Block::Row128)] {
        let mut first: Option<[Vec<u8>; 4]> = None;
        for run in 0..20 {
            group.poison()?;
            group.cast(&Options::with_scaling(scaling), 3008, group.blocks())?;
            let all = [&group.row, &group.column, &group.row_scales, &group.column_scales].map(|buffer| group.read(buffer));
            let [a, b, c, d] = all;
            let all = [a?, b?, c?, d?];
            ensure(first.get_or_insert_with(|| all.clone()) == &all, format!("{scaling:?}: run {run} differs"))?;
        }
    }
    Ok(())
}

/// Views of one buffer that share bytes.
fn overlapping() -> Outcome {
    let (_, stream) = gpu()?;
    let buffer = Buffer::new(stream.device(), 1 << 16)?;
    let backend = Backend::Cuda(Cuda::on(stream.clone()));
    let of = |dtype, shape: &[usize]| Layout::contiguous("test", dtype, shape);
    let at = |byte: u64| moe_kernels::tensor::DeviceAddress { address: buffer.address().address + byte, ..buffer.address() };
    let output = |byte: u64, shape: &[usize]| -> Result<TensorViewMut<'_>> {
        // SAFETY: the bytes lie in `buffer`, which outlives the call; that views overlap is what is refused before anything runs.
        unsafe { TensorViewMut::from_device(at(byte), of(DType::E4M3, shape)?) }
    };
    // x has 2 x 16 x 32 bytes from 0 on.
    for (row, column, what) in
        [(1023, 4096, "row"), (4096, 512, "column"), (4096, 4096 + 511, "column"), (4096, 4096, "column"), (0, 4096, "row")]
    {
        let x = buffer.view(0, of(DType::BF16, &[16, 32])?)?;
        // Alone, and behind a good one that it is like.
        for num in [1, 2] {
            let good = Operands::new(x).row(output(0x8000, &[16, 32])?).column(output(0x9000, &[32, 16])?);
            let bad = Operands::new(x).row(output(row, &[16, 32])?).column(output(column, &[32, 16])?);
            let mut matrices = [good, bad];
            match cast(&backend, &mut matrices[2 - num..], &Options::default()) {
                Err(Error::Invalid { what: named, got, .. })
                    if named == format!("matrices[{}].{what}", num - 1) && got.contains("overlap") => {}
                other => return Err(format!("row at {row}, column at {column}, matrix {num}: {other:?}").into()),
            }
        }
    }
    let x = buffer.view(0, of(DType::BF16, &[16, 32])?)?;
    cast(&backend, &mut [Operands::new(x).row(output(1024, &[16, 32])?).column(output(1536, &[32, 16])?)], &Options::default())?;
    stream.synchronize()?;
    Ok(())
}

/// Copies whose rows are 2^32 bytes apart, which kernels do not count. Of a single row the stride does not matter.
fn far_rows() -> Outcome {
    let (device, stream) = gpu()?;
    let far = 1usize << 32;
    let (free, _) = device.memory()?;
    if free < 2 * far as u64 {
        report(format_args!("two rows need 4 GiB, {} GB are free: not run", free / 1_000_000_000));
        return Ok(());
    }
    let (x, mut row) = (Buffer::new(&device, 1 << 10)?, Buffer::new(&device, far + 1024)?);
    let offsets = Buffer::from_bytes(&stream, &[0i64, 1].map(i64::to_le_bytes).concat())?;
    let backend = Backend::Cuda(Cuda::on(stream.clone()));
    let of = |dtype, shape: &[usize]| Layout::contiguous("test", dtype, shape);
    for rows in [1, 2] {
        for is_grouped in [false, true] {
            let to = Layout::strided("test", DType::E4M3, &[rows, 32], &[far, 1])?;
            let mut operands = Operands::new(x.view(0, of(DType::BF16, &[rows, 32])?)?).row(row.view_mut(0, to)?);
            let result = if is_grouped {
                cast_grouped(&backend, &mut operands, offsets.view(0, of(DType::I64, &[2])?)?, &Options::default())
            } else {
                cast(&backend, &mut [operands], &Options::default())
            };
            let want = if is_grouped { "row" } else { "matrices[0].row" };
            match result {
                Ok(()) if rows == 1 => {}
                Err(Error::Invalid { what, got, .. }) if rows == 2 && what == want && got.contains("4294967296 bytes apart") => {}
                other => return Err(format!("{rows} rows, grouped {is_grouped}: {other:?}").into()),
            }
        }
    }
    stream.synchronize()?;
    Ok(())
}

/// The tensors of matrices of these shapes, in bf16 and e4m3: one buffer for each kind, the matrices one behind the other.
struct Matrices {
    shapes: Vec<[usize; 2]>,
    values: Vec<u8>,
    x: Buffer,
    row: Buffer,
    column: Buffer,
    amax: Buffer,
    scale_inv: Buffer,
}

/// What a cast of [`Matrices`] must give.
struct Wanted {
    row: Vec<u8>,
    column: Vec<u8>,
    amax: Vec<f32>,
    scale_inv: Vec<f32>,
}

impl Matrices {
    /// Neighbours have different greatest magnitudes, and so have matrices of one number under different seeds.
    fn new(stream: &Stream, shapes: &[[usize; 2]], seed: u64) -> Result<Self> {
        let elements = shapes.iter().map(|[rows, columns]| rows * columns).sum::<usize>();
        let buffer = |len: usize| Buffer::new(stream.device(), len);
        let mut values = values(elements, seed);
        let mut rest = &mut values[..];
        for (i, [rows, columns]) in shapes.iter().enumerate() {
            let (own, behind) = rest.split_at_mut(2 * rows * columns);
            // A power of two: bf16 has its exponent from bit 7 on.
            let lower = ((i as u64 + seed) % 5) as u16 * 128;
            own.chunks_exact_mut(2).for_each(|bits| bits.copy_from_slice(&(u16::from_le_bytes([bits[0], bits[1]]) - lower).to_le_bytes()));
            rest = behind;
        }
        let x = Buffer::from_bytes(stream, &values)?;
        let (row, column) = (buffer(elements + 2 * GUARD)?, buffer(elements + 2 * GUARD)?);
        let (amax, scale_inv) = (buffer(4 * shapes.len())?, buffer(4 * shapes.len())?);
        Ok(Matrices { shapes: shapes.to_vec(), values, x, row, column, amax, scale_inv })
    }

    fn poison(&self, stream: &Stream) -> Result<()> {
        self.amax.fill(stream, 0, self.amax.len(), 0)?;
        [&self.row, &self.column, &self.scale_inv].into_iter().try_for_each(|buffer| buffer.fill(stream, 0, buffer.len(), 0xFF))
    }

    fn starts(&self) -> Vec<usize> {
        self.shapes.iter().scan(0, |sum, [rows, columns]| Some(std::mem::replace(sum, *sum + rows * columns))).collect()
    }

    fn operands(&mut self) -> Result<Vec<Operands<'_>>> {
        let starts = self.starts();
        let of = |dtype, shape: &[usize]| Layout::contiguous("test", dtype, shape);
        let cut = |layout: &dyn Fn(usize) -> Result<Layout>, at: &dyn Fn(usize) -> usize| {
            (0..self.shapes.len()).map(|i| Ok((at(i), layout(i)?))).collect::<Result<Vec<_>>>()
        };
        let rows = cut(&|i| of(DType::E4M3, self.shapes[i].as_slice()), &|i| GUARD + starts[i])?;
        let columns = cut(&|i| of(DType::E4M3, &[self.shapes[i][1], self.shapes[i][0]]), &|i| GUARD + starts[i])?;
        let words = cut(&|_| of(DType::F32, &[1]), &|i| 4 * i)?;
        let outputs = self.row.views_mut(&rows)?.into_iter().zip(self.column.views_mut(&columns)?);
        let scalars = self.amax.views_mut(&words)?.into_iter().zip(self.scale_inv.views_mut(&words)?);
        let matrix = |(i, ((row, column), (amax, scale_inv))): (usize, _)| {
            let x = self.x.view(2 * starts[i], of(DType::BF16, self.shapes[i].as_slice())?)?;
            Ok(Operands::new(x).row(row).column(column).amax(amax).scale_inv(scale_inv))
        };
        outputs.zip(scalars).enumerate().map(matrix).collect()
    }

    /// As the CPU casts them.
    fn wanted(&self, options: &Options<'_>) -> Result<Wanted> {
        let of_copy = |buffer: &Buffer| vec![0xFF; buffer.len()];
        let of_each = |none| vec![none; self.shapes.len()];
        let mut want = Wanted { row: of_copy(&self.row), column: of_copy(&self.column), amax: of_each(0.0), scale_inv: of_each(f32::NAN) };
        for (i, (&[rows, columns], start)) in self.shapes.iter().zip(self.starts()).enumerate() {
            let here = GUARD + start..GUARD + start + rows * columns;
            let operands = Operands::new(TensorView::from_bytes(&self.values[2 * start..], DType::BF16, &[rows, columns])?)
                .row(TensorViewMut::from_bytes(&mut want.row[here.clone()], DType::E4M3, &[rows, columns])?)
                .column(TensorViewMut::from_bytes(&mut want.column[here], DType::E4M3, &[columns, rows])?)
                .amax(TensorViewMut::from_slice(&mut want.amax[i..=i], &[1])?)
                .scale_inv(TensorViewMut::from_slice(&mut want.scale_inv[i..=i], &[1])?);
            cast(&Backend::cpu(), &mut [operands], options)?;
        }
        Ok(want)
    }

    /// Compares everything with the CPU's.
    fn check(&self, stream: &Stream, what: &str, options: &Options<'_>) -> Outcome {
        self.compare(stream, what, &self.wanted(options)?)
    }

    fn compare(&self, stream: &Stream, what: &str, want: &Wanted) -> Outcome {
        let read = |buffer: &Buffer| -> Result<Vec<u8>> {
            let mut bytes = vec![0; buffer.len()];
            buffer.download(stream, 0, &mut bytes)?;
            Ok(bytes)
        };
        ensure(read(&self.row)? == want.row, format!("{what}: row"))?;
        ensure(read(&self.column)? == want.column, format!("{what}: column"))?;
        for (name, buffer, want) in [("amax", &self.amax, &want.amax), ("scale_inv", &self.scale_inv, &want.scale_inv)] {
            let want: Vec<u8> = want.iter().flat_map(|word| word.to_le_bytes()).collect();
            ensure(read(buffer)? == want, format!("{what}: {name}"))?;
        }
        Ok(())
    }
}

/// More matrices than parameters hold, tall ones and low ones, whole vectors and not: again and again, and in a graph.
fn lists() -> Outcome {
    let (_, stream) = gpu()?;
    let plain = Backend::Cuda(Cuda::on(stream.clone()));
    let early = Backend::Cuda(Cuda::on(stream.clone()).programmatic(true));
    for num in [1, 300, 1100] {
        for (is_aligned, rows) in [(true, 700), (false, 700), (true, 100)] {
            let columns = |i: usize| if is_aligned { [256, 8, 520, 64][i % 4] } else { [256, 9, 130, 1][i % 4] };
            // Most of them short, so that a thousand take little memory.
            let of = |i: usize| [if i.is_multiple_of(37) { rows } else { (i * 7) % 40 }, columns(i)];
            let shapes: Vec<[usize; 2]> = (0..num).map(of).collect();
            for scaling in [Scaling::Given, Scaling::Current { epsilon: 0.0, power_of_two: false }] {
                let (what, options) = (format!("{num} matrices of {rows} rows, {is_aligned}, {scaling:?}"), Options::with_scaling(scaling));
                let mut matrices = Matrices::new(&stream, &shapes, 3)?;
                let mut outcomes = Vec::new();
                for round in 0..3 {
                    matrices.poison(&stream)?;
                    let mut list = List::new(&plain, matrices.operands()?, options)?;
                    list.cast(&plain)?;
                    match round {
                        0 => {}
                        1 => list.cast(&early)?,
                        _ => {
                            let graph = Graph::capture(&stream, || list.cast(&plain))?;
                            graph.launch(&stream)?;
                            graph.launch(&stream)?;
                            stream.synchronize()?;
                        }
                    }
                    drop(list);
                    outcomes.push(matrices.check(&stream, &format!("{what}, round {round}"), &options));
                }
                outcomes.into_iter().collect::<Outcome>()?;
            }
        }
    }
    // Larger than the cache: the second pass of current scaling begins at the end.
    let options = Options::with_scaling(Scaling::Current { epsilon: 0.0, power_of_two: false });
    let mut matrices = Matrices::new(&stream, &[[5000, 2600], [17, 2600], [4800, 2600]], 3)?; // arbitrary, 51 MB
    for is_made_once in [false, true] {
        matrices.poison(&stream)?;
        if is_made_once {
            List::new(&plain, matrices.operands()?, options)?.cast(&plain)?;
        } else {
            cast(&plain, &mut matrices.operands()?, &options)?;
        }
        matrices.check(&stream, &format!("larger than the cache, made once {is_made_once}"), &options)?;
    }
    Ok(())
}

/// Current scaling of what fits on the chip, of some more, of hundreds of matrices, and of one: again and again in two streams at a time. Both streams call in one
/// form, so that they launch one program and share its memory.
fn current_in_streams() -> Outcome {
    let (_, stream) = gpu()?;
    let other = Stream::new(stream.device())?;
    let [here, there] = [&stream, &other].map(|stream| Backend::Cuda(Cuda::on(stream.clone())));
    let options = Options::with_scaling(Scaling::Current { epsilon: 0.0, power_of_two: false });
    let many: Vec<_> = (0..300).map(|i| [if i % 7 == 3 { 0 } else { 150 + i % 50 }, 264]).collect(); // arbitrary, more than a block has threads
    let shapes = [vec![[512, 4096]; 8], vec![[2600, 2048]; 3], many, vec![[128, 8]]];
    for (i, (first, second)) in [(0, 1), (2, 0), (3, 2), (1, 1)].into_iter().enumerate() {
        let (mut one, mut two) = (Matrices::new(&stream, &shapes[first], 3)?, Matrices::new(&stream, &shapes[second], 4)?);
        let wanted = [one.wanted(&options)?, two.wanted(&options)?];
        for are_made_once in [true, false] {
            // The last calls are what remains to be seen.
            for round in 0..8 {
                one.poison(&stream)?;
                two.poison(&stream)?;
                stream.synchronize()?;
                if are_made_once {
                    let (mut one, mut two) = (List::new(&here, one.operands()?, options)?, List::new(&there, two.operands()?, options)?);
                    for _ in 0..5 {
                        one.cast(&here)?;
                        two.cast(&there)?;
                    }
                    stream.synchronize()?;
                    other.synchronize()?;
                } else {
                    let (mut one, mut two) = (one.operands()?, two.operands()?);
                    for _ in 0..5 {
                        cast(&here, &mut one, &options)?;
                        cast(&there, &mut two, &options)?;
                    }
                    stream.synchronize()?;
                    other.synchronize()?;
                }
                let what = format!("pair {i}, made once {are_made_once}, round {round}");
                one.compare(&stream, &format!("{what}, the first"), &wanted[0])?;
                two.compare(&stream, &format!("{what}, the second"), &wanted[1])?;
            }
        }
    }
    Ok(())
}

/// Tensors of different matrices that share bytes are refused when a list is made; inputs may, and rows that stand between each other's do not.
fn overlapping_lists() -> Outcome {
    let (_, stream) = gpu()?;
    let backend = Backend::Cuda(Cuda::on(stream.clone()));
    let buffer = Buffer::new(stream.device(), 1 << 16)?;
    let at = |byte: u64| moe_kernels::tensor::DeviceAddress { address: buffer.address().address + byte, ..buffer.address() };
    let rows = |byte: u64, stride: usize| -> Result<TensorViewMut<'_>> {
        // SAFETY: the bytes lie in `buffer`, which outlives the list; that views overlap is what is refused before anything runs.
        unsafe { TensorViewMut::from_device(at(byte), Layout::strided("test", DType::E4M3, &[16, 32], &[stride, 1])?) }
    };
    let word = |byte: u64| -> Result<TensorViewMut<'_>> {
        // SAFETY: as above.
        unsafe { TensorViewMut::from_device(at(byte), Layout::contiguous("test", DType::F32, &[1])?) }
    };
    // Both inputs are the bytes from 0 to 1024.
    let x = || buffer.view(0, Layout::contiguous("test", DType::BF16, &[16, 32])?);
    // Outputs of two matrices: row (start, stride) and amax; what the error names, if any.
    type Outputs = (u64, usize, u64);
    let cases: [(Outputs, Outputs, Option<&str>); 7] = [
        ((2048, 32, 8192), (4096, 32, 8196), None),
        ((2048, 64, 8192), (2080, 64, 8196), None),
        ((2048, 64, 8192), (2079, 64, 8196), Some("row")),
        ((2048, 32, 8192), (2048 + 511, 32, 8196), Some("row")),
        ((2048, 32, 8192), (1023, 32, 8196), Some("row")),
        ((2048, 32, 8192), (4096, 32, 8192), Some("amax")),
        ((2048, 32, 2044), (4096, 32, 2048 + 508), Some("amax")),
    ];
    for (i, (first, second, named)) in cases.into_iter().enumerate() {
        let matrix = |(start, stride, amax): Outputs| -> Result<Operands<'_>> {
            Ok(Operands::new(x()?).row(rows(start, stride)?).amax(word(amax)?))
        };
        let list = List::new(&backend, vec![matrix(first)?, matrix(second)?], Options::default());
        match (list, named) {
            (Ok(mut list), None) => list.cast(&backend)?,
            (Err(Error::Invalid { what, got, .. }), Some(field))
                if got.contains("overlapping") && (what.ends_with(field) || got.ends_with(field)) => {}
            (other, _) => return Err(format!("case {i}: {:?}", other.map(|_| "accepted")).into()),
        }
    }
    stream.synchronize()?;
    Ok(())
}

/// A list is made outside of captures, and cast by a backend of its kind; without matrices it is nothing to do.
fn places_of_lists() -> Outcome {
    let (_, stream) = gpu()?;
    let backend = Backend::Cuda(Cuda::on(stream.clone()));
    List::new(&backend, Vec::new(), Options::default())?.cast(&backend)?;
    let mut matrices = Matrices::new(&stream, &[[16, 32], [0, 8]], 3)?;
    let captured = Graph::capture(&stream, || List::new(&backend, matrices.operands()?, Options::default()).map(|_| ()));
    match captured {
        Err(Error::Unsupported { op: "cast", .. }) => {}
        other => return Err(format!("made in a capture: {:?}", other.map(|_| "accepted")).into()),
    }
    matrices.poison(&stream)?;
    let mut list = List::new(&backend, matrices.operands()?, Options::default())?;
    match list.cast(&Backend::cpu()) {
        Err(Error::Invalid { what, .. }) if what == "backend" => {}
        other => return Err(format!("cast on the cpu: {other:?}").into()),
    }
    // Another stream of the device.
    let other = Stream::new(stream.device())?;
    list.cast(&Backend::Cuda(Cuda::on(other.clone())))?;
    other.synchronize()?;
    drop(list);
    matrices.check(&stream, "another stream", &Options::default())
}
