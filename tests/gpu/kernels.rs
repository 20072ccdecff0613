//! Kernels of these tests, and buffers of words.

use bytemuck::{Pod, Zeroable};
use libtest_mimic::Failed;
use moe_kernels::Result;
use moe_kernels::gpu::{Buffer, Carveout, Constant, Geometry, Kernel, Kernels, Program, Source, Spec, Stream, Targets};

/// Which kernel of `program.cu`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Test {
    /// `out = in * factor + addend`.
    Scale { factor: i32 },
    /// Waits for another kernel.
    Meet,
    /// Stays until a word is set.
    Hold,
    /// Blocks that work together.
    Together(Form),
    /// What a launch costs.
    Nothing,
    /// Text that does not compile.
    Broken,
    /// A name that the program lacks.
    WrongEntry,
}

/// How the blocks of [`Test::Together`] are launched.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Form {
    pub smem_bytes: u32,
    pub cluster: u32,
    pub cooperative: bool,
    pub programmatic: bool,
}

/// Those that are loaded.
pub static KERNELS: Kernels<Test> = Kernels::new();

const DIALECT: Source = Source { path: "tests/gpu/dialect", text: "" };
const SOURCES: &[Source] = &[DIALECT, Source { path: "tests/gpu/program.cu", text: include_str!("program.cu") }];
const BROKEN: &[Source] = &[DIALECT, Source { path: "tests/gpu/broken.cu", text: include_str!("broken.cu") }];

impl Spec for Test {
    fn program(&self) -> Program {
        let plain = Form { smem_bytes: 0, cluster: 1, cooperative: false, programmatic: false };
        let (entry, form, factor) = match *self {
            Test::Scale { factor } => ("scale", plain, factor),
            Test::Meet => ("meet", plain, 1),
            Test::Hold => ("hold", Form { smem_bytes: HOLD_SMEM_BYTES, ..plain }, 1),
            Test::Together(form) => ("together", form, 1),
            Test::Nothing => ("nothing", plain, 1),
            Test::Broken => ("broken", plain, 1),
            Test::WrongEntry => ("absent", plain, 1),
        };
        Program {
            name: format!("test {self:?}"),
            entry,
            sources: if *self == Test::Broken { BROKEN } else { SOURCES },
            constants: vec![
                Constant::Int("FACTOR", i64::from(factor)),
                Constant::Int("SMEM_BYTES", i64::from(form.smem_bytes)),
                Constant::Int("CLUSTER", i64::from(form.cluster)),
                Constant::Bool("COOPERATIVE", form.cooperative),
                Constant::Bool("PROGRAMMATIC", form.programmatic),
            ],
            threads: 256,
            smem_bytes: form.smem_bytes,
            max_registers: 64,
            carveout: Carveout::Shared,
            targets: Targets::Nvidia,
        }
    }
}

/// Parameters of `scale`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Scale {
    pub from: u64,
    pub to: u64,
    pub num: u32,
    pub addend: u32,
}

/// Parameters of `meet`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Meet {
    pub mine: u64,
    pub other: u64,
    pub met: u64,
    pub bound_nanoseconds: u64,
}

/// Most dynamic shared memory of `hold`.
pub const HOLD_SMEM_BYTES: u32 = 200 << 10;

/// Parameters of `hold`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Hold {
    pub word: u64,
    pub ended: u64,
    pub bound_nanoseconds: u64,
}

/// Parameters of `together`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Together {
    pub sums: u64,
    pub turned: u64,
    pub arrivals: u64,
}

/// Parameters of `nothing`.
#[repr(C)]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub struct Nothing {
    pub words: [u64; 16],
}

/// Queues `to[i] = from[i] * factor + addend`. Both hold `num` words and live until the stream is waited for.
pub fn scale(stream: &Stream, kernel: Kernel, parameters: Scale, programmatic: bool) -> Result<()> {
    let geometry = Geometry { grid: [4, 1, 1], threads: 256, programmatic, ..Geometry::default() };
    // SAFETY: the kernel is `scale` on the stream's device, `Scale` is its struct; every caller waits for the stream while its buffers live.
    unsafe { kernel.launch(stream, &geometry, &parameters) }
}

/// Queues a kernel that takes this long and touches nothing.
pub fn delay(stream: &Stream, nanoseconds: u64) -> Result<()> {
    let kernel = KERNELS.get("test", stream, Test::Meet)?;
    let parameters = Meet { mine: 0, other: 0, met: 0, bound_nanoseconds: nanoseconds };
    // SAFETY: the kernel is `meet` on the stream's device, `Meet` is its struct; it uses no memory.
    unsafe { kernel.launch(stream, &Geometry::default(), &parameters) }
}

/// A buffer of words.
pub fn words(stream: &Stream, words: &[u32]) -> Result<Buffer> {
    Buffer::from_bytes(stream, bytemuck::cast_slice(words))
}

/// What a buffer holds, after the work of the stream.
pub fn read(stream: &Stream, buffer: &Buffer) -> Result<Vec<u32>> {
    let mut words = vec![0u32; buffer.len() / 4];
    buffer.download(stream, 0, bytemuck::cast_slice_mut(&mut words))?;
    Ok(words)
}

/// `num` words, all different.
pub fn painted(num: usize, seed: u32) -> Vec<u32> {
    (0..num as u32).map(|i| i.wrapping_mul(2_654_435_761).wrapping_add(seed)).collect()
}

/// What `scale` must make of `from`.
pub fn scaled(from: &[u32], factor: u32, addend: u32) -> Vec<u32> {
    from.iter().map(|word| word.wrapping_mul(factor).wrapping_add(addend)).collect()
}

/// `scale` on a whole buffer gives what it must.
pub fn check_scale(stream: &Stream, num: usize, seed: u32) -> std::result::Result<(), Failed> {
    let kernel = KERNELS.get("test", stream, Test::Scale { factor: 3 })?;
    let input = painted(num, seed);
    let (from, to) = (words(stream, &input)?, words(stream, &vec![0; num])?);
    let parameters = Scale { from: from.address().address, to: to.address().address, num: num as u32, addend: seed };
    scale(stream, kernel, parameters, false)?;
    super::ensure(read(stream, &to)? == scaled(&input, 3, seed), "a kernel gave wrong words")
}
