//! The CUDA backend of the gate: one launch for each call, whatever the form.

use super::check::Gates;
use super::tuning::{self, Limits, Mapping};
use super::view::{Rows, RowsMut};
use super::{Activation, Form, Rounding, backward};
use crate::backend::Cuda;
use crate::error::{Error, Result};
use crate::gpu::{Carveout, Constant, Geometry, Kernels, Program, Source, Spec, Targets};
use crate::id::Expert;
use crate::kernel_source;
use crate::space::Address;
use crate::tensor::DType;

static KERNELS: Kernels<Variant> = Kernels::new();

const SOURCES: &[Source] = &[
    kernel_source!("gpu/device/platform.cuh"),
    kernel_source!("gpu/device/float.cuh"),
    kernel_source!("ops/gate/eight.cuh"),
    kernel_source!("ops/gate/kernel.cu"),
];

/// Everything that the kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    pub(super) form: Kind,
    /// Types of x, of w (or g), and of s and the result.
    pub(super) types: [DType; 3],
    pub(super) mapping: Mapping,
    /// Every row is whole vectors at addresses that 16-byte accesses take.
    pub(super) aligned: bool,
    /// w may be read before the launches that this one depends on have ended.
    pub(super) weights_at_once: bool,
    /// Looks at the options; without it the gate is the sigmoid of the dot, rounded once.
    pub(super) with_options: bool,
}

/// What the kernel distinguishes of the forms: the numbers of `Form` in kernel.cu.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Gate = 0,
    GateMul = 1,
    GateMulAdd = 2,
    SigmoidMul = 3,
    SigmoidMulEach = 4,
    PairDot = 5,
    Dlogit = 6,
    DlogitMul = 7,
}

impl Kind {
    pub(super) fn has_dot(self) -> bool {
        !matches!(self, Kind::SigmoidMul | Kind::SigmoidMulEach)
    }

    pub(super) fn has_rows(self) -> bool {
        !matches!(self, Kind::Gate | Kind::PairDot | Kind::Dlogit)
    }

    /// Makes logits again, whose options are seldom none.
    fn is_backward(self) -> bool {
        matches!(self, Kind::Dlogit | Kind::DlogitMul)
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Gate => "gate",
            Kind::GateMul => "gate_mul",
            Kind::GateMulAdd => "gate_mul_add",
            Kind::SigmoidMul => "sigmoid_mul",
            Kind::SigmoidMulEach => "sigmoid_mul each",
            Kind::PairDot => "gate_mul_backward dg",
            Kind::Dlogit => "gate_backward dlogit",
            Kind::DlogitMul => "gate_backward dx",
        }
    }
}

impl Spec for Variant {
    fn program(&self) -> Program {
        let Variant { form, types, mapping, aligned, weights_at_once, with_options } = *self;
        let [x, w, s] = types.map(DType::name);
        let name = format!(
            "{} {x} {w} {s} {mapping}{}{}{}",
            form.name(),
            if with_options { " options" } else { "" },
            if aligned { "" } else { " unaligned" },
            if weights_at_once { "" } else { " late weights" }
        );
        Program {
            name,
            entry: "gate",
            sources: SOURCES,
            constants: vec![
                Constant::Type("X", x),
                Constant::Type("W", w),
                Constant::Type("S", s),
                Constant::Int("FORM", form as i64),
                Constant::Int("TEAMS_PER_ROW", mapping.teams_per_row.into()),
                Constant::Int("ROWS_PER_BLOCK", mapping.rows_per_block.into()),
                Constant::Int("ELEMENTS_PER_LANE", mapping.elements_per_lane.into()),
                Constant::Int("CLUSTER", mapping.cluster.into()),
                Constant::Int("KEPT_VECTORS", mapping.kept_vectors.into()),
                Constant::Bool("ONE_PASS", mapping.one_pass),
                Constant::Bool("ALIGNED", aligned),
                Constant::Bool("WEIGHTS_AT_ONCE", weights_at_once),
                Constant::Bool("WITH_OPTIONS", with_options),
            ],
            threads: mapping.threads(),
            smem_bytes: 0,
            max_registers: tuning::max_registers(mapping),
            carveout: Carveout::Shared,
            targets: if mapping.cluster > 1 { Targets::Hopper } else { Targets::All },
        }
    }
}

/// `Parameters` of kernel.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Parameters {
    x: u64,
    w: u64,
    x_stride: u64,
    k: u64,
    flags: u32,
    scale: f32,
    out: u64,
    num_tokens: u64,
    out_stride: u64,
    s_or_idx: u64,
    s_or_idx_stride: u64,
    n_or_expert: u64,
    columns_per_block: u64,
    w_stride: u64,
    bias: u64,
    addend: u64,
    addend_stride: u64,
    dg: u64,
    dg_stride: u64,
    dlogit: u64,
    dlogit_stride: u64,
}

const _: () = assert!(size_of::<Parameters>() == 160, "Parameters has no padding, as in kernel.cu");

/// Bits of `Parameters::flags`, as in kernel.cu.
mod flag {
    pub(super) const LINEAR: u32 = 2;
    pub(super) const FRAMEWORK: u32 = 4;
    pub(super) const HAS_BIAS: u32 = 8;
    pub(super) const BIAS_F32: u32 = 16;
    pub(super) const HAS_ADDEND: u32 = 32;
    pub(super) const ADDEND_F32: u32 = 64;
    pub(super) const SCALED: u32 = 128;
    pub(super) const HAS_IDX: u32 = 256;
    pub(super) const IDX_I64: u32 = 512;
    pub(super) const DG_F32: u32 = 1024;
}

/// `out[t] = g[t]`.
pub(super) fn gate(cuda: &Cuda, gates: &Gates<Address<'_>>, out: RowsMut<Address<'_>>) -> Result<()> {
    let call = Call::new("gate", Kind::Gate, [gates.x.dtype, gates.w.dtype, out.dtype], gates.x.num_rows);
    call.of(cuda, gates).into(&out).queue(cuda)
}

/// `out = g * s`, or `out + g * s` with `add`.
pub(super) fn gate_mul(
    cuda: &Cuda,
    op: &'static str,
    add: bool,
    gates: &Gates<Address<'_>>,
    s: Rows<Address<'_>>,
    out: RowsMut<Address<'_>>,
) -> Result<()> {
    let kind = if add { Kind::GateMulAdd } else { Kind::GateMul };
    let call = Call::new(op, kind, [gates.x.dtype, gates.w.dtype, out.dtype], gates.x.num_rows);
    call.of(cuda, gates).times(&s).into(&out).queue(cuda)
}

/// The gate and the shared expert behind the routed top-k.
pub(super) fn gate_append_topk(
    cuda: &Cuda,
    gates: &Gates<Address<'_>>,
    shared_expert: Expert,
    idx: RowsMut<Address<'_>>,
    weights: RowsMut<Address<'_>>,
) -> Result<()> {
    let call = Call::new("gate_append_topk", Kind::Gate, [gates.x.dtype, gates.w.dtype, weights.dtype], gates.x.num_rows);
    let mut call = call.of(cuda, gates).into(&weights);
    call.parameters.out += (weights.row_bytes - weights.dtype.size()) as u64;
    call.parameters.s_or_idx = idx.memory.address + (idx.row_bytes - idx.dtype.size()) as u64;
    call.parameters.s_or_idx_stride = idx.stride_bytes as u64;
    call.parameters.n_or_expert = shared_expert.0.into();
    call.parameters.flags |= flag::HAS_IDX;
    call.set(flag::IDX_I64, idx.dtype == DType::I64);
    call.queue(cuda)
}

/// `out = s * sigmoid(g)`.
pub(super) fn sigmoid_mul(
    cuda: &Cuda,
    s: Rows<Address<'_>>,
    g: Rows<Address<'_>>,
    rounding: Rounding,
    out: RowsMut<Address<'_>>,
) -> Result<()> {
    let is_column = g.row_bytes == g.dtype.size();
    let kind = if is_column { Kind::SigmoidMul } else { Kind::SigmoidMulEach };
    let mut call = Call::new("sigmoid_mul", kind, [s.dtype, g.dtype, out.dtype], s.num_rows);
    call.parameters.w = g.memory.address;
    call.parameters.w_stride = g.stride_bytes as u64;
    call.set(flag::FRAMEWORK, rounding == Rounding::Framework);
    if !is_column {
        call.aligned = is_aligned(g.memory, g.stride_bytes, g.row_bytes, g.dtype);
    }
    call.times(&s).into(&out).queue(cuda)
}

/// `out[t] = x[t] . w[t]`.
pub(super) fn pair_dot(cuda: &Cuda, op: &'static str, x: Rows<Address<'_>>, w: Rows<Address<'_>>, out: RowsMut<Address<'_>>) -> Result<()> {
    let mut call = Call::new(op, Kind::PairDot, [x.dtype, w.dtype, out.dtype], x.num_rows);
    (call.parameters.x, call.parameters.x_stride) = (x.memory.address, x.stride_bytes as u64);
    (call.parameters.w, call.parameters.w_stride) = (w.memory.address, w.stride_bytes as u64);
    call.parameters.k = (x.row_bytes / x.dtype.size()) as u64;
    call.aligned = [&x, &w].iter().all(|rows| is_aligned(rows.memory, rows.stride_bytes, rows.row_bytes, rows.dtype));
    call.weights_at_once = false;
    call.into(&out).queue(cuda)
}

/// The gradients of the logits from those of the gates, and `dx = dlogit * w`.
pub(super) fn dlogit(
    cuda: &Cuda,
    op: &'static str,
    gates: &Gates<Address<'_>>,
    dg: &Rows<Address<'_>>,
    dlogit: &RowsMut<Address<'_>>,
    dx: Option<&RowsMut<Address<'_>>>,
) -> Result<()> {
    let (kind, out) = dx.map_or((Kind::Dlogit, dlogit), |dx| (Kind::DlogitMul, dx));
    let mut call = Call::new(op, kind, [gates.x.dtype, gates.w.dtype, out.dtype], gates.x.num_rows).of(cuda, gates);
    (call.parameters.dg, call.parameters.dg_stride) = (dg.memory.address, dg.stride_bytes as u64);
    call.set(flag::DG_F32, dg.dtype == DType::F32);
    (call.parameters.dlogit, call.parameters.dlogit_stride) = (dlogit.memory.address, dlogit.stride_bytes as u64);
    if dx.is_some() {
        call = call.times(&Rows { stride_bytes: 0, ..gates.w });
    }
    call.into(out).queue(cuda)
}

/// A call on its way from checked arguments to a launch.
struct Call {
    op: &'static str,
    kind: Kind,
    types: [DType; 3],
    num_tokens: usize,
    aligned: bool,
    weights_at_once: bool,
    parameters: Parameters,
    /// Columns of s.
    n: usize,
}

impl Call {
    fn new(op: &'static str, kind: Kind, types: [DType; 3], num_tokens: usize) -> Self {
        let parameters = Parameters { num_tokens: num_tokens as u64, scale: 1.0, ..Parameters::default() };
        Call { op, kind, types, num_tokens, aligned: true, weights_at_once: true, parameters, n: 0 }
    }

    fn set(&mut self, flag: u32, on: bool) {
        self.parameters.flags |= if on { flag } else { 0 };
    }

    /// The arguments of the dot and of the steps from it to the gate.
    fn of(mut self, cuda: &Cuda, gates: &Gates<Address<'_>>) -> Self {
        let Gates { x, w, bias, addend, activation, rounding, scale, weights_are_constant, g_dtype: _ } = *gates;
        let p = &mut self.parameters;
        (p.x, p.x_stride, p.w) = (x.memory.address, x.stride_bytes as u64, w.memory.address);
        (p.k, p.scale) = ((w.row_bytes / w.dtype.size()) as u64, scale);
        if let Some(bias) = bias {
            p.bias = bias.memory.address;
            p.flags |= flag::HAS_BIAS | if bias.dtype == DType::F32 { flag::BIAS_F32 } else { 0 };
        }
        if let Some(addend) = addend {
            (p.addend, p.addend_stride) = (addend.memory.address, addend.stride_bytes as u64);
            p.flags |= flag::HAS_ADDEND | if addend.dtype == DType::F32 { flag::ADDEND_F32 } else { 0 };
        }
        // A launch that starts after all others have ended may read everything at once.
        self.weights_at_once = weights_are_constant || !cuda.is_programmatic();
        self.set(flag::LINEAR, activation == Activation::Linear);
        self.set(flag::FRAMEWORK, rounding == Rounding::Framework);
        self.set(flag::SCALED, scale != 1.0);
        self.aligned = is_aligned(x.memory, x.stride_bytes, x.row_bytes, x.dtype) && is_aligned(w.memory, 0, w.row_bytes, w.dtype);
        self
    }

    /// The rows that the gate is multiplied with.
    fn times(mut self, s: &Rows<Address<'_>>) -> Self {
        self.n = s.row_bytes / s.dtype.size();
        self.parameters.s_or_idx = s.memory.address;
        self.parameters.s_or_idx_stride = s.stride_bytes as u64;
        self.parameters.n_or_expert = self.n as u64;
        self.aligned &= is_aligned(s.memory, s.stride_bytes, s.row_bytes, s.dtype);
        self
    }

    /// The result.
    fn into(mut self, out: &RowsMut<Address<'_>>) -> Self {
        self.parameters.out = out.memory.address;
        self.parameters.out_stride = out.stride_bytes as u64;
        self.aligned &= !self.kind.has_rows() || is_aligned(out.memory, out.stride_bytes, out.row_bytes, out.dtype);
        self
    }

    fn queue(mut self, cuda: &Cuda) -> Result<()> {
        let Call { op, kind, types, num_tokens, aligned, .. } = self;
        // One kernel for everything that is not aligned: it is slower by more than that.
        let weights_at_once = self.weights_at_once && aligned;
        let with_options = self.parameters.flags != 0 || !aligned || kind.is_backward();
        let limits = Limits::of(cuda.device());
        let shape = tuning::Shape { kind, types, num_tokens, k: self.parameters.k as usize, n: self.n, aligned };
        let (mapping, num_column_blocks) = tuning::choose(&limits, &shape);
        let num_row_blocks = num_tokens.div_ceil(mapping.rows_per_block as usize) * mapping.cluster as usize;
        // spec (CUDA): blocks along x.
        let num_row_blocks = u32::try_from(num_row_blocks).ok().filter(|num| *num < 1 << 31).ok_or_else(|| {
            Error::invalid(op, "x", format!("of {num_tokens} rows"), format!("fewer than 2^31 blocks of {} rows", mapping.rows_per_block))
        })?;
        let columns = self.n.div_ceil(num_column_blocks as usize * mapping.cluster as usize).next_multiple_of(8); // 8: elements of a vector
        self.parameters.columns_per_block = columns as u64;
        let kernel = KERNELS.get(op, cuda.stream(), Variant { form: kind, types, mapping, aligned, weights_at_once, with_options })?;
        let geometry = Geometry {
            grid: [num_row_blocks, num_column_blocks, 1],
            threads: mapping.threads(),
            cluster: mapping.cluster.into(),
            programmatic: cuda.is_programmatic(),
            ..Geometry::default()
        };
        // SAFETY: the kernel was loaded for this stream's device and takes this struct; the validator has checked that every address belongs to
        // the device and that the views behind them, which the caller keeps, cover what the shapes say.
        unsafe { kernel.launch(cuda.stream(), &geometry, &self.parameters) }
    }
}

/// Loads every kernel that a call may choose, whatever its number of tokens.
pub(super) fn precompile(cuda: &Cuda, call: &super::Call) -> Result<()> {
    let &super::Call { form, x, w, out, k, n } = call;
    let load = |kind: Kind, types: [DType; 3], (k, n): (usize, usize)| load(cuda, kind, types, (k, n));
    match form {
        Form::Gate | Form::GateAppendTopk => load(Kind::Gate, [x, w, out], (k, n)),
        Form::GateMul => load(Kind::GateMul, [x, w, out], (k, n)),
        Form::GateMulAdd => load(Kind::GateMulAdd, [x, w, out], (k, n)),
        Form::SigmoidMul => load(if k == 1 { Kind::SigmoidMul } else { Kind::SigmoidMulEach }, [x, w, out], (k, n)),
        Form::GateBackward => {
            load(Kind::Dlogit, [x, w, DType::F32], (k, k))?;
            load(Kind::DlogitMul, [x, w, x], (k, k))?;
            backward::precompile(cuda, x, out, k)
        }
        Form::GateMulBackward => {
            load(Kind::PairDot, [out, out, DType::F32], (n, n))?;
            load(Kind::GateMul, [x, w, out], (k, n))
        }
    }
}

fn load(cuda: &Cuda, kind: Kind, types: [DType; 3], (k, n): (usize, usize)) -> Result<()> {
    let limits = Limits::of(cuda.device());
    let is_whole = |columns: usize| columns.is_multiple_of(8); // elements of a vector
    let aligned = (kind == Kind::SigmoidMul || is_whole(k)) && (!kind.has_rows() || is_whole(n));
    for num_tokens in tuning::classes_of_tokens(&limits) {
        let (mapping, _) = tuning::choose(&limits, &tuning::Shape { kind, types, num_tokens, k, n, aligned });
        for (weights_at_once, with_options) in [(true, true), (true, false), (false, true), (false, false)] {
            let is_used = if aligned {
                // Only a programmatic launch can be too early, and only for weights.
                (if kind == Kind::PairDot { !weights_at_once } else { weights_at_once || cuda.is_programmatic() && kind.has_dot() })
                    && (with_options || !kind.is_backward())
            } else {
                !weights_at_once && with_options
            };
            if is_used {
                KERNELS.load(cuda.device(), Variant { form: kind, types, mapping, aligned, weights_at_once, with_options })?;
            }
        }
    }
    Ok(())
}

/// The kernels that the table of resources lists: bf16 in every mapping and form, the other types in the usual mapping, what is not aligned once.
pub(super) fn shipped() -> Vec<Variant> {
    const BF16: [DType; 3] = [DType::BF16; 3];
    let clusters = Limits { num_sms: 132, has_clusters: true }; // an H200
    let none = Limits { has_clusters: false, ..clusters };
    let mut all: Vec<Variant> = Vec::new();
    let mut add = |limits: &Limits, kind: Kind, types: [DType; 3], (num_tokens, k, n): (usize, usize, usize), change: fn(&mut Variant)| {
        let (weights_at_once, with_options) = (kind != Kind::PairDot, kind.is_backward());
        let shape = tuning::Shape { kind, types, num_tokens, k, n, aligned: true };
        let (mapping, _) = tuning::choose(limits, &shape);
        let mut variant = Variant { form: kind, types, mapping, aligned: true, weights_at_once, with_options };
        change(&mut variant);
        (variant.mapping, _) = tuning::choose(limits, &tuning::Shape { aligned: variant.aligned, ..shape });
        if !all.contains(&variant) {
            all.push(variant);
        }
    };
    let unchanged = |_: &mut Variant| {};
    let unaligned = |variant: &mut Variant| *variant = Variant { aligned: false, weights_at_once: false, with_options: true, ..*variant };
    for kind in [Kind::Gate, Kind::GateMul, Kind::GateMulAdd] {
        // Every mapping for the gate alone, and those of decoding and of a long row for its products.
        let ks: &[usize] =
            if kind == Kind::Gate { &[256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144] } else { &[2048, 65536] };
        for (num_tokens, k) in [1, 4096].into_iter().flat_map(|t| ks.iter().map(move |k| (t, *k))) {
            add(&clusters, kind, BF16, (num_tokens, k, 2048), unchanged);
            add(&none, kind, BF16, (num_tokens, k, 2048), unchanged);
        }
        for (x, w) in [(DType::BF16, DType::F32), (DType::F16, DType::F16), (DType::F16, DType::F32), (DType::F32, DType::F32)] {
            add(&clusters, kind, [x, w, x], (1, 2048, 2048), unchanged);
            add(&none, kind, [x, w, x], (1, 65536, 2048), unchanged);
        }
        add(&clusters, kind, BF16, (1, 2048, 2048), |variant| variant.weights_at_once = false);
        add(&clusters, kind, BF16, (1, 2048, 2048), |variant| variant.with_options = true);
        add(&clusters, kind, BF16, (1, 131072, 2048), |variant| variant.with_options = true);
        add(&clusters, kind, BF16, (1, 2048, 2048), unaligned);
        add(&none, kind, BF16, (1, 65536, 2048), unaligned);
    }
    for kind in [Kind::SigmoidMul, Kind::SigmoidMulEach] {
        for (num_tokens, n) in [(1, 2048), (4096, 2048), (4096, 128)] {
            add(&clusters, kind, BF16, (num_tokens, 1, n), unchanged);
        }
        add(&clusters, kind, [DType::F32; 3], (1, 1, 2048), |variant| variant.with_options = true);
        add(&clusters, kind, BF16, (1, 1, 2048), unaligned);
    }
    for (num_tokens, k) in [(1, 2048), (4096, 2048), (4096, 65536)] {
        add(&clusters, Kind::Dlogit, [DType::BF16, DType::BF16, DType::F32], (num_tokens, k, k), unchanged);
        add(&clusters, Kind::DlogitMul, BF16, (num_tokens, k, k), unchanged);
        add(&clusters, Kind::PairDot, [DType::BF16, DType::BF16, DType::F32], (num_tokens, k, k), unchanged);
    }
    all
}

/// The one-tile form of the dot: each lane of one team holds so many elements of a row before it adds.
pub(super) fn one_tile(dtype: DType, elements_per_lane: u16) -> Variant {
    let mapping =
        Mapping { teams_per_row: 1, rows_per_block: tuning::ROWS, elements_per_lane, cluster: 1, kept_vectors: 1, one_pass: true };
    Variant { form: Kind::Gate, types: [dtype; 3], mapping, aligned: true, weights_at_once: true, with_options: false }
}

/// Whether rows are whole vectors of eight elements at addresses that 16-byte accesses take.
pub(super) fn is_aligned(memory: Address<'_>, stride_bytes: usize, row_bytes: usize, dtype: DType) -> bool {
    const VECTOR: usize = 16; // spec: bytes of the widest access
    memory.address.is_multiple_of(VECTOR as u64) && stride_bytes.is_multiple_of(VECTOR) && row_bytes.is_multiple_of(8 * dtype.size())
}
