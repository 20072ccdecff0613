//! Benchmarks of cast + transpose.

use criterion::{BenchmarkId, Criterion, Throughput};
use moe_kernels::cpu::Level;
use moe_kernels::measure::interleaved;
use moe_kernels::ops::cast::{Block, Operands, Options, Scaling, cast};
use moe_kernels::oracle::float;
use moe_kernels::random::SplitMix64;
use moe_kernels::{Backend, Cpu, DType, TensorView, TensorViewMut};

/// bf16 values in [-1, 1).
fn values(num: usize, memory: &mut Vec<u8>) -> &[u8] {
    let random = SplitMix64::new(1);
    let bytes = aligned(2 * num, memory);
    for (i, b) in bytes.chunks_exact_mut(2).enumerate() {
        let x = moe_kernels::random::symmetric_f32(random.at(i as u64));
        b.copy_from_slice(&half::bf16::from_f32(x).to_le_bytes());
    }
    bytes
}

/// `num` ones, aligned to a cache line as tensor libraries allocate them: only whole lines can be written past the caches.
fn aligned(num: usize, memory: &mut Vec<u8>) -> &mut [u8] {
    memory.resize(num + 63, 1);
    let offset = memory.as_ptr().align_offset(64);
    &mut memory[offset..][..num]
}

/// `num` matrices, each with both copies in e4m3 and amax, cut from whole buffers.
fn operands<'a>(
    num: usize,
    [rows, columns]: [usize; 2],
    x: &'a [u8],
    row: &'a mut [u8],
    column: &'a mut [u8],
    amax: &'a mut [f32],
) -> Vec<Operands<'a>> {
    let elements = rows * columns;
    let x = x.chunks(2 * elements);
    let outputs = row.chunks_mut(elements).zip(column.chunks_mut(elements)).zip(amax.chunks_mut(1));
    let matrices = x.zip(outputs).take(num).map(|(x, ((row, column), amax))| {
        Operands::new(TensorView::from_bytes(x, DType::BF16, &[rows, columns]).unwrap())
            .row(TensorViewMut::from_bytes(row, DType::E4M3, &[rows, columns]).unwrap())
            .column(TensorViewMut::from_bytes(column, DType::E4M3, &[columns, rows]).unwrap())
            .amax(TensorViewMut::from_slice(amax, &[1]).unwrap())
    });
    matrices.collect()
}

/// Criterion's cases: one matrix that fits the L3, with one scale, with block scales.
pub fn criterion(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("cast bf16 to e4m3, both copies");
    let [rows, columns] = [1024, 2048];
    let mut x = Vec::new();
    let x = values(rows * columns, &mut x);
    let (mut row, mut column) = (Vec::new(), Vec::new());
    let (row, column) = (aligned(x.len() / 2, &mut row), aligned(x.len() / 2, &mut column));
    let (mut row_scales, mut column_scales) = (vec![0f32; rows * columns / 128], vec![0f32; rows * columns / 128]);
    group.throughput(Throughput::Bytes((4 * rows * columns) as u64));
    for level in Level::available() {
        let backend = Backend::Cpu(Cpu::with_threads(2).unwrap().at_level(level));
        let mut amax = [0.0];
        group.bench_function(BenchmarkId::new("scale given", level.name()), |b| {
            let mut matrices = operands(1, [rows, columns], x, row, column, &mut amax);
            b.iter(|| cast(&backend, &mut matrices, &Options::default()).unwrap());
        });
        group.bench_function(BenchmarkId::new("1x128 scales", level.name()), |b| {
            let mut matrices = operands(1, [rows, columns], x, row, column, &mut amax);
            let mut matrix = matrices.pop().unwrap();
            matrix.row_scales = Some(TensorViewMut::from_slice(&mut row_scales, &[columns / 128, rows]).unwrap());
            matrix.column_scales = Some(TensorViewMut::from_slice(&mut column_scales, &[rows / 128, columns]).unwrap());
            let options = Options::with_scaling(Scaling::deep_gemm(Block::Row128));
            b.iter(|| cast(&backend, std::slice::from_mut(&mut matrix), &options).unwrap());
        });
    }
    group.finish();
}

/// Copies `x` to two outputs with two threads: as many bytes read and written as the cast of it.
fn copy(x: &[u8], row: &mut [u8], column: &mut [u8]) {
    let (upper, lower) = x.split_at(row.len());
    std::thread::scope(|scope| {
        scope.spawn(|| row.copy_from_slice(upper));
        column.copy_from_slice(lower);
    });
}

/// Compares a sample of both copies with the oracle.
fn verify([rows, columns]: [usize; 2], x: &[u8], row: &[u8], column: &[u8]) {
    let mut random = SplitMix64::new(2);
    for _ in 0..10_000 {
        let i = random.below(row.len() as u64) as usize;
        let want = float::narrow(DType::E4M3, float::values(DType::BF16, &x[2 * i..][..2])[0]) as u8;
        let (matrix, r, c) = (i / (rows * columns), i / columns % rows, i % columns);
        let transposed = column[matrix * rows * columns + c * rows + r];
        assert_eq!((row[i], transposed), (want, want), "element [{r}, {c}] of matrix {matrix}");
    }
}

/// Interleaved pairs with memcpy: 64 experts of 2048 x 4096 and one matrix of as many rows; 1 GiB read and 1 GiB written by each side.
pub fn pairs(small: bool) {
    let [rows, columns] = if small { [64, 128] } else { [2048, 4096] };
    let num = 64;
    let mut x = Vec::new();
    let x = values(num * rows * columns, &mut x);
    let (mut row, mut column) = (Vec::new(), Vec::new());
    let (row, column) = (aligned(x.len() / 2, &mut row), aligned(x.len() / 2, &mut column));
    for (name, num, rows) in [("64 matrices", num, rows), ("one matrix", 1, num * rows)] {
        for level in Level::available() {
            let backend = Backend::Cpu(Cpu::with_threads(2).unwrap().at_level(level));
            let num_pairs = if small || level == Level::available()[0] { 1 } else { 15 };
            let mut amax = vec![0.0; num];
            // Both sides write the same outputs, so the views are made anew for each run.
            let outputs = std::cell::RefCell::new((&mut *row, &mut *column));
            let result = interleaved(
                num_pairs,
                || {
                    let (row, column) = &mut *outputs.borrow_mut();
                    let mut matrices = operands(num, [rows, columns], x, row, column, &mut amax);
                    cast(&backend, &mut matrices, &Options::default()).unwrap();
                },
                || {
                    let (row, column) = &mut *outputs.borrow_mut();
                    copy(x, row, column);
                },
            );
            let (row, column) = outputs.into_inner();
            cast(&backend, &mut operands(num, [rows, columns], x, row, column, &mut amax), &Options::default()).unwrap();
            verify([rows, columns], x, row, column);
            println!("cast bf16 to e4m3, both copies and amax, {name} [{rows}, {columns}], {level:?}: {result}");
        }
    }
}
