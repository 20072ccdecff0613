//! The shared-expert gate: criterion's cases, and pairs with the fastest read of the same bytes.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use moe_kernels::cpu::Level;
use moe_kernels::measure::{Pairs, interleaved};
use moe_kernels::ops::gate::{GateOptions, gate, gate_mul_add};
use moe_kernels::random::SplitMix64;
use moe_kernels::{Backend, Cpu, TensorView, TensorViewMut};
use rayon::prelude::*;

/// Hidden size of Qwen1.5-MoE-A2.7B (spec: its configuration).
const K: usize = 2048;
/// Threads of the pairs, as the target says.
const NUM_THREADS: usize = 2;

/// Criterion's cases: one token, a small batch and a large one.
pub fn criterion(criterion: &mut Criterion) {
    let backend = Backend::cpu();
    let w = random(K, 1);
    let mut group = criterion.benchmark_group("gate");
    for num_tokens in [1usize, 64, 1024] {
        let x = random(num_tokens * K, 2);
        let mut out = vec![bf16::ZERO; num_tokens];
        group.throughput(Throughput::Bytes((num_tokens * K * 2) as u64));
        group.bench_function(BenchmarkId::new("gate", num_tokens), |b| b.iter(|| run_gate(&backend, &x, &w, &mut out)));
        let s = random(num_tokens * K, 3);
        let mut routed = random(num_tokens * K, 4);
        group.throughput(Throughput::Bytes((num_tokens * K * 2 * 4) as u64));
        group.bench_function(BenchmarkId::new("gate_mul_add", num_tokens), |b| {
            b.iter(|| {
                let view = |v| TensorView::from_slice(v, &[num_tokens, K]).unwrap();
                let out = TensorViewMut::from_slice(&mut routed, &[num_tokens, K]).unwrap();
                let w = TensorView::from_slice(&w, &[K]).unwrap();
                gate_mul_add(&backend, view(&x), w, view(&s), &GateOptions::default(), out).unwrap();
            })
        });
    }
    group.finish();
}

/// Interleaved pairs with the better of a plain and a prefetching read, over buffers far beyond the caches.
pub fn pairs(small: bool) {
    let (num_tokens, num_buffers, calls, num_pairs) = if small { (64, 2, 1, 1) } else { (4096, 64, 8, 21) };
    let buffer_len = num_tokens * K;
    let x = random(num_buffers * buffer_len, 5);
    let w = random(K, 6);
    let mut out = vec![bf16::ZERO; num_tokens];
    let pool = rayon::ThreadPoolBuilder::new().num_threads(NUM_THREADS).build().expect("threads");
    let bytes = calls * buffer_len * 2;
    for level in Level::available() {
        if level.name() == "scalar" {
            continue;
        }
        let backend = Backend::Cpu(Cpu::with_threads(NUM_THREADS).expect("threads").at_level(level));
        let mut slowest: Option<Pairs> = None;
        for (name, read) in [("plain read", read_plain as fn(&[u8])), ("prefetching read", read_prefetching)] {
            // Each run takes the buffers behind those of the run before, so nothing is left of them in any cache.
            let next = std::cell::Cell::new(0);
            let buffer = || {
                let at = next.replace((next.get() + 1) % num_buffers);
                &x[at * buffer_len..][..buffer_len]
            };
            let pairs = interleaved(
                num_pairs,
                || (0..calls).for_each(|_| run_gate(&backend, buffer(), &w, &mut out)),
                || {
                    for _ in 0..calls {
                        let bytes: &[u8] = bytemuck::cast_slice(buffer());
                        pool.install(|| bytes.par_chunks(bytes.len().div_ceil(4 * NUM_THREADS)).for_each(read));
                    }
                },
            );
            print_pairs(level, num_tokens, name, &pairs, bytes);
            if slowest.is_none_or(|other| pairs.ratio.median < other.ratio.median) {
                slowest = Some(pairs);
            }
        }
        let ratio = slowest.expect("two reads were measured").ratio;
        println!("gate {num_tokens} x {K} bf16, {}: {ratio} of the better read", level.name());
    }
}

fn print_pairs(level: Level, num_tokens: usize, name: &str, pairs: &Pairs, bytes: usize) {
    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    println!(
        "gate {num_tokens} x {K} bf16, {}, {NUM_THREADS} threads: {:.1} GB/s; {name} {:.1} GB/s; ratio {}",
        level.name(),
        rate(pairs.subject.median),
        rate(pairs.reference.median),
        pairs.ratio
    );
}

fn run_gate(backend: &Backend, x: &[bf16], w: &[bf16], out: &mut [bf16]) {
    let num_tokens = out.len();
    let x = TensorView::from_slice(x, &[num_tokens, K]).unwrap();
    let w = TensorView::from_slice(w, &[K]).unwrap();
    gate(backend, x, w, &GateOptions::default(), TensorViewMut::from_slice(out, &[num_tokens]).unwrap()).unwrap();
}

fn random(len: usize, seed: u64) -> Vec<bf16> {
    let stream = SplitMix64::new(seed);
    (0..len as u64).into_par_iter().map(|i| bf16::from_f32(moe_kernels::random::symmetric_f32(stream.at(i)))).collect()
}

/// Reads every byte, in order.
fn read_plain(bytes: &[u8]) {
    read::<0>(bytes);
}

/// Reads every byte and asks for the lines ahead.
fn read_prefetching(bytes: &[u8]) {
    // Measured: the best of 1, 2, 4, 8, 16 and 32 KiB, T0, T1 and NTA, on a Zen 4.
    read::<4096>(bytes);
}

fn read<const AHEAD: usize>(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature was detected.
            return unsafe { read_avx512::<AHEAD>(bytes) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was detected.
            return unsafe { read_avx2::<AHEAD>(bytes) };
        }
    }
    black_box(bytes.chunks_exact(8).fold(0, |sum, b| sum ^ u64::from_le_bytes(b.try_into().unwrap())));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn read_avx512<const AHEAD: usize>(bytes: &[u8]) {
    use std::arch::x86_64::*;
    let mut sums = [_mm512_setzero_si512(); 4];
    for chunk in bytes.chunks_exact(256) {
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: 64 bytes at 64 * i lie inside the chunk of 256, and a prefetch may be of any address.
            let v = unsafe {
                let address = chunk.as_ptr().add(64 * i);
                if AHEAD > 0 {
                    _mm_prefetch::<_MM_HINT_T1>(address.wrapping_add(AHEAD).cast());
                }
                _mm512_loadu_si512(address.cast())
            };
            *sum = _mm512_xor_si512(*sum, v);
        }
    }
    let sum = _mm512_xor_si512(_mm512_xor_si512(sums[0], sums[1]), _mm512_xor_si512(sums[2], sums[3]));
    black_box(_mm512_reduce_or_epi64(sum));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2<const AHEAD: usize>(bytes: &[u8]) {
    use std::arch::x86_64::*;
    let mut sums = [_mm256_setzero_si256(); 8];
    for chunk in bytes.chunks_exact(256) {
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: 32 bytes at 32 * i lie inside the chunk of 256, and a prefetch may be of any address.
            let v = unsafe {
                let address = chunk.as_ptr().add(32 * i);
                if AHEAD > 0 && i % 2 == 0 {
                    _mm_prefetch::<_MM_HINT_T1>(address.wrapping_add(AHEAD).cast());
                }
                _mm256_loadu_si256(address.cast())
            };
            *sum = _mm256_xor_si256(*sum, v);
        }
    }
    black_box(sums.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_xor_si256(a, b)));
}
