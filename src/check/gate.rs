//! Checks of the shared-expert gate.

use half::{bf16, f16};

use crate::backend::Backend;
use crate::check::guarded::{Guarded, POISON};
use crate::check::{Failed, Group, variants};
use crate::ensure;
use crate::id::Expert;
use crate::ops::gate::{Activation, GateOptions, Rounding, gate, gate_append_topk, gate_mul, gate_mul_add, sigmoid_mul};
use crate::oracle::{compare, float, gate as oracle};
use crate::random::SplitMix64;
use crate::tensor::{DType, Layout, TensorView, TensorViewMut};

/// Types of x and w, and of s and g.
pub(super) const DTYPES: [(DType, DType); 5] =
    [(DType::BF16, DType::BF16), (DType::BF16, DType::F32), (DType::F16, DType::F16), (DType::F16, DType::F32), (DType::F32, DType::F32)];
pub(super) const ROUNDINGS: [Rounding; 2] = [Rounding::Fused, Rounding::Framework];

/// Around the numbers that the order of the sum is made of (8, 256, 8192), the widths of vectors, and usual hidden sizes.
const KS: [usize; 18] = [0, 1, 7, 8, 9, 31, 32, 255, 256, 257, 2047, 2048, 2049, 4096, 8191, 8192, 8193, 65536 + 3];
/// Around the rows that a backend takes at once.
const TS: [usize; 7] = [0, 1, 2, 3, 5, 8, 64 + 1];
/// T and K for which a GPU spreads rows differently: one row over a block, a cluster in one pass and in several, a block in several passes; many
/// short rows, several to a block, and many of a usual length.
const SPREADS: [(usize, usize); 6] = [(1, 16_384), (2, 20_000), (1, 140_000), (20, 40_000), (300, 40), (300, 2048)];
/// Around the widths of vectors.
const NS: [usize; 9] = [0, 1, 7, 8, 15, 16, 17, 33, 100];

/// Every group of this operation.
pub fn groups() -> Vec<Group> {
    let mut groups = Vec::new();
    for (first, second) in DTYPES {
        for rounding in ROUNDINGS {
            let case = Case { x_dtype: first, w_dtype: second, rounding };
            let mut push = |form: &str, sizes: fn() -> Vec<Sizes>, run: fn(Case, &Backend, Sizes) -> Result<(), Failed>| {
                let name = format!("{form} {first} {second} {}", format!("{rounding:?}").to_lowercase());
                groups.push(Group::new("gate", name, move |backend| case.all(backend, sizes(), run)));
            };
            push("gate", long_sizes, Case::gate);
            push("gate_mul", wide_sizes, Case::gate_mul::<false>);
            push("gate_mul_add", wide_sizes, Case::gate_mul::<true>);
            push("gate_append_topk", top_k_sizes, Case::append_topk);
            push("sigmoid_mul", wide_sizes, Case::sigmoid_mul);
        }
        groups.push(Group::new("gate", format!("a row alone {first} {second}"), move |backend| a_row_alone(backend, first, second)));
    }
    groups
}

/// T, K and N of one case, and which it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) t: usize,
    pub(super) k: usize,
    pub(super) n: usize,
    pub(super) case_idx: usize,
}

pub(super) fn sizes(all: impl Iterator<Item = (usize, usize, usize)>) -> Vec<Sizes> {
    all.enumerate().map(|(case_idx, (t, k, n))| Sizes { t, k, n, case_idx }).collect()
}

/// Every K with every T, but few rows of the longest, to keep the scalar level and the oracle short.
fn long_sizes() -> Vec<Sizes> {
    let enough = |t: usize, k: usize| t * k <= 65 * 2049 || t <= 5 && k <= 8193 || t <= 2;
    sizes(KS.into_iter().flat_map(|k| TS.into_iter().filter(move |&t| enough(t, k)).map(move |t| (t, k, 1))).chain(spreads(1)))
}

/// Every N with every T; the last one is long enough for several threads.
fn wide_sizes() -> Vec<Sizes> {
    let ks = [0, 9, 64, 300];
    let all = NS.into_iter().enumerate().flat_map(|(i, n)| TS.into_iter().map(move |t| (t, ks[(i + t) % ks.len()], n)));
    // 264: a vector more than 32 lanes take; 5000: more than a GPU's threads take at once.
    sizes(all.chain([(65, 9, 700)]).chain(spreads(264)).chain([(1, 2048, 5000); 2]))
}

/// Each of [`SPREADS`] twice in a row: every second case is strided.
fn spreads(n: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    SPREADS.into_iter().flat_map(move |(t, k)| [(t, k, n); 2])
}

/// N is the number of routed experts of a token.
fn top_k_sizes() -> Vec<Sizes> {
    let all = [0, 1, 4, 8, 10].into_iter().flat_map(|n| TS.into_iter().map(move |t| (t, 40 + t, n)));
    sizes(all.chain([(65, 2049, 8)]))
}

/// What all cases of a group share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) x_dtype: DType,
    pub(super) w_dtype: DType,
    pub(super) rounding: Rounding,
}

/// Options that change from case to case, each with a period of its own, so that all meet.
pub(super) struct Options {
    activation: Activation,
    scale: f32,
    bias: Option<Matrix>,
    addend: Option<Matrix>,
    pub(super) strided: bool,
    weights_are_constant: bool,
}

impl Case {
    pub(super) fn all(
        self,
        backend: &Backend,
        sizes: Vec<Sizes>,
        run: fn(Self, &Backend, Sizes) -> Result<(), Failed>,
    ) -> Result<usize, Failed> {
        let mut num_cases = 0;
        for (name, backend) in variants(backend)? {
            for &sizes in &sizes {
                run(self, &backend, sizes).map_err(|failed| Failed(format!("{name}, {self:?}, {sizes:?}: {}", failed.0)))?;
                num_cases += 1;
            }
        }
        Ok(num_cases)
    }

    pub(super) fn options(self, sizes: Sizes) -> Options {
        let Sizes { t, case_idx, .. } = sizes;
        let types = [self.x_dtype, DType::F32];
        let mut random = SplitMix64::stream(7, case_idx as u64);
        let bias = (case_idx % 3 == 1).then(|| Matrix::new(types[case_idx % 2], 1, 1, false, Kind::Plain, &mut random));
        // Many rows come in batches and parts: there the addend of the right row must be found every time.
        let addend = (case_idx % 4 == 1 || t > 8)
            .then(|| Matrix::new(types[case_idx / 4 % 2], t, 1, case_idx % 8 % 3 == 1, Kind::WideRange, &mut random));
        Options {
            activation: if case_idx % 7 % 2 == 1 { Activation::Linear } else { Activation::Sigmoid },
            scale: [1.0, 2.5, 0.37][case_idx / 2 % 3],
            bias,
            addend,
            strided: case_idx % 2 == 1,
            weights_are_constant: case_idx % 5 % 2 == 1,
        }
    }

    /// x and w, with the kind of numbers that is this case's turn.
    pub(super) fn inputs(self, sizes: Sizes, strided: bool) -> (Matrix, Matrix) {
        let kind = [Kind::Plain, Kind::WideRange, Kind::Special, Kind::NegativeZero, Kind::Positive][sizes.case_idx % 5];
        let mut random = SplitMix64::stream(1, sizes.case_idx as u64);
        let x = Matrix::new(self.x_dtype, sizes.t, sizes.k, strided, kind, &mut random);
        let w_kind = match kind {
            // The sigmoid of a large negative dot is 0.
            Kind::Positive => Kind::Negative,
            // Every product is -0, and the dot +0.
            Kind::NegativeZero => Kind::Positive,
            _ => Kind::WideRange,
        };
        (x, Matrix::new(self.w_dtype, 1, sizes.k, false, w_kind, &mut random))
    }

    fn gate(self, backend: &Backend, sizes: Sizes) -> Result<(), Failed> {
        let options = self.options(sizes);
        let (x, w) = self.inputs(sizes, options.strided);
        let out_dtype = if sizes.case_idx % 6 < 3 { self.x_dtype } else { DType::F32 };
        let want = oracle::gate(&self.oracle_gates(sizes, &x, &w, &options), out_dtype);
        let mut out = Output::new(out_dtype, sizes.t, 1, sizes.case_idx % 4 >= 2);
        let w = w.vector_view(backend, sizes.case_idx % 3 == 1)?;
        gate(backend, x.view(backend)?, w, &self.gate_options(backend, &options)?, out.column_view(backend)?)?;
        out.check(backend, "out", &want)
    }

    fn gate_mul<const ADD: bool>(self, backend: &Backend, sizes: Sizes) -> Result<(), Failed> {
        let options = self.options(sizes);
        let (x, w) = self.inputs(sizes, options.strided);
        let mut random = SplitMix64::stream(2, sizes.case_idx as u64);
        let s_dtype = if sizes.case_idx % 6 < 3 { self.x_dtype } else { DType::F32 };
        let s = Matrix::new(s_dtype, sizes.t, sizes.n, !options.strided, Kind::Special, &mut random);
        let before = Matrix::new(s_dtype, sizes.t, sizes.n, false, Kind::Plain, &mut random);
        let gates = self.oracle_gates(sizes, &x, &w, &options);
        let mut out = Output::new(s_dtype, sizes.t, sizes.n, sizes.case_idx % 4 >= 2);
        let (w_view, gate_options) = (w.vector_view(backend, false)?, self.gate_options(backend, &options)?);
        if ADD {
            out.fill(&before.contiguous());
            gate_mul_add(backend, x.view(backend)?, w_view, s.view(backend)?, &gate_options, out.view(backend)?)?;
            out.check(backend, "out", &oracle::gate_mul_add(&gates, &s.values, s_dtype, &before.values))
        } else {
            gate_mul(backend, x.view(backend)?, w_view, s.view(backend)?, &gate_options, out.view(backend)?)?;
            out.check(backend, "out", &oracle::gate_mul(&gates, &s.values, s_dtype))
        }
    }

    fn append_topk(self, backend: &Backend, sizes: Sizes) -> Result<(), Failed> {
        let Sizes { t, n: top_k, case_idx, .. } = sizes;
        let options = self.options(sizes);
        let (x, w) = self.inputs(sizes, options.strided);
        let idx_dtype = if case_idx % 2 == 1 { DType::I32 } else { DType::I64 };
        let shared_expert = 60 + case_idx as u32;
        let (weights, ids) = oracle::gate_append_topk(&self.oracle_gates(sizes, &x, &w, &options), shared_expert);
        // The routed choice is there before, and must be there after.
        let mut want_idx = vec![0x11; t * (top_k + 1) * idx_dtype.size()];
        let mut want_weights = vec![0x22; t * (top_k + 1) * 4];
        let mut idx = Output::new(idx_dtype, t, top_k + 1, case_idx % 4 >= 2);
        let mut topk_weights = Output::new(DType::F32, t, top_k + 1, case_idx % 8 >= 4);
        idx.fill(&want_idx);
        topk_weights.fill(&want_weights);
        for (row, id) in want_idx.chunks_mut((top_k + 1) * idx_dtype.size()).zip(ids) {
            row[top_k * idx_dtype.size()..].copy_from_slice(&id.to_le_bytes()[..idx_dtype.size()]);
        }
        for (row, weight) in want_weights.chunks_mut((top_k + 1) * 4).zip(weights) {
            row[top_k * 4..].copy_from_slice(&weight.to_le_bytes());
        }
        let gate_options = self.gate_options(backend, &options)?;
        let (w, expert) = (w.vector_view(backend, false)?, Expert(shared_expert));
        gate_append_topk(backend, x.view(backend)?, w, expert, &gate_options, idx.view(backend)?, topk_weights.view(backend)?)?;
        idx.check(backend, "topk_idx", &want_idx)?;
        topk_weights.check(backend, "topk_weights", &want_weights)
    }

    /// The group's first type is that of s, the second that of g.
    fn sigmoid_mul(self, backend: &Backend, sizes: Sizes) -> Result<(), Failed> {
        let Sizes { t, n, case_idx, .. } = sizes;
        let mut random = SplitMix64::stream(3, case_idx as u64);
        let columns = if case_idx % 2 == 1 { 1 } else { n };
        let s = Matrix::new(self.x_dtype, t, n, case_idx % 3 == 1, Kind::WideRange, &mut random);
        let g = Matrix::new(self.w_dtype, t, columns, case_idx % 3 == 2, Kind::Special, &mut random);
        let want = oracle::sigmoid_mul(&s.values, s.dtype, &g.values, g.dtype, t, self.rounding);
        let mut out = Output::new(s.dtype, t, n, case_idx % 4 >= 2);
        sigmoid_mul(backend, s.view(backend)?, g.view(backend)?, self.rounding, out.view(backend)?)?;
        out.check(backend, "out", &want)
    }

    pub(super) fn oracle_gates<'a>(self, sizes: Sizes, x: &'a Matrix, w: &'a Matrix, options: &'a Options) -> oracle::Gates<'a> {
        oracle::Gates {
            x: &x.values,
            w: &w.values,
            num_tokens: sizes.t,
            x_dtype: self.x_dtype,
            bias: options.bias.as_ref().map(|bias| bias.values[0]),
            addend: options.addend.as_ref().map(|addend| addend.values.as_slice()),
            activation: options.activation,
            scale: options.scale,
            rounding: self.rounding,
        }
    }

    pub(super) fn gate_options<'a>(self, backend: &Backend, options: &'a Options) -> Result<GateOptions<'a>, Failed> {
        Ok(GateOptions {
            activation: options.activation,
            rounding: self.rounding,
            bias: options.bias.as_ref().map(|bias| bias.vector_view(backend, false)).transpose()?,
            addend: options.addend.as_ref().map(|addend| addend.view(backend)).transpose()?,
            scale: options.scale,
            weights_are_constant: options.weights_are_constant,
        })
    }
}

/// A row's gate does not depend on the rows beside it.
fn a_row_alone(backend: &Backend, x_dtype: DType, w_dtype: DType) -> Result<usize, Failed> {
    let t = 64 + 1;
    let mut num_cases = 0;
    for (name, backend) in variants(backend)? {
        for k in [0, 1, 257, 2048, 8193] {
            let mut random = SplitMix64::stream(4, k as u64);
            let x = Matrix::new(x_dtype, t, k, true, Kind::WideRange, &mut random);
            let w = Matrix::new(w_dtype, 1, k, false, Kind::WideRange, &mut random);
            let mut batch = Output::new(DType::F32, t, 1, false);
            gate(&backend, x.view(&backend)?, w.vector_view(&backend, false)?, &GateOptions::default(), batch.column_view(&backend)?)?;
            batch.memory.fetch(&backend)?;
            for row in 0..t {
                let mut alone = Output::new(DType::F32, 1, 1, false);
                let (x, w) = (x.rows_view(&backend, row, 1)?, w.vector_view(&backend, false)?);
                gate(&backend, x, w, &GateOptions::default(), alone.column_view(&backend)?)?;
                alone.memory.fetch(&backend)?;
                let (got, want) = (alone.memory.bytes(), &batch.memory.bytes()[row * 4..][..4]);
                compare::equal("alone", DType::F32, &[1], got, want).map_err(|d| Failed(format!("{name}, k {k}, row {row}: {d}")))?;
                num_cases += 1;
            }
        }
    }
    Ok(num_cases)
}

/// What numbers a matrix holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Uniform in [-1, 1).
    Plain,
    /// Magnitudes over 2^16, so that every order of a sum gives other bits.
    WideRange,
    /// As `WideRange`; every second row has one NaN, infinity, subnormal, negative zero or largest number.
    Special,
    /// Nothing but -0.
    NegativeZero,
    /// At least 1.
    Positive,
    /// At most -1.
    Negative,
    /// Positive and below one eighth.
    Small,
}

/// An input: rows in memory that is otherwise NaN, and their values.
pub(super) struct Matrix {
    dtype: DType,
    num_rows: usize,
    columns: usize,
    stride: usize,
    memory: Guarded,
    pub(super) values: Vec<f32>,
}

impl Matrix {
    /// `strided`: an odd distance between rows, and a start that no vector is aligned to.
    pub(super) fn new(dtype: DType, num_rows: usize, columns: usize, strided: bool, kind: Kind, random: &mut SplitMix64) -> Self {
        let size = dtype.size();
        let (stride, offset) = if strided { ((columns + 3) | 1, 5 * size) } else { (columns, 0) };
        let len = if num_rows == 0 || columns == 0 { 0 } else { (num_rows - 1) * stride + columns };
        let mut memory = Guarded::at_offset(len * size, offset);
        let mut values = Vec::with_capacity(num_rows * columns);
        for row in 0..num_rows {
            let special_at = if kind == Kind::Special && row % 2 == 1 { random.below(columns as u64) as usize } else { usize::MAX };
            for column in 0..columns {
                let value = if column == special_at { special(dtype, random) } else { usual(kind, random) };
                let at = (row * stride + column) * size;
                let bytes = &mut memory.bytes_mut()[at..at + size];
                match dtype {
                    DType::BF16 => bytes.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
                    DType::F16 => bytes.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
                    _ => bytes.copy_from_slice(&value.to_le_bytes()),
                }
                values.push(float::widen(dtype, float::bits(bytes)));
            }
        }
        Matrix { dtype, num_rows, columns, stride, memory, values }
    }

    pub(super) fn view(&self, backend: &Backend) -> Result<TensorView<'_>, Failed> {
        self.rows_view(backend, 0, self.num_rows)
    }

    fn rows_view(&self, backend: &Backend, first: usize, num_rows: usize) -> Result<TensorView<'_>, Failed> {
        let layout = Layout::strided("check", self.dtype, &[num_rows, self.columns], &[self.stride, 1])?;
        let first_byte = if self.columns == 0 { 0 } else { first * self.stride * self.dtype.size() };
        self.memory.view(backend, first_byte, layout)
    }

    /// A matrix of one row as `[K]`, or `[1, K]`.
    pub(super) fn vector_view(&self, backend: &Backend, as_matrix: bool) -> Result<TensorView<'_>, Failed> {
        let shape = [1, self.columns];
        let layout = Layout::contiguous("check", self.dtype, if as_matrix { &shape } else { &shape[1..] })?;
        self.memory.view(backend, 0, layout)
    }

    fn contiguous(&self) -> Vec<u8> {
        let size = self.dtype.size();
        let row = |r: usize| &self.memory.bytes()[r * self.stride * size..][..self.columns * size];
        if self.columns == 0 { Vec::new() } else { (0..self.num_rows).flat_map(row).copied().collect() }
    }
}

fn usual(kind: Kind, random: &mut SplitMix64) -> f32 {
    let value = random.next_f32();
    match kind {
        Kind::Plain => value,
        // Exponents from -8 to 7: products of two stay in the range of f16 (arbitrary within that).
        Kind::WideRange | Kind::Special => value * 2f32.powi(random.below(16) as i32 - 8),
        Kind::NegativeZero => -0.0,
        Kind::Positive => 1.0 + value.abs(),
        Kind::Negative => -1.0 - value.abs(),
        Kind::Small => (1.0 + value.abs()) / 16.0,
    }
}

fn special(dtype: DType, random: &mut SplitMix64) -> f32 {
    // Half the smallest normal number of the type is subnormal (spec: IEEE binary16, binary32; bf16 has the exponents of binary32).
    let (subnormal, largest) = match dtype {
        DType::F16 => (2f32.powi(-15), 65504.0),
        DType::BF16 => (2f32.powi(-127), f32::from_bits(0x7F7F_0000)),
        _ => (2f32.powi(-127), f32::MAX),
    };
    let all = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, subnormal, -subnormal, -0.0, largest, -largest];
    all[random.below(all.len() as u64) as usize]
}

/// A result: poisoned rows between guard bands.
pub(super) struct Output {
    dtype: DType,
    num_rows: usize,
    columns: usize,
    stride: usize,
    memory: Guarded,
}

impl Output {
    pub(super) fn new(dtype: DType, num_rows: usize, columns: usize, strided: bool) -> Self {
        let size = dtype.size();
        let (stride, offset) = if strided { (columns + 3, 5 * size) } else { (columns, 0) };
        let len = if num_rows == 0 || columns == 0 { 0 } else { (num_rows - 1) * stride + columns };
        Output { dtype, num_rows, columns, stride, memory: Guarded::at_offset(len * size, offset) }
    }

    pub(super) fn view(&mut self, backend: &Backend) -> Result<TensorViewMut<'_>, Failed> {
        let layout = Layout::strided("check", self.dtype, &[self.num_rows, self.columns], &[self.stride, 1])?;
        self.memory.view_mut(backend, 0, layout)
    }

    /// One column, as `[T]` when it is contiguous.
    pub(super) fn column_view(&mut self, backend: &Backend) -> Result<TensorViewMut<'_>, Failed> {
        if self.stride > 1 {
            return self.view(backend);
        }
        self.memory.view_mut(backend, 0, Layout::contiguous("check", self.dtype, &[self.num_rows])?)
    }

    /// A matrix of one row as `[N]`.
    pub(super) fn row_view(&mut self, backend: &Backend) -> Result<TensorViewMut<'_>, Failed> {
        self.memory.view_mut(backend, 0, Layout::contiguous("check", self.dtype, &[self.columns])?)
    }

    fn fill(&mut self, contiguous: &[u8]) {
        let (row_bytes, stride_bytes) = (self.columns * self.dtype.size(), self.stride * self.dtype.size());
        if row_bytes > 0 {
            for (row, from) in self.memory.bytes_mut().chunks_mut(stride_bytes).zip(contiguous.chunks(row_bytes)) {
                row[..row_bytes].copy_from_slice(from);
            }
        }
    }

    /// Every cell is as expected and was written, nothing between the rows or outside was.
    pub(super) fn check(&mut self, backend: &Backend, what: &str, want: &[u8]) -> Result<(), Failed> {
        self.memory.fetch(backend)?;
        self.memory.check(what)?;
        let (row_bytes, stride_bytes) = (self.columns * self.dtype.size(), self.stride * self.dtype.size());
        let mut got = Vec::with_capacity(want.len());
        if row_bytes > 0 {
            for row in self.memory.bytes().chunks(stride_bytes) {
                let (cells, padding) = row.split_at(row_bytes);
                ensure!(padding.iter().all(|&b| b == POISON), "{what}: padding between rows was written");
                got.extend_from_slice(cells);
            }
        }
        compare::equal(what, self.dtype, &[self.num_rows, self.columns], &got, want)?;
        let untouched = got.chunks(self.dtype.size()).position(|cell| cell.iter().all(|&b| b == POISON));
        // No expected cell has these bytes: the checks' NaNs have other ones.
        ensure!(untouched.is_none(), "{what}: cell {untouched:?} was not written");
        Ok(())
    }
}
