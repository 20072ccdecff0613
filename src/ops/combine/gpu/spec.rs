//! What the kernels of combine are compiled for.
#![forbid(unsafe_code)]

use crate::ep::device::shape::{Shape, Uses, ep_sources};
use crate::ep::device::tuning::{Split, registers};
use crate::ep::{Config, Plan, Reduce, Wire};
use crate::gpu::{Carveout, Constant, Kernels, Program, Source, Targets};
use crate::tensor::DType;

pub(super) static KERNELS: Kernels<Spec> = Kernels::new();

const PREPARE: &[Source] = ep_sources!("ops/combine/wire.cuh", "ops/combine/prepare.cu");
const SEND: &[Source] = ep_sources!("ops/combine/send.cu");
const COMBINE: &[Source] = ep_sources!("ops/combine/wire.cuh", "ops/combine/combine.cu");

/// A kernel of combine, with everything that it is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Spec {
    pub shape: Shape,
    pub threads: u16,
    pub kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// `parts` warps of a row; without rows only weights are folded back.
    Prepare {
        row: Row,
        parts: u16,
        with_rows: bool,
    },
    /// Says that rows are ready; with `waits` also waits until those of the peers are.
    Send {
        waits: bool,
    },
    Combine {
        row: Row,
        add: Add,
        folds: bool,
        split: Split,
        max_group: u16,
        stream: bool,
        with_signals: bool,
    },
}

impl Kind {
    /// What the sources say.
    pub fn uses(&self, shape: &Shape) -> Uses {
        match self {
            Kind::Prepare { row, .. } => Uses { k: row.sums, ..Uses::NOTHING },
            Kind::Send { .. } => Uses { words: true, ..Uses::NOTHING },
            // By token only weights that are folded back ask for the owner of a route.
            Kind::Combine { folds, .. } => {
                let owners = shape.is_by_expert() || *folds;
                Uses { k: true, words: true, fixed: false, owners, local_ids: false, may_drop: true }
            }
        }
    }
}

/// A row of y, as experts write it and as it travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Row {
    pub hidden: u32,
    /// Type of y and of the result.
    pub value: DType,
    pub form: Form,
    pub wire_bytes: u32,
    pub row_k: u8,
    /// Sums of a token's rows are made where its experts are.
    pub sums: bool,
    pub weighted: bool,
}

/// How a row travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Form {
    /// In the type of y.
    AsIs,
    /// f32 sums.
    F32,
    Fp8Direct,
    Fp8Block,
}

/// What is added last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Add {
    Nothing = 0,
    /// Rows in the type of the result.
    Value = 1,
    F32 = 2,
}

impl Row {
    /// Of a configuration within the limits of a [`DeviceLayout`](crate::ep::device::memory::DeviceLayout).
    pub fn new(c: &Config, p: &Plan) -> Self {
        let by_expert = c.layout.is_by_expert();
        let form = match (c.wire, c.reduce) {
            (Wire::Fp8Direct, _) => Form::Fp8Direct,
            (Wire::Fp8Block, _) => Form::Fp8Block,
            (Wire::AsIs, Reduce::AtRankF32) if by_expert && c.combine_dtype != DType::F32 => Form::F32,
            (Wire::AsIs, _) => Form::AsIs,
        };
        Row {
            hidden: c.hidden as u32,
            value: c.combine_dtype,
            form,
            wire_bytes: if form == Form::AsIs { p.expert_row_bytes as u32 } else { p.wire_row_bytes as u32 },
            row_k: p.row_k as u8,
            sums: by_expert && c.reduce != Reduce::AtSource,
            weighted: c.weighted,
        }
    }

    /// Whether rows travel from the wire region, and not from where experts write them.
    pub fn is_converted(&self) -> bool {
        self.form != Form::AsIs
    }

    /// Vectors of 16 bytes of the result.
    pub fn num_vectors(&self) -> u32 {
        self.hidden * self.value.size() as u32 / 16
    }

    /// Words of a row on its way that make a vector of the result.
    pub fn piece_words(&self) -> u32 {
        let values = 16 / self.value.size() as u32;
        match self.form {
            Form::AsIs => 4,
            Form::F32 => values,
            Form::Fp8Direct => values / 4,
            Form::Fp8Block => values / 4 + 1,
        }
    }

    /// Type of an element on its way.
    fn wire(&self) -> &'static str {
        match self.form {
            Form::AsIs => self.value.name(),
            Form::F32 => "f32",
            Form::Fp8Direct | Form::Fp8Block => "u8",
        }
    }

    fn constants(&self) -> [Constant; 6] {
        [
            Constant::Int("HIDDEN", self.hidden.into()),
            Constant::Type("Value", self.value.name()),
            Constant::Type("Wire", self.wire()),
            Constant::Bool("BLOCK_SCALES", self.form == Form::Fp8Block),
            Constant::Int("ROW_K", self.row_k.into()),
            Constant::Bool("WEIGHTED", self.weighted),
        ]
    }

    fn text(&self) -> String {
        let form = match self.form {
            Form::AsIs => "",
            Form::F32 => " as f32",
            Form::Fp8Direct => " as fp8",
            Form::Fp8Block => " as fp8 blocks",
        };
        format!("{} {}{form}{}", self.hidden, self.value, if self.weighted { ", weighted" } else { "" })
    }
}

impl crate::gpu::Spec for Spec {
    fn program(&self) -> Program {
        let Spec { shape, threads, kind } = *self;
        let mut constants = shape.constants();
        constants.push(Constant::Int("THREADS", threads.into()));
        let int = |name, value: u32| Constant::Int(name, value.into());
        let (entry, sources, what, most) = match kind {
            Kind::Prepare { row, parts, with_rows } => {
                constants.extend(row.constants());
                constants.extend([
                    int("OUT_ROW_BYTES", row.wire_bytes),
                    Constant::Bool("SUMS", row.sums),
                    int("PARTS", parts.into()),
                    Constant::Bool("WITH_ROWS", with_rows),
                ]);
                let sums = if row.sums { ", sums" } else { "" };
                let rows = if with_rows { "" } else { ", weights only" };
                ("prepare", PREPARE, format!(", {}{sums}, {parts} parts{rows}", row.text()), 128)
            }
            Kind::Send { waits } => {
                constants.push(Constant::Bool("WAITS", waits));
                ("send", SEND, if waits { ", waits".into() } else { String::new() }, 40)
            }
            Kind::Combine { row, add, folds, split, max_group, stream, with_signals } => {
                let each_route = shape.is_by_expert() && !row.sums;
                constants.extend(row.constants());
                constants.extend([
                    int("WIRE_ROW_BYTES", row.wire_bytes),
                    Constant::Bool("EACH_ROUTE", each_route),
                    Constant::Bool("FOLDS", folds),
                    Constant::Bool("MAY_DROP", shape.may_drop),
                    Constant::Bool("HAS_ADD", add != Add::Nothing),
                    Constant::Type("Addend", if add == Add::F32 { "f32" } else { row.value.name() }),
                    int("MAX_GROUP", max_group.into()),
                    int("PARTS", split.parts.into()),
                    int("UNROLL", split.unroll.into()),
                    Constant::Bool("STREAM", stream),
                    Constant::Bool("WITH_SIGNALS", with_signals),
                ]);
                let add = match add {
                    Add::Nothing => "",
                    Add::Value => ", add",
                    Add::F32 => ", add f32",
                };
                let mut what = format!(", {}{add}, {split} of {max_group}", row.text());
                for (is_so, text) in
                    [(each_route, ", each route"), (folds, ", folds"), (stream, ", streaming"), (!with_signals, ", no signals")]
                {
                    what.push_str(if is_so { text } else { "" });
                }
                ("combine", COMBINE, what, 255)
            }
        };
        Program {
            name: format!("combine {entry} {shape}{what}, {threads} threads"),
            entry,
            sources,
            constants,
            threads: threads.into(),
            smem_bytes: 0,
            max_registers: registers(threads.into()).min(most),
            carveout: Carveout::Shared,
            targets: Targets::All,
        }
    }
}

/// The kernels that the table of resources lists: what 7168 bf16, top-8 of 256, choose among at 2 and 8 ranks; then each wire, reduction and addend once.
pub(crate) fn shipped() -> Vec<Spec> {
    use super::tuning::Choice;
    use crate::ep::device::tuning::{Class, Tuning};
    use crate::ep::{Layout, Overflow};
    let base = || Config::new(7168, DType::BF16, 256, 8, 4096);
    let mut all: Vec<Spec> = Vec::new();
    let mut add = |config: Config, world: usize, of: &dyn Fn(&Choice) -> Vec<Spec>| {
        // Configurations that a plan accepts (a test says so).
        let Ok(plan) = config.plan(world) else { return };
        let choice = Choice::new(&config, &plan, 1, Tuning::default());
        for spec in of(&choice) {
            if !all.contains(&spec) {
                all.push(spec);
            }
        }
    };
    let plain = |c: &Choice, class: Class| c.combine(class, Add::Nothing, false);
    let prepared = |c: &Choice| vec![c.prepare(Class::Many, true), plain(c, Class::Many)];
    add(base(), 2, &|c| vec![plain(c, Class::Some), plain(c, Class::Many)]);
    add(base(), 8, &|c| Class::ALL.map(|class| plain(c, class)).to_vec());
    add(base(), 8, &|c| vec![c.combine(Class::Some, Add::Value, false), c.combine(Class::Many, Add::F32, false)]);
    add(base(), 8, &|c| vec![c.send(false), c.send(true), c.prepare(Class::Many, true)]);
    add(Config { wire: Wire::Fp8Direct, ..base() }, 8, &prepared);
    add(Config { wire: Wire::Fp8Block, ..base() }, 8, &|c| {
        vec![c.prepare(Class::Some, true), c.prepare(Class::Many, true), plain(c, Class::Many)]
    });
    let folding = Config { fold_weights: true, overflow: Overflow::Drop, ..base() };
    add(folding, 8, &|c| vec![c.prepare(Class::Few, false), c.combine(Class::Many, Add::Nothing, true)]);
    let by_expert = Config { layout: Layout::ByExpert { segment_align: 128 }, ..base() };
    add(Config { weighted: true, ..by_expert.clone() }, 8, &prepared);
    add(Config { reduce: Reduce::AtRankF32, ..by_expert.clone() }, 8, &prepared);
    let at_source = Config { reduce: Reduce::AtSource, weighted: true, ..by_expert.clone() };
    add(at_source, 8, &|c| vec![plain(c, Class::Some), plain(c, Class::Many)]);
    // The most ranks and routes that the tables are made for.
    let largest = Config { k: 32, reduce: Reduce::AtSource, fold_weights: true, ..by_expert };
    add(largest, 64, &|c| vec![c.combine(Class::Many, Add::F32, true)]);
    add(Config { k: 32, ..base() }, 64, &|c| vec![plain(c, Class::Many)]);
    add(Config { wire: Wire::Fp8Block, ..Config::new(4096, DType::F32, 64, 6, 4096) }, 4, &prepared);
    // Rows that lanes do not divide.
    add(Config { wire: Wire::Fp8Block, ..Config::new(2880, DType::F16, 32, 4, 4096) }, 4, &|c| vec![plain(c, Class::Many)]);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ep::Layout;
    use crate::gpu::Spec as _;

    #[test]
    fn names_tell_kernels_apart() {
        let programs: Vec<Program> = shipped().iter().map(Spec::program).collect();
        assert!((20..=30).contains(&programs.len()), "{} programs", programs.len());
        for (i, a) in programs.iter().enumerate() {
            for b in &programs[..i] {
                assert!(a.name != b.name, "{} twice", a.name);
                assert!(a.text() != b.text(), "{} and {} are one", a.name, b.name);
            }
        }
        for entry in ["prepare", "send", "combine"] {
            assert!(programs.iter().any(|program| program.entry == entry), "{entry}");
        }
    }

    #[test]
    fn forms_follow_the_configuration() {
        let row = |config: &Config| Row::new(config, &config.plan(2).unwrap());
        let base = Config::new(256, DType::BF16, 8, 2, 16);
        let plain = row(&base);
        assert_eq!(
            (plain.form, plain.wire_bytes, plain.sums, plain.is_converted(), plain.piece_words()),
            (Form::AsIs, 512, false, false, 4)
        );
        let block = row(&Config { wire: Wire::Fp8Block, ..base.clone() });
        assert_eq!((block.form, block.wire_bytes, block.piece_words()), (Form::Fp8Block, 272, 3));
        let by_expert = Config { layout: Layout::ByExpert { segment_align: 1 }, reduce: Reduce::AtRankF32, ..base };
        let sums = row(&by_expert);
        assert_eq!((sums.form, sums.wire_bytes, sums.sums, sums.row_k), (Form::F32, 1024, true, 1));
        // f32 sums of f32 rows are no conversion.
        let same = row(&Config { combine_dtype: DType::F32, ..by_expert.clone() });
        assert_eq!((same.form, same.wire_bytes, same.is_converted()), (Form::AsIs, 1024, false));
        let source = row(&Config { reduce: Reduce::AtSource, ..by_expert });
        assert_eq!((source.form, source.sums), (Form::AsIs, false));
    }
}
