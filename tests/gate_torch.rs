//! The gate against what PyTorch computed on a GPU and on a CPU, recorded by `tests/vectors/gate/make.py`.

use std::path::Path;

use half::{bf16, f16};
use libtest_mimic::{Failed, Trial};
use moe_kernels::check::guarded::Guarded;
use moe_kernels::check::{self, variants};
use moe_kernels::ops::gate::{Activation, GateOptions, Rounding, gate, gate_mul, gate_mul_add, sigmoid_mul};
use moe_kernels::random::{SplitMix64, symmetric_f32};
use moe_kernels::tensor::Layout;
use moe_kernels::{Backend, DType};
use serde::Deserialize;
use sha2::{Digest, Sha256};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let run = |name: String, test: fn(&Recording, &Backend, DType) -> Result<(), check::Failed>, dtype: DType| {
        Trial::test(name, move || {
            let backend = Backend::from_name(&std::env::var("MOE_BACKEND").unwrap_or_else(|_| "cpu".into()))?;
            let recording = Recording::read()?;
            for (name, backend) in variants(&backend).map_err(|failed| failed.0)? {
                test(&recording, &backend, dtype).map_err(|failed| format!("{name}: {}", failed.0))?;
            }
            Ok(())
        })
    };
    let chains = [DType::BF16, DType::F16].map(|dtype| run(format!("gate_torch::every rounded dot, {dtype}"), every_rounded_dot, dtype));
    let dots = [DType::BF16, DType::F16, DType::F32].map(|dtype| run(format!("gate_torch::dots, {dtype}"), dots, dtype));
    chains.into_iter().chain(dots).collect()
}

/// Patterns of a 16-bit type.
const NUM_PATTERNS: usize = 1 << 16;
/// How every NaN is recorded.
const NAN: u16 = 0x7FFF;

/// Dots (f16) whose sigmoid differs from that of torch on a GPU by one f16 ulp: the dot, our sigmoid, torch's. Torch on a CPU has ours.
///
/// Each true sigmoid lies within 0.0001 f16 ulp of the middle between two numbers, so the last bit of exp(-dot) in f32 decides. Ours is the true value
/// rounded correctly at all three. Torch's exp on a GPU, which rests on the hardware's approximation of 2^x, is one ulp above it at the first two and one
/// below at the third (seen on an H200). For bf16 there is no such dot.
const OTHER_EXP: [(usize, u16, u16); 3] = [(0x9D80, 0x37FB, 0x37FA), (0xA0C0, 0x37F7, 0x37F6), (0xA140, 0x37F5, 0x37F6)];

#[derive(Deserialize)]
struct Recording {
    chain: std::collections::BTreeMap<String, Chain>,
    dots: Vec<Dots>,
}

#[derive(Deserialize)]
struct Chain {
    linear: Table,
    sigmoid: Table,
    product: Table,
    sum: Table,
}

/// A table of 65536 results, as what differs from a formula, and a hash of the whole.
#[derive(Deserialize)]
struct Table {
    sha256: String,
    exceptions: Vec<(usize, u16)>,
}

/// Four rows' dots, as patterns: one row at a time and all together, with torch's defaults and without reduced precision inside the GEMM.
#[derive(Deserialize)]
struct Dots {
    dtype: DType,
    k: usize,
    alone: Vec<u32>,
    together: Vec<u32>,
    alone_full: Vec<u32>,
    together_full: Vec<u32>,
}

impl Recording {
    fn read() -> Result<Self, Failed> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/gate/torch.json");
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }
}

impl Table {
    /// torch's results: those of `formula`, rounded to f32 and then to the type, but for the exceptions. The hash says that nothing is missing.
    fn patterns(&self, dtype: DType, formula: impl Fn(usize) -> f64) -> Result<Vec<u16>, check::Failed> {
        let mut patterns: Vec<u16> = (0..NUM_PATTERNS).map(|i| narrow(dtype, formula(i) as f32)).collect();
        for &(i, pattern) in &self.exceptions {
            patterns[i] = pattern;
        }
        let bytes: Vec<u8> = patterns.iter().flat_map(|pattern| pattern.to_le_bytes()).collect();
        let hash: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        if hash == self.sha256 {
            Ok(patterns)
        } else {
            Err(check::Failed(format!("the table has hash {hash}, torch's has {}", self.sha256)))
        }
    }
}

fn narrow(dtype: DType, x: f32) -> u16 {
    match dtype {
        _ if x.is_nan() => NAN,
        DType::BF16 => bf16::from_f32(x).to_bits(),
        _ => f16::from_f32(x).to_bits(),
    }
}

fn widen(dtype: DType, pattern: u16) -> f64 {
    match dtype {
        DType::BF16 => bf16::from_bits(pattern).to_f64(),
        _ => f16::from_bits(pattern).to_f64(),
    }
}

/// Output `i` of SplitMix64 as a number in [-1, 1): `values` of the script.
fn value(seed: u64, i: usize) -> f32 {
    symmetric_f32(SplitMix64::new(seed).at(i as u64))
}

/// A column, or a row, in the memory of the backend.
fn tensor(patterns: &[u16]) -> Guarded {
    let mut memory = Guarded::new(patterns.len() * 2);
    memory.bytes_mut().copy_from_slice(bytemuck::cast_slice(patterns));
    memory
}

fn every_rounded_dot(recording: &Recording, backend: &Backend, dtype: DType) -> Result<(), check::Failed> {
    ["cuda", "cpu"].into_iter().try_for_each(|device| {
        let result = chain_of(&recording.chain[&format!("{device} {dtype}")], device, backend, dtype);
        result.map_err(|failed| check::Failed(format!("torch on {device}: {}", failed.0)))
    })
}

fn chain_of(chain: &Chain, device: &str, backend: &Backend, dtype: DType) -> Result<(), check::Failed> {
    let patterns: Vec<u16> = (0..NUM_PATTERNS).map(|i| i as u16).collect();
    let random = |seed| -> Vec<u16> { (0..NUM_PATTERNS).map(|i| narrow(dtype, value(seed, i) * 3.0)).collect() };
    let (s_patterns, before) = (random(5), random(6));
    let linear = chain.linear.patterns(dtype, |i| widen(dtype, patterns[i]))?;
    let sigmoid = chain.sigmoid.patterns(dtype, |i| 1.0 / (1.0 + (-widen(dtype, linear[i])).exp()))?;
    let product = chain.product.patterns(dtype, |i| widen(dtype, sigmoid[i]) * widen(dtype, s_patterns[i]))?;
    let sum = chain.sum.patterns(dtype, |i| widen(dtype, before[i]) + widen(dtype, product[i]))?;
    // torch's chain goes on from its sigmoid, ours from ours.
    let (mut sigmoid, mut product, mut sum) = (sigmoid, product, sum);
    for (i, ours, torch) in OTHER_EXP.into_iter().filter(|_| device == "cuda" && dtype == DType::F16) {
        if sigmoid[i] != torch {
            return Err(check::Failed(format!("dot {i:#06x}: torch's sigmoid is {:#06x}, not {torch:#06x}", sigmoid[i])));
        }
        sigmoid[i] = ours;
        product[i] = narrow(dtype, (widen(dtype, ours) * widen(dtype, s_patterns[i])) as f32);
        sum[i] = narrow(dtype, (widen(dtype, before[i]) + widen(dtype, product[i])) as f32);
    }

    // With K = 1 and a weight of 1 the dot is the pattern.
    let column = Layout::contiguous("test", dtype, &[NUM_PATTERNS, 1])?;
    let (x, w, s, g) = (tensor(&patterns), tensor(&[narrow(dtype, 1.0)]), tensor(&s_patterns), tensor(&linear));
    let (x, s, g) = (x.view(backend, 0, column)?, s.view(backend, 0, column)?, g.view(backend, 0, column)?);
    let w = w.view(backend, 0, Layout::contiguous("test", dtype, &[1])?)?;
    let framework = GateOptions { rounding: Rounding::Framework, ..GateOptions::default() };
    let only_linear = GateOptions { activation: Activation::Linear, ..framework };
    let compare = |step: &str, want: &[u16], run: &dyn Fn(&mut Guarded) -> Result<(), check::Failed>| {
        let mut out = tensor(&before);
        run(&mut out)?;
        out.fetch(backend)?;
        out.check(step)?;
        let got: &[u16] = bytemuck::cast_slice(out.bytes());
        let got = |i: usize| if widen(dtype, got[i]).is_nan() { NAN } else { got[i] };
        let wrong: Vec<usize> = (0..NUM_PATTERNS).filter(|&i| got(i) != want[i]).collect();
        match wrong.first() {
            None => Ok(()),
            Some(&i) => Err(check::Failed(format!(
                "{step}: {} of {NUM_PATTERNS} differ from torch; first at dot {:#06x} ({}): got {:#06x}, torch has {:#06x}",
                wrong.len(),
                patterns[i],
                widen(dtype, patterns[i]),
                got(i),
                want[i],
            ))),
        }
    };
    // The bf16 products of torch on a CPU (oneDNN) flush subnormal numbers to zero; nothing behind the sigmoid sees it.
    if device == "cuda" {
        compare("linear", &linear, &|out| Ok(gate(backend, x, w, &only_linear, out.view_mut(backend, 0, column)?)?))?;
    }
    compare("sigmoid", &sigmoid, &|out| Ok(gate(backend, x, w, &framework, out.view_mut(backend, 0, column)?)?))?;
    compare("product", &product, &|out| Ok(gate_mul(backend, x, w, s, &framework, out.view_mut(backend, 0, column)?)?))?;
    compare("sum", &sum, &|out| Ok(gate_mul_add(backend, x, w, s, &framework, out.view_mut(backend, 0, column)?)?))?;
    compare("product of the sigmoid of torch's linear", &product, &|out| {
        Ok(sigmoid_mul(backend, s, g, Rounding::Framework, out.view_mut(backend, 0, column)?)?)
    })
}

/// Distance from `x` to the next number of the type that is larger in magnitude.
fn ulp(dtype: DType, x: f64) -> f64 {
    // Significant bits after the first, and the exponent of the smallest normal number (spec: IEEE 754; bf16 has the exponents of f32).
    let (bits, least) = match dtype {
        DType::F32 => (23, -126),
        DType::BF16 => (7, -126),
        _ => (10, -14),
    };
    let exponent = if x == 0.0 { least } else { (x.abs().log2().floor() as i32).max(least) };
    2f64.powi(exponent - bits)
}

fn dots(recording: &Recording, backend: &Backend, dtype: DType) -> Result<(), check::Failed> {
    let mut num_ks = 0;
    for recorded in recording.dots.iter().filter(|recorded| recorded.dtype == dtype) {
        num_ks += 1;
        let k = recorded.k;
        let rounded = |x: f32| if dtype == DType::F32 { x } else { widen(dtype, narrow(dtype, x)) as f32 };
        let w: Vec<f32> = (0..k).map(|i| rounded(value(k as u64, i))).collect();
        let num_rows = recorded.alone.len();
        let row = |r: usize| -> Vec<f32> {
            let signed = |i: usize, x: f32| if r == 3 { x.copysign(w[i]) } else { x };
            (0..k).map(|i| rounded(signed(i, value((k + 1 + r) as u64, i)))).collect()
        };
        let rows: Vec<Vec<f32>> = (0..num_rows).map(row).collect();
        let bytes = |values: &[f32]| -> Vec<u8> {
            match dtype {
                DType::F32 => bytemuck::cast_slice(values).to_vec(),
                _ => values.iter().flat_map(|&x| narrow(dtype, x).to_le_bytes()).collect(),
            }
        };
        let memory = |bytes: Vec<u8>| {
            let mut memory = Guarded::new(bytes.len());
            memory.bytes_mut().copy_from_slice(&bytes);
            memory
        };
        let (x_memory, w_memory) = (memory(bytes(&rows.concat())), memory(bytes(&w)));
        let x = x_memory.view(backend, 0, Layout::contiguous("test", dtype, &[num_rows, k])?)?;
        let w_view = w_memory.view(backend, 0, Layout::contiguous("test", dtype, &[k])?)?;
        let mut out = Guarded::new(num_rows * 4);
        let linear = GateOptions { activation: Activation::Linear, ..GateOptions::default() };
        gate(backend, x, w_view, &linear, out.view_mut(backend, 0, Layout::contiguous("test", DType::F32, &[num_rows])?)?)?;
        out.fetch(backend)?;
        let ours: &[f32] = bytemuck::cast_slice(out.bytes());
        for (r, x) in rows.iter().enumerate() {
            let magnitude: f64 = x.iter().zip(&w).map(|(&x, &w)| (f64::from(x) * f64::from(w)).abs()).sum();
            let forms = [
                ("alone", &recorded.alone),
                ("together", &recorded.together),
                ("alone, full precision", &recorded.alone_full),
                ("together, full precision", &recorded.together_full),
            ];
            for (form, patterns) in forms {
                let torch = match dtype {
                    DType::F32 => f64::from(f32::from_bits(patterns[r])),
                    _ => widen(dtype, patterns[r] as u16),
                };
                let bound = ulp(dtype, torch).max(2f64.powi(-20) * magnitude);
                let distance = (f64::from(ours[r]) - torch).abs();
                // NaN is never within the bound.
                let is_near = distance <= bound;
                if !is_near {
                    return Err(check::Failed(format!(
                        "K = {k}, row {r}, {form}: {} against torch's {torch}: {distance} apart, at most {bound}",
                        ours[r]
                    )));
                }
            }
        }
    }
    if num_ks == 0 { Err(check::Failed(format!("no dots of {dtype} are recorded"))) } else { Ok(()) }
}
