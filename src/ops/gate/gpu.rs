//! The CUDA backend of the gate: one launch for each call, whatever the form.

use super::check::Gates;
use super::tuning::{self, Limits, Mapping};
use super::view::{Rows, RowsMut};
use super::{Activation, Form, Rounding};
use crate::backend::Cuda;
use crate::error::{Error, Result};
use crate::gpu::{Constant, Geometry, Kernels, Program, Source, Spec, Targets};
use crate::id::Expert;
use crate::kernel_source;
use crate::space::Address;
use crate::tensor::DType;

static KERNELS: Kernels<Variant> = Kernels::new();

const SOURCES: &[Source] =
    &[kernel_source!("gpu/device/platform.cuh"), kernel_source!("gpu/device/float.cuh"), kernel_source!("ops/gate/kernel.cu")];

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
}

/// What the kernel distinguishes of the forms: the numbers of `Form` in kernel.cu.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Gate = 0,
    GateMul = 1,
    GateMulAdd = 2,
    SigmoidMul = 3,
    SigmoidMulEach = 4,
}

impl Kind {
    pub(super) fn has_dot(self) -> bool {
        matches!(self, Kind::Gate | Kind::GateMul | Kind::GateMulAdd)
    }

    pub(super) fn has_rows(self) -> bool {
        self != Kind::Gate
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Gate => "gate",
            Kind::GateMul => "gate_mul",
            Kind::GateMulAdd => "gate_mul_add",
            Kind::SigmoidMul => "sigmoid_mul",
            Kind::SigmoidMulEach => "sigmoid_mul each",
        }
    }
}

impl Spec for Variant {
    fn program(&self) -> Program {
        let Variant { form, types, mapping, aligned, weights_at_once } = *self;
        let [x, w, s] = types.map(DType::name);
        let name = format!(
            "{} {x} {w} {s} {mapping}{}{}",
            form.name(),
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
            ],
            threads: mapping.threads(),
            smem_bytes: 0,
            max_registers: tuning::max_registers(mapping),
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
    num_tokens: u64,
    out: u64,
    out_stride: u64,
    s_or_idx: u64,
    s_or_idx_stride: u64,
    n_or_expert: u64,
    columns_per_block: u64,
    w_stride: u64,
    bias: u64,
    addend: u64,
    addend_stride: u64,
}

const _: () = assert!(size_of::<Parameters>() == 128, "Parameters has no padding, as in kernel.cu");

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
        // One kernel for everything that is not aligned: it is slower by more than it would gain.
        let weights_at_once = self.weights_at_once && aligned;
        let limits = Limits::of(cuda.device());
        let shape = tuning::Shape { kind, types, num_tokens, k: self.parameters.k as usize, n: self.n };
        let (mapping, num_column_blocks) = tuning::choose(&limits, &shape);
        let num_row_blocks = num_tokens.div_ceil(mapping.rows_per_block as usize) * mapping.cluster as usize;
        // spec (CUDA): blocks along x.
        let num_row_blocks = u32::try_from(num_row_blocks).ok().filter(|num| *num < 1 << 31).ok_or_else(|| {
            Error::invalid(op, "x", format!("of {num_tokens} rows"), format!("fewer than 2^31 blocks of {} rows", mapping.rows_per_block))
        })?;
        let columns = self.n.div_ceil(num_column_blocks as usize * mapping.cluster as usize).next_multiple_of(8); // 8: elements of a vector
        self.parameters.columns_per_block = columns as u64;
        let kernel = KERNELS.get(op, cuda.stream(), Variant { form: kind, types, mapping, aligned, weights_at_once })?;
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
    let kind = match form {
        Form::Gate | Form::GateAppendTopk => Kind::Gate,
        Form::GateMul => Kind::GateMul,
        Form::GateMulAdd => Kind::GateMulAdd,
        Form::SigmoidMul if k == 1 => Kind::SigmoidMul,
        Form::SigmoidMul => Kind::SigmoidMulEach,
    };
    let limits = Limits::of(cuda.device());
    let is_whole = |columns: usize| columns.is_multiple_of(8); // elements of a vector
    let aligned = (kind == Kind::SigmoidMul || is_whole(k)) && (!kind.has_rows() || is_whole(n));
    for num_tokens in tuning::classes_of_tokens(&limits) {
        let (mapping, _) = tuning::choose(&limits, &tuning::Shape { kind, types: [x, w, out], num_tokens, k, n });
        for weights_at_once in [true, false] {
            // Only a programmatic launch can be too early, and only for weights.
            if weights_at_once == aligned || cuda.is_programmatic() && kind.has_dot() && aligned {
                KERNELS.load(cuda.device(), Variant { form: kind, types: [x, w, out], mapping, aligned, weights_at_once })?;
            }
        }
    }
    Ok(())
}

/// The kernels that the table of resources lists: bf16 in every mapping and form, the other types in the usual mapping, what is not aligned once.
pub(super) fn shipped() -> Vec<Variant> {
    const BF16: [DType; 3] = [DType::BF16; 3];
    let limits = Limits { num_sms: 132, has_clusters: true }; // an H200
    let without_clusters = Limits { has_clusters: false, ..limits };
    let mut all: Vec<Variant> = Vec::new();
    let mut add = |limits: &Limits,
                   kind: Kind,
                   types: [DType; 3],
                   (num_tokens, k, n): (usize, usize, usize),
                   aligned: bool,
                   weights_at_once: bool| {
        let (mapping, _) = tuning::choose(limits, &tuning::Shape { kind, types, num_tokens, k, n });
        let variant = Variant { form: kind, types, mapping, aligned, weights_at_once };
        if !all.contains(&variant) {
            all.push(variant);
        }
    };
    let dots = [Kind::Gate, Kind::GateMul, Kind::GateMulAdd];
    for kind in dots {
        for num_tokens in [1, 4096] {
            for k in [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144] {
                add(&limits, kind, BF16, (num_tokens, k, 2048), true, true);
                add(&without_clusters, kind, BF16, (num_tokens, k, 2048), true, true);
            }
        }
        for (x, w) in [(DType::BF16, DType::F32), (DType::F16, DType::F16), (DType::F16, DType::F32), (DType::F32, DType::F32)] {
            for k in [2048, 65536] {
                add(&limits, kind, [x, w, x], (1, k, 2048), true, true);
            }
        }
        add(&limits, kind, BF16, (1, 2048, 2048), true, false);
        add(&limits, kind, BF16, (1, 2048, 2048), false, false);
        add(&limits, kind, BF16, (1, 65536, 2048), false, false);
    }
    for kind in [Kind::SigmoidMul, Kind::SigmoidMulEach] {
        for (num_tokens, n) in [(1, 2048), (4096, 2048), (4096, 128)] {
            add(&limits, kind, BF16, (num_tokens, 1, n), true, true);
        }
        add(&limits, kind, [DType::F32; 3], (1, 1, 2048), true, true);
        add(&limits, kind, BF16, (1, 1, 2048), false, false);
    }
    all
}

/// The one-tile form of the dot: each lane of one team holds so many elements of a row before it adds.
pub(super) fn one_tile(dtype: DType, elements_per_lane: u16) -> Variant {
    let mapping =
        Mapping { teams_per_row: 1, rows_per_block: tuning::ROWS, elements_per_lane, cluster: 1, kept_vectors: 1, one_pass: true };
    Variant { form: Kind::Gate, types: [dtype; 3], mapping, aligned: true, weights_at_once: true }
}

/// Whether rows are whole vectors of eight elements at addresses that 16-byte accesses take.
fn is_aligned(memory: Address<'_>, stride_bytes: usize, row_bytes: usize, dtype: DType) -> bool {
    const VECTOR: usize = 16; // spec: bytes of the widest access
    memory.address.is_multiple_of(VECTOR as u64) && stride_bytes.is_multiple_of(VECTOR) && row_bytes.is_multiple_of(8 * dtype.size())
}
