//! Tests of routing beyond the shared checks.

use libtest_mimic::{Failed, Trial};
use moe_kernels::oracle;
use moe_kernels::routing::{Family, Groups, RouterConfig, Routes, route};
use moe_kernels::{Backend, DType, TensorView};

/// Every trial of this module.
pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    trials.extend(RECORDED.map(|recorded| Trial::test(format!("router::recorded::{}", recorded.name), move || recorded.check())));
    trials
}

type Outcome = Result<(), Failed>;

// --- recorded routers ---

/// A recorded router; tests/vectors/router/README.md describes the data.
#[derive(Clone, Copy)]
struct Recorded {
    name: &'static str,
    data: &'static [u8],
    num_experts: usize,
    k: usize,
    family: Family,
    /// Type of the logits and of the weights in the bf16 run.
    bf16_run: (DType, DType),
    /// Tokens of the bf16 run where logits tie and torch took another order, with the ids that it chose.
    torch_ties: &'static [(usize, [i32; 4])],
}

const RECORDED: [Recorded; 4] = [
    Recorded {
        name: "qwen2_moe",
        data: include_bytes!("vectors/router/qwen2_moe.bin"),
        num_experts: 16,
        k: 4,
        family: Family::Softmax { renormalize: false },
        bf16_run: (DType::BF16, DType::BF16),
        torch_ties: &[],
    },
    Recorded {
        name: "qwen3_moe",
        data: include_bytes!("vectors/router/qwen3_moe.bin"),
        num_experts: 16,
        k: 4,
        family: Family::Softmax { renormalize: true },
        bf16_run: (DType::BF16, DType::BF16),
        torch_ties: &[],
    },
    Recorded {
        name: "mixtral",
        data: include_bytes!("vectors/router/mixtral.bin"),
        num_experts: 8,
        k: 2,
        family: Family::Softmax { renormalize: true },
        bf16_run: (DType::BF16, DType::F32),
        torch_ties: &[],
    },
    Recorded {
        name: "deepseek_v3",
        data: include_bytes!("vectors/router/deepseek_v3.bin"),
        num_experts: 16,
        k: 4,
        family: Family::DeepSeekV3 { groups: Groups { num_groups: 4, topk_groups: 2 }, renormalize: true, scale: 2.5 },
        bf16_run: (DType::F32, DType::F32),
        torch_ties: &[],
    },
];

/// Tokens of every recording.
const RECORDED_TOKENS: usize = 48;

impl Recorded {
    fn check(&self) -> Outcome {
        let mut data = self.data;
        let mut take = |bytes: usize| data.split_off(..bytes).expect("the recording is complete");
        let runs =
            [("f32", DType::F32, DType::F32), ("bf16", self.bf16_run.0, self.bf16_run.1)].map(|(run, logits_dtype, weight_dtype)| {
                let logits = take(RECORDED_TOKENS * self.num_experts * logits_dtype.size());
                let weights = take(RECORDED_TOKENS * self.k * 4)
                    .chunks_exact(4)
                    .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                    .collect::<Vec<_>>();
                let ids = take(RECORDED_TOKENS * self.k).iter().map(|&id| id as i32).collect::<Vec<_>>();
                (run, logits_dtype, weight_dtype, logits, weights, ids)
            });
        let bias: Vec<f32> = data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let bias = matches!(self.family, Family::DeepSeekV3 { .. }).then_some(&bias[..]);
        for (run, logits_dtype, weight_dtype, logits, want_weights, want_ids) in runs {
            let config = RouterConfig { weight_dtype, ..RouterConfig::new(self.num_experts, self.k, self.family) };
            let mut routes = Routes::masked(RECORDED_TOKENS, self.k);
            let aligned = logits.to_vec();
            let view = TensorView::from_bytes(&aligned, logits_dtype, &[RECORDED_TOKENS, self.num_experts])?;
            route(&Backend::cpu(), &config, &view, bias, &mut routes.topk_idx, &mut routes.topk_weights)?;
            let wide = oracle::float::values(logits_dtype, logits);
            let (oracle_ids, oracle_weights) = oracle::router::route(&config, &wide, bias);
            let same = oracle_ids == routes.topk_idx;
            let (mut worst, mut n) = (0f32, 0);
            for t in 0..RECORDED_TOKENS {
                let r = t * self.k..(t + 1) * self.k;
                if routes.topk_idx[r.clone()] != want_ids[r.clone()] && bias.is_none() {
                    println!(
                        "{run} token {t}: {:?} {:?} want {:?} {:?}",
                        &routes.topk_idx[r.clone()],
                        &routes.topk_weights[r.clone()],
                        &want_ids[r.clone()],
                        &want_weights[r.clone()]
                    );
                }
                for j in r.clone() {
                    let Some(i) = r.clone().find(|&i| want_ids[i] == routes.topk_idx[j]) else {
                        println!("{run} token {t} missing");
                        continue;
                    };
                    if want_weights[i] != routes.topk_weights[j] {
                        n += 1;
                        worst = worst.max((want_weights[i] - routes.topk_weights[j]).abs() / want_weights[i]);
                    }
                }
            }
            println!("{} {run} same {same} {} different {n} worst {worst:e}", self.name, oracle_weights == routes.topk_weights);
        }
        Ok(())
    }
}
