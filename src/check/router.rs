//! Checks of routers.

use crate::backend::Backend;
use crate::check::guarded::Guarded;
use crate::check::{Failed, Group, variants};
use crate::ensure;
use crate::oracle;
use crate::oracle::compare::equal;
use crate::random::SplitMix64;
use crate::routing::{Family, Groups, RouterConfig, route};
use crate::tensor::{DType, Layout, TensorView};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Tokens: around a block of 16 and a task of 64, and more tasks than threads.
const TOKENS: [usize; 9] = [0, 1, 15, 16, 17, 63, 64, 65, 130];

/// Every group of this operation.
pub fn groups() -> Vec<Group> {
    // Experts and k of published models and the ends: one expert, all experts, the largest k.
    let softmax = [(1, 1), (2, 1), (8, 2), (9, 9), (16, 16), (40, 32), (60, 4), (64, 8), (128, 8), (256, 8), (512, 10)];
    let of = |num_groups, topk_groups| Groups { num_groups, topk_groups };
    let groups_v2 = [(64, 6, None), (160, 6, Some(of(8, 3))), (6, 3, Some(of(6, 3))), (12, 4, Some(of(3, 1))), (60, 10, Some(of(20, 20)))];
    let groups_v3 = [(256, 8, of(8, 4)), (384, 8, of(1, 1)), (16, 4, of(4, 2)), (18, 2, of(9, 1)), (64, 32, of(2, 1)), (33, 9, of(11, 5))];

    let mut families = Vec::new();
    for renormalize in [false, true] {
        let suffix = if renormalize { " renormalised" } else { "" };
        let name = |family: &str| format!("{family}{suffix}");
        families.push((name("softmax"), softmax.map(|(e, k)| RouterConfig::new(e, k, Family::Softmax { renormalize })).to_vec()));
        let v2 = |(e, k, groups)| RouterConfig::new(e, k, Family::DeepSeekV2 { groups, renormalize, scale: 16.0 });
        families.push((name("deepseek-v2"), groups_v2.map(v2).to_vec()));
        let v3 = |(e, k, groups)| RouterConfig::new(e, k, Family::DeepSeekV3 { groups, renormalize, scale: 2.5 });
        families.push((name("deepseek-v3"), groups_v3.map(v3).to_vec()));
    }
    let mut all = Vec::new();
    for (name, configs) in families {
        for dtype in FLOATS {
            let configs = configs.clone();
            all.push(Group::new("router", format!("{name} {dtype}"), move |backend| check_family(backend, &configs, dtype)));
        }
    }
    all
}

fn check_family(backend: &Backend, configs: &[RouterConfig], dtype: DType) -> Result<usize, Failed> {
    let variants = variants(backend)?;
    let mut cases = 0;
    for (i, &config) in configs.iter().enumerate() {
        for (j, &num_tokens) in TOKENS.iter().enumerate() {
            // Every rounding of the weights, and both a whole matrix and rows inside a wider one, with each size in some case.
            let config = RouterConfig { weight_dtype: FLOATS[(i + j) % 3], ..config };
            let case = Case::new(config, num_tokens, dtype, (i + j) % 2 * 3, (i * TOKENS.len() + j) as u64);
            for (name, backend) in &variants {
                case.run(backend).map_err(|e| Failed(format!("{name}: {num_tokens} tokens, logits {dtype}, {config:?}: {}", e.0)))?;
                cases += 1;
            }
        }
    }
    Ok(cases)
}

struct Case {
    config: RouterConfig,
    num_tokens: usize,
    dtype: DType,
    row_stride: usize,
    logits: Vec<u8>,
    bias: Option<Vec<f32>>,
    want_ids: Vec<i32>,
    want_weights: Vec<f32>,
}

impl Case {
    /// Rows are `gap` elements apart. The gap holds NaN, which would show.
    fn new(config: RouterConfig, num_tokens: usize, dtype: DType, gap: usize, seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let num_experts = config.num_experts;
        let is_v3 = matches!(config.family, Family::DeepSeekV3 { .. });
        // Of both signs, so that biased scores are negative too.
        let bias = is_v3.then(|| (0..num_experts).map(|_| random.next_f32()).collect::<Vec<_>>());
        let (mut logits, mut values) = (Vec::new(), Vec::new());
        for token in 0..num_tokens {
            for _ in 0..num_experts {
                let start = logits.len();
                oracle::float::push(dtype, logit(token, &mut random), &mut logits);
                values.push(oracle::float::widen(dtype, oracle::float::bits(&logits[start..])));
            }
            (0..gap).for_each(|_| oracle::float::push(dtype, f32::NAN, &mut logits));
        }
        let (want_ids, want_weights) = oracle::router::route(&config, &values, bias.as_deref());
        Case { config, num_tokens, dtype, row_stride: num_experts + gap, logits, bias, want_ids, want_weights }
    }

    fn run(&self, backend: &Backend) -> Result<(), Failed> {
        let Case { config, num_tokens, .. } = self;
        let shape = [*num_tokens, config.k];
        for (t, ids) in self.want_ids.chunks_exact(config.k).enumerate() {
            let valid = ids.iter().enumerate().all(|(j, id)| (0..config.num_experts as i32).contains(id) && !ids[..j].contains(id));
            ensure!(valid, "token {t}: ids {ids:?} are not distinct experts");
        }
        let layout = Layout::strided("check", self.dtype, &[*num_tokens, config.num_experts], &[self.row_stride, 1])?;
        let bytes = num_tokens * config.k * 4;
        let (mut ids, mut weights) = (Guarded::new(bytes), Guarded::new(bytes));
        {
            let (ids, weights) = (bytemuck::cast_slice_mut(ids.bytes_mut()), bytemuck::cast_slice_mut(weights.bytes_mut()));
            route(backend, config, &TensorView::new(&self.logits, layout)?, self.bias.as_deref(), ids, weights)?;
        }
        ids.check("topk_idx")?;
        weights.check("topk_weights")?;
        equal("topk_idx", DType::I32, &shape, ids.bytes(), bytemuck::cast_slice(&self.want_ids))?;
        equal("topk_weights", DType::F32, &shape, weights.bytes(), bytemuck::cast_slice(&self.want_weights))?;
        Ok(())
    }
}

/// One logit; the token says what kind of row it is in.
fn logit(token: usize, random: &mut SplitMix64) -> f32 {
    const SPECIAL: [f32; 8] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-40, f32::MAX, f32::MIN];
    let x = random.next_f32();
    match token % 7 {
        0 => x * 4.0,
        1 => x * 0.01,
        2 => (x * 2.0).round(), // five values: ties
        3 => 1.0,               // all equal
        4 => x * 200.0,         // most probabilities underflow to 0
        5 => {
            if x > 0.9 {
                f32::NEG_INFINITY
            } else {
                x
            }
        } // experts that are switched off
        _ => {
            if x > 0.95 {
                SPECIAL[random.below(8) as usize]
            } else {
                x
            }
        } // one in 40 is special
    }
}
