//! Benchmarks of dispatch + combine between ranks that are threads of this process.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use criterion::{Criterion, Throughput};
use half::bf16;
use moe_kernels::ep::{Config, ExpertParallel, World};
use moe_kernels::measure::interleaved;
use moe_kernels::ops::{combine, dispatch};
use moe_kernels::random::SplitMix64;
use moe_kernels::{Backend, DType, Result, TensorView, TensorViewMut};

/// DeepSeek-V3's layer: 7168 hidden, top-8 of 256.
const HIDDEN: usize = 7168;
const EXPERTS: usize = 256;
const K: usize = 8;
const RANKS: usize = 4;
const ROW_BYTES: usize = 2 * HIDDEN;

/// Distinct experts, uniform.
fn ids_of(rank: usize, num_tokens: usize) -> Vec<i32> {
    let mut random = SplitMix64::stream(1, rank as u64);
    let mut ids = Vec::new();
    for _ in 0..num_tokens {
        let row = ids.len();
        while ids.len() < row + K {
            let id = random.below(EXPERTS as u64) as i32;
            if !ids[row..].contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

/// Rows that all ranks receive.
fn num_rows(num_tokens: usize) -> usize {
    let rows = |rank: usize| -> usize {
        let ids = ids_of(rank, num_tokens);
        let ranks_of = |row: &[i32]| row.iter().fold(0u32, |mask, &e| mask | 1 << (e as usize * RANKS / EXPERTS)).count_ones() as usize;
        ids.chunks(K).map(ranks_of).sum()
    };
    (0..RANKS).map(rows).sum()
}

/// Runs `measure` with a closure that makes one dispatch + combine of `num_tokens` tokens on each of four ranks; rows are combined as they
/// arrived, and the sums are checked afterwards.
fn with_ranks(num_tokens: usize, measure: impl FnOnce(&mut dyn FnMut())) -> Result<()> {
    let (start, end, stop) = (Barrier::new(RANKS + 1), Barrier::new(RANKS + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let ranks = scope.spawn(|| {
            World::run(&Backend::cpu(), RANKS, |world| {
                let result = rank_loop(&world, num_tokens, &start, &end, &stop);
                if let Err(error) = &result {
                    // The measuring thread waits at a barrier that this rank will not reach.
                    eprintln!("rank {}: {error}", world.rank());
                    std::process::exit(1);
                }
                result
            })
        });
        measure(&mut || {
            start.wait();
            end.wait();
        });
        stop.store(true, Ordering::Relaxed);
        start.wait();
        ranks.join().expect("ranks do not panic")?.into_iter().collect::<Result<()>>()
    })
}

fn rank_loop(world: &World, num_tokens: usize, start: &Barrier, end: &Barrier, stop: &AtomicBool) -> Result<()> {
    let rank = world.rank().index();
    // Two banks and two sets of inputs and outputs: what one call left in the caches is not what the next one reads.
    let config = Config { in_flight: 2, ..Config::new(HIDDEN, DType::BF16, EXPERTS, K, num_tokens) };
    let mut ep = ExpertParallel::new(world, config)?;
    let mut routing = dispatch::Routing::new(&ep)?;
    let ids = ids_of(rank, num_tokens);
    let mut random = SplitMix64::stream(2, rank as u64);
    let mut row = |_| (0..num_tokens * HIDDEN).map(|_| bf16::from_f32(random.next_f32())).collect::<Vec<_>>();
    let xs: Vec<Vec<bf16>> = (0..2).map(&mut row).collect();
    let mut outs = vec![vec![bf16::ZERO; num_tokens * HIDDEN]; 2];
    let mut round = 0;
    loop {
        start.wait();
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let out = TensorViewMut::from_slice(&mut outs[round % 2], &[num_tokens, HIDDEN])?;
        let input = dispatch::Input {
            x: TensorView::from_slice(&xs[round % 2], &[num_tokens, HIDDEN])?,
            topk_idx: TensorView::from_slice(&ids, &[num_tokens, K])?,
            topk_weights: None,
            scales: None,
            num_tokens: dispatch::NumTokens::All,
        };
        let mut arrival = ep.dispatch(&mut routing, &input, dispatch::Outputs::default())?;
        if round < 2 {
            // What the experts would write: their input. Later rounds find it in the bank.
            let num_bytes = arrival.on_host()?.num_rows() * ROW_BYTES;
            let (rows, mut output) = arrival.parts();
            output.host_mut("bench", "expert_output")?[..num_bytes].copy_from_slice(&rows.host("bench", "x")?[..num_bytes]);
        }
        let y = combine::Input { y: combine::ExpertRows::InPlace, row_weights: None };
        ep.combine(&routing, arrival, &y, combine::Output { out, add_to: None, topk_weights: None })?;
        round += 1;
        end.wait();
    }
    for (x, out) in xs.iter().zip(&outs).take(round) {
        for t in 0..num_tokens {
            let ranks = ids[t * K..][..K].iter().fold(0u32, |mask, &e| mask | 1 << (e as usize * RANKS / EXPERTS)).count_ones();
            for h in 0..HIDDEN {
                // Up to four equal addends: exact in f32, one rounding.
                let want = bf16::from_f32(x[t * HIDDEN + h].to_f32() * ranks as f32);
                assert_eq!(out[t * HIDDEN + h].to_bits(), want.to_bits(), "rank {rank}, token {t}, element {h}");
            }
        }
    }
    Ok(())
}

/// Criterion's cases.
pub fn criterion(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ep");
    for num_tokens in [1, 32] {
        group.throughput(Throughput::Bytes((2 * (RANKS * num_tokens + num_rows(num_tokens)) * ROW_BYTES) as u64));
        let run = with_ranks(num_tokens, |call| {
            group.bench_function(format!("dispatch + combine, 4 ranks, {num_tokens} tokens each"), |b| b.iter(&mut *call));
        });
        run.expect("the configuration is valid");
    }
    group.finish();
}

/// Interleaved pairs with memcpy.
pub fn pairs(small: bool) {
    let (num_tokens, num_pairs) = if small { (16, 1) } else { (1024, 15) };
    let num_bytes = (RANKS * num_tokens + num_rows(num_tokens)) * ROW_BYTES;
    let source = vec![1u8; num_bytes];
    let mut copy = vec![2u8; num_bytes];
    let run = with_ranks(num_tokens, |call| {
        for _ in 0..4 {
            call();
        }
        let pairs = interleaved(num_pairs, &mut *call, || memcpy(&source, &mut copy));
        let rate = 2.0 * num_bytes as f64 / pairs.subject.median / 1e9;
        println!(
            "dispatch + combine, {} tokens in all, 4 ranks, 7168 bf16, top-8 of 256: ratio {}, {rate:.2} GB/s",
            RANKS * num_tokens,
            pairs.ratio
        );
    });
    run.expect("the configuration is valid");
}

/// The machine's copy, on two threads.
fn memcpy(source: &[u8], copy: &mut [u8]) {
    let half = source.len() / 2;
    let (first, second) = copy.split_at_mut(half);
    std::thread::scope(|scope| {
        scope.spawn(|| first.copy_from_slice(&source[..half]));
        second.copy_from_slice(&source[half..]);
    });
}
