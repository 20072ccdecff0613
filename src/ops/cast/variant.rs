//! Which kernels cast has: what each is compiled for, and which are shipped.
#![forbid(unsafe_code)]

use super::check::Known;
use super::tuning::{self, LIST_SIZES, Tile};
use super::{Block, Formula, Operands, ScaleLayout, Scaling};
use crate::gpu::{Carveout, Constant, Program, Source, Spec, Targets};
use crate::kernel_source;
use crate::tensor::DType;

macro_rules! sources {
    ($($kernel:literal),*) => {
        &[
            kernel_source!("gpu/device/platform.cuh"),
            kernel_source!("gpu/device/float.cuh"),
            kernel_source!("gpu/device/fp8.cuh"),
            kernel_source!("gpu/device/copy.cuh"),
            kernel_source!("ops/cast/formula.cuh"),
            kernel_source!("ops/cast/patch.cuh"),
            kernel_source!("ops/cast/locate.cuh"),
            $(kernel_source!($kernel)),*
        ]
    };
}
const TILE_SOURCES: &[Source] = sources!("ops/cast/find_by_block.cuh", "ops/cast/tile.cu");
const MATRICES_SOURCES: &[Source] = sources!("ops/cast/matrices.cu");
const RESIDENT_SOURCES: &[Source] = sources!("gpu/device/grid.cuh", "ops/cast/resident.cu");
const BLOCK_SOURCES: &[Source] = sources!("ops/cast/find_by_slot.cuh", "ops/cast/block.cu");

/// Threads of a block of `cast_matrices` (arbitrary, as in matrices.cu).
pub(super) const MATRIX_THREADS: u32 = 128;

/// Everything that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    pub(super) kind: Kind,
    pub(super) from: DType,
    pub(super) to: DType,
    pub(super) form: Form,
    pub(super) scales: Scales,
    pub(super) tile: Tile,
}

/// How a kernel learns of its matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Form {
    /// One buffer and offsets.
    Group,
    /// A list of at most so many matrices in its parameters.
    List(u16),
    /// A list in device memory.
    Table,
}

impl Form {
    fn name(self) -> String {
        match self {
            Form::Group => "grouped".into(),
            Form::List(num) => format!("list of {num}"),
            Form::Table => "table".into(),
        }
    }

    fn max_matrices(self) -> u16 {
        if let Form::List(num) = self { num } else { 1 }
    }
}

/// Where scales come from, as far as kernels differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Scales {
    Given,
    /// From the matrices' own greatest magnitudes.
    Current,
    Blocks {
        block: Block,
        formula: Formulas,
        stored: Stored,
    },
}

/// `Formula` of formula.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Formulas {
    TransformerEngine,
    DeepGemm,
    DeepGemmPowerOfTwo,
    Mx,
}

impl Formulas {
    fn of(formula: Formula) -> Self {
        match formula {
            Formula::TransformerEngine { .. } => Formulas::TransformerEngine,
            Formula::DeepGemm { power_of_two: false } => Formulas::DeepGemm,
            Formula::DeepGemm { power_of_two: true } => Formulas::DeepGemmPowerOfTwo,
            Formula::Mx => Formulas::Mx,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Formulas::TransformerEngine => "TRANSFORMER_ENGINE",
            Formulas::DeepGemm => "DEEP_GEMM",
            Formulas::DeepGemmPowerOfTwo => "DEEP_GEMM_POWER_OF_TWO",
            Formulas::Mx => "MX",
        }
    }
}

/// `Stored` of locate.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stored {
    RowMajorF32 = 0,
    RowMajorE8m0 = 1,
    ColumnMajorF32 = 2,
    ColumnMajorE8m0 = 3,
    Packed = 4,
}

impl Stored {
    fn of(layout: ScaleLayout, dtype: DType) -> Self {
        match (layout, dtype) {
            (ScaleLayout::PackedE8m0, _) => Stored::Packed,
            (ScaleLayout::RowMajor, DType::F32) => Stored::RowMajorF32,
            (ScaleLayout::RowMajor, _) => Stored::RowMajorE8m0,
            (ScaleLayout::ColumnMajor, DType::F32) => Stored::ColumnMajorF32,
            (ScaleLayout::ColumnMajor, _) => Stored::ColumnMajorE8m0,
        }
    }
}

impl Scales {
    pub(super) fn of(known: &Known, o: &Operands<'_>) -> Self {
        match known.scaling {
            Scaling::Given => Scales::Given,
            Scaling::Current { .. } => Scales::Current,
            Scaling::Block { block, formula, layout } => {
                let dtype = o.row_scales.as_ref().or(o.column_scales.as_ref()).map_or(DType::F32, |scales| scales.dtype());
                Scales::Blocks { block, formula: Formulas::of(formula), stored: Stored::of(layout, dtype) }
            }
        }
    }

    fn name(self) -> String {
        match self {
            Scales::Given => "given scale".into(),
            Scales::Current => "current scale".into(),
            Scales::Blocks { block, formula, stored } => {
                let (lines, length) = block.extents();
                format!("{lines}x{length} {} {stored:?}", formula.name().to_lowercase())
            }
        }
    }

    pub(super) fn tile(self, from: DType, to: DType, is_native: bool, mean_rows: usize) -> Tile {
        match self {
            Scales::Blocks { .. } => tuning::block_tile(from, is_native),
            Scales::Given | Scales::Current => tuning::tile(from, to, is_native, mean_rows),
        }
    }

    /// Of the columns of a part. With block scales they leave without shared memory.
    pub(super) fn smem_bytes(self, tile: Tile, to: DType, has_column: bool) -> u32 {
        if has_column && !matches!(self, Scales::Blocks { .. }) { tile.smem_bytes(to) } else { 0 }
    }
}

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// What is done once a matrix, before its tiles.
    Before,
    /// And after them.
    After,
    Tiles {
        row: bool,
        column: bool,
        aligned: bool,
    },
    /// All that current scaling takes, in one launch of blocks that run at the same time.
    Resident {
        row: bool,
        column: bool,
    },
}

impl Kind {
    /// What is done once a matrix knows no tiles: one kernel is enough.
    pub(super) fn tile(self, tile: Tile) -> Tile {
        if matches!(self, Kind::Tiles { .. } | Kind::Resident { .. }) { tile } else { tuning::NO_TILE }
    }
}

impl Spec for Variant {
    fn program(&self) -> Program {
        let Variant { kind, from, to, form, scales, tile } = *self;
        let (block_lines, block_length, stored) = match scales {
            Scales::Blocks { block, stored, .. } => (block.extents().0, block.extents().1, stored as i64),
            Scales::Given | Scales::Current => (0, 0, 0),
        };
        let (row, column, aligned) = match kind {
            Kind::Tiles { row, column, aligned } => (row, column, aligned),
            Kind::Resident { row, column } => (row, column, true),
            Kind::Before | Kind::After => (false, false, false),
        };
        let mut constants = vec![
            Constant::Type("FROM", from.name()),
            Constant::Type("TO", to.name()),
            Constant::Bool("ROW", row),
            Constant::Bool("COLUMN", column),
            Constant::Bool("LIST", form != Form::Group),
            Constant::Bool("TABLE", form == Form::Table),
            Constant::Bool("CURRENT", scales == Scales::Current),
            Constant::Int("BLOCK_LINES", block_lines as i64),
            Constant::Int("BLOCK_LENGTH", block_length as i64),
            Constant::Int("STORED", stored),
            Constant::Int("TILE_ROWS", tile.rows.into()),
            Constant::Int("TILE_COLUMNS", tile.columns.into()),
            Constant::Int("TILES_DOWN", tile.down.into()),
            Constant::Int("STACK", tile.stack.into()),
            Constant::Int("TAIL_TILES", tile.tail.into()),
            Constant::Int("MAX_MATRICES", form.max_matrices().into()),
        ];
        let (types, scale, form) = (format!("{from} to {to}"), scales.name(), form.name());
        if let Kind::Before | Kind::After = kind {
            constants.push(Constant::Bool("FINISH", kind == Kind::After));
            return Program {
                name: format!("cast matrices {types}, {}, {scale}, {form}", if kind == Kind::After { "after" } else { "before" }),
                entry: "cast_matrices",
                sources: MATRICES_SOURCES,
                constants,
                threads: MATRIX_THREADS,
                smem_bytes: 0,
                max_registers: 64, // arbitrary: short
                carveout: Carveout::Shared,
                targets: Targets::All,
            };
        }
        constants.extend([Constant::Int("BLOCKS", tile.blocks.into()), Constant::Bool("ALIGNED", aligned)]);
        let copies = match (row, column) {
            (true, true) => "both",
            (true, false) => "row",
            (false, true) => "column",
            (false, false) => "amax",
        };
        let Tile { rows, columns, down, blocks, .. } = tile;
        if let Kind::Resident { .. } = kind {
            constants.extend([
                Constant::Int("SLOTS", tuning::RESIDENT_SLOTS as i64),
                Constant::Int("MAX_TILES", tuning::RESIDENT_MAX_TILES as i64),
                Constant::Int("MAX_MEASURED", tuning::RESIDENT_MAX_MATRICES as i64),
            ]);
            return Program {
                name: format!("cast resident {types}, {copies}, {scale}, {form} {rows}x{columns}, {blocks} resident"),
                entry: "cast_resident",
                sources: RESIDENT_SOURCES,
                constants,
                threads: tile.threads(),
                smem_bytes: tuning::resident_smem_bytes(from),
                max_registers: tile.max_registers(),
                carveout: Carveout::Shared,
                targets: Targets::Hopper,
            };
        }
        let unaligned = if aligned { "" } else { ", unaligned" };
        let (entry, sources) = match scales {
            Scales::Blocks { formula, .. } => {
                constants.push(Constant::Int("FORMULA", formula as i64));
                ("cast_blocks", BLOCK_SOURCES)
            }
            Scales::Given | Scales::Current => ("cast_tile", TILE_SOURCES),
        };
        Program {
            name: format!("cast tiles {types}, {copies}, {scale}, {form}{unaligned} {rows}x{columns}x{down}, {blocks} resident"),
            entry,
            sources,
            constants,
            threads: tile.threads(),
            smem_bytes: scales.smem_bytes(tile, to, column),
            max_registers: tile.max_registers(),
            // Block scales read the input twice, the second time from the first-level cache (measured: H200, 0.87 of the copy; with a quarter for shared memory 0.69).
            carveout: if matches!(scales, Scales::Blocks { .. }) { Carveout::Cache } else { Carveout::Shared },
            // Tiles that count on instructions for FP8 are for where they are.
            targets: if to.is_fp8() && tile.blocks > 1 { Targets::Hopper } else { Targets::All },
        }
    }
}

/// The kernels that the table of resources lists.
pub(super) fn shipped() -> Vec<Variant> {
    let mut all: Vec<Variant> = Vec::new();
    let both = Kind::Tiles { row: true, column: true, aligned: true };
    let mut add = |kind: Kind, from: DType, to: DType, form: Form, scales: Scales, is_native: bool| {
        // High matrices and low ones.
        for mean_rows in [usize::MAX, 0] {
            let variant = Variant { kind, from, to, form, scales, tile: kind.tile(scales.tile(from, to, is_native, mean_rows)) };
            if !all.contains(&variant) {
                all.push(variant);
            }
        }
    };
    let hopper = (9, 0);
    for from in [DType::BF16, DType::F16, DType::F32] {
        for to in [DType::E4M3, DType::E5M2, DType::E4M3Fnuz, DType::E5M2Fnuz, DType::F16, DType::BF16, DType::F32] {
            add(both, from, to, Form::Group, Scales::Given, false);
            add(both, from, to, Form::Group, Scales::Given, tuning::is_native(hopper, to));
        }
    }
    let (from, to) = (DType::BF16, DType::E4M3);
    for is_native in [true, false] {
        for list in LIST_SIZES {
            add(both, from, to, Form::List(list as u16), Scales::Given, is_native);
        }
        add(both, from, to, Form::Table, Scales::Given, is_native);
        for (row, column) in [(true, false), (false, true)] {
            add(Kind::Tiles { row, column, aligned: true }, from, to, Form::Group, Scales::Given, is_native);
        }
        add(Kind::Tiles { row: false, column: false, aligned: true }, from, to, Form::Group, Scales::Current, is_native);
        add(Kind::Tiles { row: true, column: true, aligned: false }, from, to, Form::Group, Scales::Given, is_native);
        add(both, from, to, Form::Group, Scales::Current, is_native);
    }
    for kind in [Kind::Before, Kind::After] {
        add(kind, from, to, Form::Group, Scales::Current, true);
    }
    add(Kind::Before, from, to, Form::List(LIST_SIZES[2] as u16), Scales::Given, true);
    add(Kind::Before, from, to, Form::Table, Scales::Given, true);
    for (block, formula, stored) in [
        (Block::Row128, Formulas::TransformerEngine, Stored::ColumnMajorF32),
        (Block::Row128, Formulas::DeepGemm, Stored::ColumnMajorF32),
        (Block::Row128, Formulas::DeepGemmPowerOfTwo, Stored::Packed),
        (Block::Square128, Formulas::TransformerEngine, Stored::RowMajorF32),
        (Block::Square128, Formulas::DeepGemm, Stored::RowMajorF32),
        (Block::Row32, Formulas::Mx, Stored::RowMajorE8m0),
    ] {
        let scales = Scales::Blocks { block, formula, stored };
        for is_native in [true, false] {
            add(both, from, to, Form::Group, scales, is_native);
        }
        add(both, DType::F32, to, Form::Group, scales, true);
        for form in [Form::List(LIST_SIZES[2] as u16), Form::Table] {
            add(both, from, to, form, scales, true);
        }
    }
    for form in [Form::Group, Form::List(LIST_SIZES[0] as u16), Form::Table] {
        let kind = Kind::Resident { row: true, column: true };
        all.push(Variant { kind, from, to, form, scales: Scales::Current, tile: tuning::RESIDENT_TILE });
    }
    all
}
