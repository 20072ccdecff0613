//! Routers against recordings of another implementation, and their bad input.

use libtest_mimic::{Failed, Trial};
use moe_kernels::routing::{Family, Groups, RouterConfig, Routes, route};
use moe_kernels::{Backend, DType, TensorView};
use moe_kernels::{oracle, tensor::Layout};

use super::{refused, same};

pub fn trials() -> Vec<Trial> {
    let mut trials: Vec<_> = RECORDINGS.map(|r| Trial::test(format!("router::recorded {}", r.name), move || r.check())).into();
    trials.push(Trial::test("router::bad input", bad_input));
    trials.push(Trial::test("router::groups limit the choice", groups_limit_the_choice));
    trials
}

/// A recorded router; tests/vectors/router/README.md describes the data.
#[derive(Clone, Copy)]
struct Recording {
    name: &'static str,
    data: &'static [u8],
    num_experts: usize,
    k: usize,
    family: Family,
    /// Type of the logits and of the weights in the bf16 run.
    bf16_run: [DType; 2],
    /// All tokens of the bf16 run whose recorded ids are not ours: two experts with equal logits, and the recorded ids.
    torch_ties: &'static [(usize, [usize; 2], [i32; 4])],
}

const RECORDINGS: [Recording; 4] = [
    Recording {
        name: "qwen2_moe",
        data: include_bytes!("../vectors/router/qwen2_moe.bin"),
        num_experts: 16,
        k: 4,
        family: Family::Softmax { renormalize: false },
        bf16_run: [DType::BF16, DType::BF16],
        torch_ties: &[(12, [13, 15], [0, 4, 15, 13]), (22, [8, 9], [10, 5, 15, 9])],
    },
    Recording {
        name: "qwen3_moe",
        data: include_bytes!("../vectors/router/qwen3_moe.bin"),
        num_experts: 16,
        k: 4,
        family: Family::Softmax { renormalize: true },
        bf16_run: [DType::BF16, DType::BF16],
        torch_ties: &[],
    },
    Recording {
        name: "mixtral",
        data: include_bytes!("../vectors/router/mixtral.bin"),
        num_experts: 8,
        k: 2,
        family: Family::Softmax { renormalize: true },
        bf16_run: [DType::BF16, DType::F32],
        torch_ties: &[],
    },
    Recording {
        name: "deepseek_v3",
        data: include_bytes!("../vectors/router/deepseek_v3.bin"),
        num_experts: 16,
        k: 4,
        family: Family::DeepSeekV3 { groups: Groups { num_groups: 4, topk_groups: 2 }, renormalize: true, scale: 2.5 },
        bf16_run: [DType::F32, DType::F32],
        torch_ties: &[],
    },
];

/// Tokens of every recording.
const NUM_TOKENS: usize = 48;
/// Relative difference of f32 weights, 4 units of 2^-23 (derived: one for each of the two exp, the rest for the sums in another order and two
/// divisions; seen: 2.4). Weights rounded to bf16 are equal.
const TOLERANCE: f32 = 4.0 / (1 << 23) as f32;

impl Recording {
    fn check(&self) -> Result<(), Failed> {
        let mut data = self.data;
        self.check_run("f32", &mut data, [DType::F32, DType::F32], &[])?;
        self.check_run("bf16", &mut data, self.bf16_run, self.torch_ties)?;
        same("bytes of the recording", self.bias().map_or(0, |b| b.len() * 4), data.len())
    }

    /// The end of the data.
    fn bias(&self) -> Option<Vec<f32>> {
        let is_v3 = matches!(self.family, Family::DeepSeekV3 { .. });
        is_v3.then(|| oracle::float::values(DType::F32, &self.data[self.data.len() - 4 * self.num_experts..]))
    }

    fn check_run(
        &self,
        run: &str,
        data: &mut &[u8],
        dtypes: [DType; 2],
        torch_ties: &[(usize, [usize; 2], [i32; 4])],
    ) -> Result<(), Failed> {
        let Recording { num_experts, k, .. } = *self;
        let [logits_dtype, weight_dtype] = dtypes;
        let mut take = |bytes: usize| data.split_off(..bytes).expect("the recording is complete");
        let logits = take(NUM_TOKENS * num_experts * logits_dtype.size()).to_vec();
        let want_weights = oracle::float::values(DType::F32, take(NUM_TOKENS * k * 4));
        let want_ids: Vec<i32> = take(NUM_TOKENS * k).iter().map(|&id| id.into()).collect();
        let values = oracle::float::values(logits_dtype, &logits);

        let config = RouterConfig { weight_dtype, ..RouterConfig::new(num_experts, k, self.family) };
        let mut routes = Routes::masked(NUM_TOKENS, k);
        let view = TensorView::from_bytes(&logits, logits_dtype, &[NUM_TOKENS, num_experts])?;
        route(&Backend::cpu(), &config, &view, self.bias().as_deref(), &mut routes.topk_idx, &mut routes.topk_weights)?;

        for t in 0..NUM_TOKENS {
            let (ids, weights) = (routes.idx_of(t), routes.weights_of(t));
            let mut want: Vec<(i32, f32)> = (t * k..t * k + k).map(|i| (want_ids[i], want_weights[i])).collect();
            if let Family::DeepSeekV3 { .. } = self.family {
                // Recorded in no order: take ours. A missing id keeps its place and fails below.
                want.sort_by_key(|(id, _)| ids.iter().position(|i| i == id).unwrap_or(k));
            }
            let recorded: Vec<i32> = want.iter().map(|w| w.0).collect();
            let what = format!("{run} run, token {t}");
            match torch_ties.iter().find(|tie| tie.0 == t) {
                None => same(&what, ids, &recorded[..])?,
                Some((_, [low, high], torch)) => {
                    same(&what, &recorded[..], &torch[..])?;
                    same(&what, values[t * num_experts + low], values[t * num_experts + high])?;
                    // Where torch has the higher id (first), we have the lower one.
                    let lower_first = torch.map(|id| {
                        if id == *high as i32 {
                            *low as i32
                        } else if id == *low as i32 {
                            *high as i32
                        } else {
                            id
                        }
                    });
                    same(&what, ids, &lower_first[..])?;
                }
            }
            for (&got, (_, want)) in weights.iter().zip(want) {
                let allowed = if weight_dtype == DType::F32 { want * TOLERANCE } else { 0.0 };
                let close = (got - want).abs() <= allowed; // not so for a NaN
                if !close {
                    return Err(format!("{what}: weights {weights:?}, recorded {want}").into());
                }
            }
        }
        Ok(())
    }
}

fn groups_limit_the_choice() -> Result<(), Failed> {
    let groups = Groups { num_groups: 3, topk_groups: 1 };
    let run = |family, logits: [f32; 6], bias: Option<&[f32]>| {
        let mut routes = Routes::masked(1, 2);
        let view = TensorView::from_slice(&logits, &[1, 6])?;
        let config = RouterConfig::new(6, 2, family);
        route(&Backend::cpu(), &config, &view, bias, &mut routes.topk_idx, &mut routes.topk_weights).map(|()| routes.topk_idx)
    };
    // V2: the group of the largest; the second largest is elsewhere. V3: the group with the largest sum of two.
    let logits = [4.0, -9.0, 3.0, 3.5, 0.0, 0.0];
    same("greedy", run(Family::DeepSeekV2 { groups: None, renormalize: false, scale: 1.0 }, logits, None)?, vec![0, 3])?;
    same("maximum", run(Family::DeepSeekV2 { groups: Some(groups), renormalize: false, scale: 1.0 }, logits, None)?, vec![0, 1])?;
    let v3 = Family::DeepSeekV3 { groups, renormalize: true, scale: 1.0 };
    same("sum of two", run(v3, logits, Some(&[0.0; 6]))?, vec![3, 2])?;
    // All biased scores are negative: experts of other groups still stay out, although a masked value of 0 would win.
    same("negative scores", run(v3, logits, Some(&[-2.0, -2.0, -2.0, -2.0, -1.0, -1.0]))?, vec![4, 5])
}

fn bad_input() -> Result<(), Failed> {
    let good = RouterConfig::new(8, 2, Family::Softmax { renormalize: true });
    let v2 =
        |num_groups, topk_groups| Family::DeepSeekV2 { groups: Some(Groups { num_groups, topk_groups }), renormalize: false, scale: 1.0 };
    let v3 = |num_groups, topk_groups, scale| Family::DeepSeekV3 { groups: Groups { num_groups, topk_groups }, renormalize: true, scale };
    let with = |family| RouterConfig { family, ..good };
    let configs = [
        (RouterConfig { num_experts: 0, ..good }, "router: num_experts is 0, expected 1 to 65536"),
        (RouterConfig { num_experts: usize::MAX, ..good }, &format!("router: num_experts is {}, expected 1 to 65536", usize::MAX)),
        (RouterConfig { k: 0, ..good }, "router: k is 0, expected 1 to 8 (at most 32, at most num_experts)"),
        (RouterConfig { k: 9, ..good }, "router: k is 9, expected 1 to 8 (at most 32, at most num_experts)"),
        (RouterConfig { num_experts: 64, k: 33, ..good }, "router: k is 33, expected 1 to 32 (at most 32, at most num_experts)"),
        (RouterConfig { weight_dtype: DType::E4M3, ..good }, "router: weight_dtype is e4m3, expected f32, f16 or bf16"),
        (with(v2(0, 1)), "router: num_groups is 0, expected a divisor of num_experts, 8, with at least 1 experts a group"),
        (with(v2(3, 1)), "router: num_groups is 3, expected a divisor of num_experts, 8, with at least 1 experts a group"),
        (with(v3(8, 2, 1.0)), "router: num_groups is 8, expected a divisor of num_experts, 8, with at least 2 experts a group"),
        (with(v2(4, 0)), "router: topk_groups is 0, expected 1 to num_groups, 4, with at least k, 2, experts in them"),
        (with(v2(4, 5)), "router: topk_groups is 5, expected 1 to num_groups, 4, with at least k, 2, experts in them"),
        (with(v2(8, 1)), "router: topk_groups is 1, expected 1 to num_groups, 8, with at least k, 2, experts in them"),
        (with(v3(4, 2, f32::NAN)), "router: scale is NaN, expected a finite number"),
        (with(v3(4, 2, f32::INFINITY)), "router: scale is inf, expected a finite number"),
    ];
    let logits = [0f32; 24];
    let view = TensorView::from_slice(&logits, &[3, 8])?;
    let call = |config: &RouterConfig, view: &TensorView, bias: Option<&[f32]>, num_idx: usize, num_weights: usize| {
        let (mut ids, mut weights) = (vec![-7; num_idx], vec![-7.0; num_weights]);
        let result = route(&Backend::cpu(), config, view, bias, &mut ids, &mut weights);
        assert!(result.is_ok() || ids.iter().all(|&id| id == -7) && weights.iter().all(|&w| w == -7.0), "a refused call wrote");
        result
    };
    for (config, message) in &configs {
        refused("configuration", call(config, &view, None, 6, 6), message)?;
    }
    let v3 = with(v3(4, 2, 1.0));
    refused("bias", call(&v3, &view, None, 6, 6), "router: bias is absent, expected of length num_experts, 8")?;
    refused("bias", call(&v3, &view, Some(&[0.0; 7]), 6, 6), "router: bias is of length 7, expected of length num_experts, 8")?;
    refused("bias", call(&good, &view, Some(&[0.0; 8]), 6, 6), "router: bias is of length 8, expected absent in this family")?;
    refused("ids", call(&good, &view, None, 5, 6), "router: topk_idx length is 5, expected T * k = 3 * 2 = 6")?;
    refused("weights", call(&good, &view, None, 6, 7), "router: topk_weights length is 7, expected T * k = 3 * 2 = 6")?;
    let flat = TensorView::from_slice(&logits, &[24])?;
    refused("logits", call(&good, &flat, None, 6, 6), "router: logits shape is [24], expected [T, 8]")?;
    let wide = TensorView::from_slice(&logits, &[2, 12])?;
    refused("logits", call(&good, &wide, None, 4, 4), "router: logits shape is [2, 12], expected [T, 8]")?;
    let bytes = TensorView::from_bytes(&[0; 24], DType::E4M3, &[3, 8])?;
    refused("logits", call(&good, &bytes, None, 6, 6), "router: logits dtype is e4m3, expected f32, f16 or bf16")?;
    let layout = Layout::contiguous("test", DType::F32, &[3, 8])?;
    let device = {
        // SAFETY: no operation runs with this view: it is refused.
        unsafe { TensorView::from_device(moe_kernels::DeviceAddress { device: 1, address: 0x1000 }, layout) }
    }?;
    let message = "router: logits is at address 0x1000 of device 1, expected in host memory (the backend is cpu)";
    refused("logits", call(&good, &device, None, 6, 6), message)
}
