//! Checks of cast + transpose.

use crate::backend::Backend;
use crate::check::guarded::Guarded;
use crate::check::{Check, Failed, Group, variants};
use crate::ensure;
use crate::ops::cast::{Block, Formula, Operands, Options, ScaleLayout, Scaling, cast};
use crate::oracle::{compare, float};
use crate::tensor::{DType, Layout, TensorView, TensorViewMut};

mod case;

use case::{Case, Held, values};

/// Input types.
const FROM: [DType; 3] = [DType::BF16, DType::F16, DType::F32];
/// Output types that take scales of every kind.
const FP8: [DType; 4] = [DType::E4M3, DType::E5M2, DType::E4M3Fnuz, DType::E5M2Fnuz];
/// Output types.
const TO: [DType; 7] = [DType::E4M3, DType::E5M2, DType::E4M3Fnuz, DType::E5M2Fnuz, DType::F16, DType::BF16, DType::F32];
/// Around the rows of padding, blocks and tiles.
const ROWS: [usize; 10] = [0, 1, 15, 16, 17, 127, 128, 129, 255, 257];
/// Around the widths of vectors and blocks; 1536 is more than a tile.
const COLUMNS: [usize; 8] = [0, 1, 8, 16, 100, 128, 129, 1536];
/// Matrices so low that a GPU casts several tiles beside each other at once, and one that is not.
const LOW_ROWS: [usize; 7] = [144, 30, 0, 96, 50, 145, 8];
/// Scale block, formula, layout and the type of the stored scales.
const BLOCKS: [(Block, Formula, ScaleLayout, DType); 14] = {
    use Block::{Row32, Row128, Square128};
    use ScaleLayout::{ColumnMajor, PackedE8m0, RowMajor};
    const TE: Formula = Formula::TransformerEngine { epsilon: 0.0, power_of_two: false };
    const TE_EPSILON: Formula = Formula::TransformerEngine { epsilon: 0.125, power_of_two: false };
    const TE_POWER: Formula = Formula::TransformerEngine { epsilon: 1e-12, power_of_two: true };
    const DEEP: Formula = Formula::DeepGemm { power_of_two: false };
    const DEEP_POWER: Formula = Formula::DeepGemm { power_of_two: true };
    [
        (Row128, TE, ColumnMajor, DType::F32),
        (Row128, TE_POWER, RowMajor, DType::E8M0),
        (Row128, TE_EPSILON, RowMajor, DType::F32),
        (Square128, TE, RowMajor, DType::F32),
        (Square128, TE_POWER, ColumnMajor, DType::F32),
        (Row128, DEEP, ColumnMajor, DType::F32),
        (Square128, DEEP, RowMajor, DType::F32),
        (Row128, DEEP_POWER, PackedE8m0, DType::U32),
        (Square128, DEEP_POWER, PackedE8m0, DType::I32),
        (Row128, DEEP_POWER, ColumnMajor, DType::F32),
        (Row32, Formula::Mx, RowMajor, DType::E8M0),
        (Row32, Formula::Mx, ColumnMajor, DType::E8M0),
        (Row32, Formula::Mx, PackedE8m0, DType::U32),
        (Square128, Formula::Mx, RowMajor, DType::E8M0),
    ]
};

/// Every group of this operation.
pub fn groups() -> Vec<Group> {
    let mut groups = Vec::new();
    let mut push = |name: String, run: Box<Check>| groups.push(Group::new("cast", name, run));
    for from in FROM {
        for to in TO {
            push(
                format!("given scale, list, {from} to {to}"),
                Box::new(move |backend| lists(backend, from, to, Scaling::Given, DType::F32)),
            );
            push(
                format!("given scale, grouped, {from} to {to}"),
                Box::new(move |backend| grouped(backend, from, to, Scaling::Given, DType::F32)),
            );
        }
        for to in FP8 {
            push(format!("current scale, {from} to {to}"), Box::new(move |backend| current(backend, from, to)));
        }
    }
    for (i, (block, formula, layout, scale_dtype)) in BLOCKS.into_iter().enumerate() {
        let scaling = Scaling::Block { block, formula, layout };
        // Every input type with every formula; output types take turns.
        for (j, from) in FROM.into_iter().enumerate() {
            let to = FP8[(i + j) % FP8.len()];
            let name = format!("{} scales, {}, {layout:?} of {scale_dtype}, {from} to {to}", name_of(block), name_of_formula(formula));
            push(format!("{name}, list"), Box::new(move |backend| lists(backend, from, to, scaling, scale_dtype)));
            push(format!("{name}, grouped"), Box::new(move |backend| grouped(backend, from, to, scaling, scale_dtype)));
        }
    }
    for from in [DType::BF16, DType::F16] {
        push(format!("every {from} pattern"), Box::new(move |backend| every_pattern(backend, from)));
    }
    push("many matrices".into(), Box::new(many_matrices));
    push("past the caches".into(), Box::new(past_the_caches));
    push("noop flag".into(), Box::new(noop));
    push("properties".into(), Box::new(properties));
    groups
}

fn name_of(block: Block) -> &'static str {
    match block {
        Block::Row128 => "1x128",
        Block::Square128 => "128x128",
        Block::Row32 => "1x32",
    }
}

fn name_of_formula(formula: Formula) -> String {
    match formula {
        Formula::TransformerEngine { epsilon, power_of_two } => format!("te epsilon {epsilon} power of two {power_of_two}"),
        Formula::DeepGemm { power_of_two } => format!("deepgemm power of two {power_of_two}"),
        Formula::Mx => "mx".into(),
    }
}

/// Every row count with every column count, few rows of the longest, to keep the oracle short.
fn shapes() -> Vec<[usize; 2]> {
    let all = ROWS.into_iter().flat_map(|rows| COLUMNS.into_iter().map(move |columns| [rows, columns]));
    all.filter(|[rows, columns]| *columns < 1536 || [1, 17, 129].contains(rows)).collect()
}

/// Lists of matrices of every shape: plain; one copy only, padded, apart and unaligned.
fn lists(backend: &Backend, from: DType, to: DType, scaling: Scaling, scale_dtype: DType) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let mut num_cases = Case { scale_dtype, is_prepared: true, ..Case::new(from, to, shapes(), scaling) }.run(&variants)?;
    let some: Vec<_> = shapes().into_iter().enumerate().filter(|(i, _)| i % 3 == 0).map(|(_, shape)| shape).collect();
    for (i, pad_rows) in [16, 32, 128].into_iter().enumerate() {
        let one_copy = Case { row: i != 1, column: i != 2, ..Case::new(from, to, some.clone(), scaling) };
        num_cases += Case { scale_dtype, pad_rows, gap: i + 1, extras: i != 0, seed: i as u64 + 2, ..one_copy }.run(&variants)?;
    }
    let low = LOW_ROWS.into_iter().zip([808, 700, 808, 808, 704, 808, 808]).map(|(rows, columns)| [rows, columns]).collect();
    num_cases += Case { scale_dtype, is_prepared: true, seed: 5, ..Case::new(from, to, low, scaling) }.run(&variants)?;
    Ok(num_cases)
}

/// Groups of every column count with rows of every count, in several orders.
fn grouped(backend: &Backend, from: DType, to: DType, scaling: Scaling, scale_dtype: DType) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let mut num_cases = 0;
    for (i, columns) in COLUMNS.into_iter().enumerate() {
        let rows = if columns < 1536 { &[129, 0, 1, 17, 0, 128, 255, 15, 16][..] } else { &[17, 0, 130] };
        let mut shapes: Vec<_> = rows.iter().map(|&rows| [rows, columns]).collect();
        shapes.rotate_left(i % rows.len());
        let case = Case { is_grouped: true, scale_dtype, seed: i as u64 + 1, ..Case::new(from, to, shapes, scaling) };
        let (row, column) = (i % 3 != 1, i % 3 != 2);
        num_cases += Case { pad_rows: [1, 16, 32, 128][i % 4], gap: i % 2, reset_amax: i % 2 == 1, row, column, ..case }.run(&variants)?;
    }
    // Rows in eights, so that lower tiles are whole patches of a GPU too, and two tiles beside each other and a patch.
    for (i, (row, column)) in [(true, true), (true, false), (false, true)].into_iter().enumerate() {
        let shapes = [8, 136, 0, 56].map(|rows| [rows, 264]).to_vec();
        num_cases += Case { is_grouped: true, scale_dtype, seed: i as u64 + 9, row, column, ..Case::new(from, to, shapes, scaling) }
            .run(&variants)?;
    }
    for (i, columns) in [808, 700, 1096].into_iter().enumerate() {
        let shapes = LOW_ROWS.map(|rows| [rows, columns]).to_vec();
        let case = Case { is_grouped: true, scale_dtype, seed: i as u64 + 12, ..Case::new(from, to, shapes, scaling) };
        num_cases += Case { pad_rows: [1, 1, 16][i], gap: i % 2, ..case }.run(&variants)?;
    }
    Ok(num_cases)
}

fn current(backend: &Backend, from: DType, to: DType) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let mut num_cases = 0;
    for (i, (epsilon, power_of_two)) in [(0.0, false), (0.0, true), (3.0, false), (1e-40, true)].into_iter().enumerate() {
        let scaling = Scaling::Current { epsilon, power_of_two };
        let shapes: Vec<_> = shapes().into_iter().skip(i).step_by(3).collect();
        let is_prepared = from == DType::BF16;
        num_cases += Case { seed: i as u64, reset_amax: i == 2, is_prepared, ..Case::new(from, to, shapes, scaling) }.run(&variants)?;
        let group = vec![[3, 130], [0, 130], [129, 130], [64, 130], [16, 130]];
        num_cases += Case { is_grouped: true, pad_rows: 16, seed: i as u64 + 3, ..Case::new(from, to, group, scaling) }.run(&variants)?;
        num_cases += in_one_launch(&variants, from, to, scaling, i)?;
    }
    Ok(num_cases)
}

/// Current scaling of matrices so high, and of rows of so many whole vectors, that a GPU may cast them in one launch; the `i`-th of some ways.
fn in_one_launch(variants: &[(String, Backend)], from: DType, to: DType, scaling: Scaling, i: usize) -> Result<usize, Failed> {
    let (row, column) = [(true, true), (true, true), (true, false), (false, true)][i];
    let of = |shapes: Vec<[usize; 2]>| Case { seed: i as u64, reset_amax: i % 2 == 1, row, column, ..Case::new(from, to, shapes, scaling) };
    // Parts of tiles at both ends, and more than one beside each other.
    let list = vec![[300, 264], [0, 264], [129, 8], [400, 520], [64, 1000]];
    let group = [300, 0, 129, 64, 1, 420].map(|rows| [rows, [264, 512, 8, 256][i]]).to_vec();
    let list = Case { is_prepared: true, pad_rows: [1, 16, 128, 32][i], ..of(list) };
    Ok(list.run(variants)? + Case { is_grouped: true, pad_rows: [16, 1, 32, 128][i], ..of(group) }.run(variants)?)
}

/// All 65536 patterns of a 16-bit type, under several scales, to every output type.
fn every_pattern(backend: &Backend, from: DType) -> Result<usize, Failed> {
    let x: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let values = float::values(from, &x);
    let mut num_cases = 0;
    for to in TO {
        let size = to.size();
        for scale in [1.0, -0.37, 1e6, 1e-38, 0.0, f32::INFINITY, f32::NAN] {
            let mut want = Vec::with_capacity(values.len() * size);
            values.iter().for_each(|&x| float::push(to, scale * x, &mut want));
            for (name, backend) in variants(backend)? {
                let (mut row, mut column) = (Guarded::new(want.len()), Guarded::new(want.len()));
                let shape = [256, 256]; // derived: all patterns in one square
                let (held, scales) = (Held::shaped(from, &shape, &x)?, Held::new(DType::F32, &scale.to_le_bytes())?);
                let layout = Layout::contiguous("check", to, &shape)?;
                let matrix = Operands::new(held.view(&backend)?)
                    .scale(scales.view(&backend)?)
                    .row(row.view_mut(&backend, 0, layout)?)
                    .column(column.view_mut(&backend, 0, layout)?);
                cast(&backend, &mut [matrix], &Options::default())?;
                row.fetch(&backend)?;
                column.fetch(&backend)?;
                compare::equal(&format!("{name}: {from} to {to}, scale {scale}"), to, &shape, row.bytes(), &want)?;
                for (i, element) in column.bytes().chunks(size).enumerate() {
                    let of_row = &row.bytes()[(i % 256 * 256 + i / 256) * size..][..size];
                    ensure!(element == of_row, "{name}: {from} to {to}, scale {scale}: transposed element {i}");
                }
                num_cases += 1;
            }
        }
    }
    Ok(num_cases)
}

/// 1 to 1100 matrices, more than are shared out at once, with empty ones among them.
fn many_matrices(backend: &Backend) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let mut num_cases = 0;
    for num in [1, 2, 127, 128, 129, 300, 1100] {
        let rows = |i: usize| if i % 5 == 3 { 0 } else { i % 23 };
        let shapes: Vec<_> = (0..num).map(|i| [rows(i), (i * 7) % 41]).collect();
        num_cases += Case { is_prepared: true, ..Case::new(DType::BF16, DType::E4M3, shapes, Scaling::Given) }.run(&variants)?;
        for scaling in [Scaling::Given, Scaling::Current { epsilon: 0.0, power_of_two: false }, Scaling::deep_gemm(Block::Row128)] {
            let shapes: Vec<_> = (0..num).map(|i| [rows(i), 72]).collect();
            num_cases += Case { is_grouped: true, pad_rows: 16, ..Case::new(DType::BF16, DType::E4M3, shapes, scaling) }.run(&variants)?;
        }
    }
    Ok(num_cases)
}

/// Outputs so long that they are stored past the caches, aligned and not: a sample of rows against one cast alone.
fn past_the_caches(backend: &Backend) -> Result<usize, Failed> {
    let mut num_cases = 0;
    let [rows, columns] = [4096 + 64, 2048 + 128]; // arbitrary, two copies of more than 16 MiB in all
    let x = values(DType::BF16, rows * columns, 1);
    let bytes = rows * columns;
    for (to, offset) in [(DType::E4M3, 0), (DType::E5M2, 0), (DType::E4M3, 1), (DType::BF16, 0)] {
        for (name, backend) in variants(backend)? {
            let mut alone = vec![0; columns * to.size()];
            let [mut row, mut column] = [0, 1].map(|_| Guarded::at_offset(bytes * to.size(), offset));
            let held = Held::shaped(DType::BF16, &[rows, columns], &x)?;
            let matrix = Operands::new(held.view(&backend)?)
                .row(row.view_mut(&backend, 0, Layout::contiguous("check", to, &[rows, columns])?)?)
                .column(column.view_mut(&backend, 0, Layout::contiguous("check", to, &[columns, rows])?)?);
            cast(&backend, &mut [matrix], &Options::default())?;
            row.fetch(&backend)?;
            column.fetch(&backend)?;
            row.check("row")?;
            column.check("column")?;
            let (of_columns, mut transposed) = (column.bytes(), vec![0; row.bytes().len()]);
            let size = to.size();
            for r in 0..rows {
                let source = &x[r * columns * 2..][..columns * 2];
                let matrix = Operands::new(TensorView::from_bytes(source, DType::BF16, &[1, columns])?).row(TensorViewMut::from_bytes(
                    &mut alone,
                    to,
                    &[1, columns],
                )?);
                cast(&Backend::cpu(), &mut [matrix], &Options::default())?;
                compare::equal(
                    &format!("{name}, {to}: row {r}"),
                    to,
                    &[columns],
                    &row.bytes()[r * columns * size..][..columns * size],
                    &alone,
                )?;
                for (c, element) in transposed[r * columns * size..][..columns * size].chunks_mut(size).enumerate() {
                    element.copy_from_slice(&of_columns[(c * rows + r) * size..][..size]);
                }
            }
            ensure!(transposed == row.bytes(), "{name}, {to}: the transposed copy is not the row copy transposed");
            num_cases += 1;
        }
    }
    Ok(num_cases)
}

/// A flag that is not zero leaves every output alone; zero does not.
fn noop(backend: &Backend) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let mut num_cases = 0;
    for flag in [0, 1, u32::MAX] {
        for scaling in [Scaling::Given, Scaling::Current { epsilon: 0.0, power_of_two: false }, Scaling::deep_gemm(Block::Square128)] {
            for is_grouped in [false, true] {
                let case = Case::new(DType::F32, DType::E4M3, vec![[17, 33], [0, 33], [5, 33]], scaling);
                let is_prepared = !is_grouped;
                num_cases += Case { noop: Some(flag), reset_amax: true, is_grouped, is_prepared, pad_rows: 16, ..case }.run(&variants)?;
            }
        }
    }
    Ok(num_cases)
}

/// What holds whatever the oracle says: the transposed copy is the transposed cast, an element is off by at most half a step, padding is zero, and
/// amax is the greatest magnitude.
fn properties(backend: &Backend) -> Result<usize, Failed> {
    let mut num_cases = 0;
    for (name, backend) in variants(backend)? {
        for (seed, [rows, columns]) in [[1, 1], [33, 65], [130, 257], [200, 16]].into_iter().enumerate() {
            let x = values(DType::BF16, rows * columns, 4 * seed as u64); // no special values
            let wide = float::values(DType::BF16, &x);
            let padded = rows.next_multiple_of(16);
            let (mut row, mut column) = (Guarded::new(padded * columns), Guarded::new(padded * columns));
            let (mut amax, mut scale_inv) = (Guarded::new(4), Guarded::new(4));
            amax.bytes_mut().fill(0);
            let held = Held::shaped(DType::BF16, &[rows, columns], &x)?;
            let one = Layout::contiguous("check", DType::F32, &[1])?;
            let matrix = Operands::new(held.view(&backend)?)
                .row(row.view_mut(&backend, 0, Layout::contiguous("check", DType::E4M3, &[padded, columns])?)?)
                .column(column.view_mut(&backend, 0, Layout::contiguous("check", DType::E4M3, &[columns, padded])?)?)
                .amax(amax.view_mut(&backend, 0, one)?)
                .scale_inv(scale_inv.view_mut(&backend, 0, one)?);
            let options = Options { pad_rows: 16, ..Options::with_scaling(Scaling::Current { epsilon: 0.0, power_of_two: false }) };
            cast(&backend, &mut [matrix], &options)?;
            for buffer in [&mut row, &mut column, &mut amax, &mut scale_inv] {
                buffer.fetch(&backend)?;
            }
            let value = |buffer: &Guarded| float::values(DType::F32, buffer.bytes())[0];
            let (amax, scale_inv) = (value(&amax), value(&scale_inv));
            let greatest = wide.iter().fold(0f32, |a, x| a.max(x.abs()));
            ensure!(amax == greatest, "{name}: amax is {amax:?}, the greatest magnitude {greatest}");
            for (r, c) in (0..padded).flat_map(|r| (0..columns).map(move |c| (r, c))) {
                let bits = row.bytes()[r * columns + c];
                ensure!(bits == column.bytes()[c * padded + r], "{name}: element [{r}, {c}] of the transposed copy");
                if r >= rows {
                    ensure!(bits == 0, "{name}: padding [{r}, {c}] is {bits:#x}");
                    continue;
                }
                let (x, got) = (wide[r * columns + c], float::widen(DType::E4M3, bits as u32) * scale_inv);
                // Half a step: 2^-4 of a normal value, 2^-10 of a subnormal one; a little more for the rounding of the scale (derived).
                let bound = (x.abs() / 16.0).max(scale_inv / 1024.0) * (1.0 + 1e-5);
                let is_close = (x - got).abs() <= bound;
                ensure!(is_close, "{name}: element [{r}, {c}] is {got} for {x}");
            }
            num_cases += 1;
        }
    }
    Ok(num_cases)
}
