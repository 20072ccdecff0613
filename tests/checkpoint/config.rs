//! config.json as publishers write it, its rules for dense layers, and what is refused.

use libtest_mimic::{Failed, Trial};
use moe_kernels::layer::{Architecture, Model, Preset, Shape};
use moe_kernels::routing::{Family, Groups, RouterConfig};
use moe_kernels::{DType, Error};
use serde_json::{Value, json};

use super::write::Draft;
use super::{refused, same};

pub fn trials() -> Vec<Trial> {
    vec![
        Trial::test("checkpoint::config: published models", published),
        Trial::test("checkpoint::config: presets", presets),
        Trial::test("checkpoint::config: defaults of families", defaults),
        Trial::test("checkpoint::config: dense layers", dense),
        Trial::test("checkpoint::config: refused", bad_values),
        Trial::test("checkpoint::config: no JSON", bad_json),
    ]
}

fn parse(config: &Value) -> Result<Model, Error> {
    Model::parse(config.to_string().as_bytes(), "config.json".as_ref())
}

/// The keys that matter here, with the values of published models that no preset has.
fn published() -> Result<(), Failed> {
    let groups = |num_groups, topk_groups| Groups { num_groups, topk_groups };
    let shape = |hidden, expert_width, shared_width, num_experts, k, family| Shape {
        hidden,
        expert_width,
        shared_width,
        shared_gate: false,
        router: RouterConfig::new(num_experts, k, family),
    };
    // DeepSeek-V2
    let v2 = json!({"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160,
        "n_shared_experts": 2, "norm_topk_prob": false, "num_experts_per_tok": 6, "num_hidden_layers": 60, "routed_scaling_factor": 16.0,
        "scoring_func": "softmax", "topk_group": 3, "topk_method": "group_limited_greedy", "torch_dtype": "bfloat16"});
    let model = parse(&v2)?;
    let family = Family::DeepSeekV2 { groups: Some(groups(8, 3)), renormalize: false, scale: 16.0 };
    same("V2", (model.architecture, model.shape), (Architecture::DeepSeekV2, shape(5120, 1536, 3072, 160, 6, family)))?;
    same("V2", model.moe_layers().collect::<Vec<_>>(), (1..60).collect())?;
    // DeepSeek-V2-Lite: groups are there and not used.
    let mut lite = v2.clone();
    for (key, value) in [("topk_method", json!("greedy")), ("n_group", json!(1)), ("topk_group", json!(1)), ("n_routed_experts", json!(64))]
    {
        lite[key] = value;
    }
    same("V2-Lite", parse(&lite)?.shape.router.family, Family::DeepSeekV2 { groups: None, renormalize: false, scale: 16.0 })?;
    // DeepSeek-V3, e4m3
    let v3 = json!({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16"});
    let model = parse(&v3)?;
    same("V3", (model.shape, model.moe_layers().count()), (Preset::named("DeepSeek-V3")?.shape, 58))?;
    // Kimi-K2: another model_type, the same class, one group.
    let mut kimi = v3.clone();
    for (key, value) in
        [("model_type", json!("kimi_k2")), ("n_group", json!(1)), ("topk_group", json!(1)), ("n_routed_experts", json!(384))]
    {
        kimi[key] = value;
    }
    let model = parse(&kimi)?;
    same("Kimi-K2", (model.architecture, model.model_type.as_str()), (Architecture::DeepSeekV3, "kimi_k2"))?;
    let family = Family::DeepSeekV3 { groups: groups(1, 1), renormalize: true, scale: 2.5 };
    same("Kimi-K2", model.shape, shape(7168, 2048, 2048, 384, 8, family))?;
    // A model_type that nobody knows, a class that is known.
    kimi["model_type"] = json!("someone_elses");
    same("class", parse(&kimi)?.architecture, Architecture::DeepSeekV3)?;
    kimi["architectures"] = json!(["DeepseekV3Formless", "DeepseekV3"]);
    refused("no class", parse(&kimi), &["`someone_elses`", "expected one of"])
}

/// Every preset from the keys of its config.json.
fn presets() -> Result<(), Failed> {
    let models = [
        (
            "Qwen1.5-MoE-A2.7B",
            json!({"model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 5632,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
            "norm_topk_prob": false, "decoder_sparse_step": 1, "torch_dtype": "bfloat16"}),
        ),
        (
            "OLMoE-1B-7B",
            json!({"model_type": "olmoe", "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 1024,
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": false, "torch_dtype": "bfloat16"}),
        ),
        (
            "Qwen3-30B-A3B",
            json!({"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true, "mlp_only_layers": [],
            "decoder_sparse_step": 1, "torch_dtype": "bfloat16"}),
        ),
        (
            "Qwen3-235B-A22B",
            json!({"model_type": "qwen3_moe", "num_hidden_layers": 94, "hidden_size": 4096, "intermediate_size": 12288,
            "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true, "torch_dtype": "bfloat16"}),
        ),
        (
            "Qwen3-Next-80B-A3B",
            json!({"model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 5120,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
            "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16"}),
        ),
        (
            "Qwen3.5-35B-A3B",
            json!({"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": {
            "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048, "moe_intermediate_size": 512, "hidden_act": "silu",
            "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "dtype": "bfloat16"},
            "vision_config": {"model_type": "qwen3_5_moe", "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh"}}),
        ),
        (
            "Mixtral-8x7B",
            json!({"model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
            "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu", "torch_dtype": "bfloat16"}),
        ),
    ];
    for (name, config) in models {
        let model = parse(&config)?;
        same(name, model.shape, Preset::named(name)?.shape)?;
        same(name, model.dtype, Some(DType::BF16))?;
        same(name, model.moe_layers().count(), model.num_layers)?;
    }
    Ok(())
}

/// Only sizes: everything else is the default of the family's class in transformers.
fn defaults() -> Result<(), Failed> {
    let softmax = |renormalize| Family::Softmax { renormalize };
    let v3 = Family::DeepSeekV3 { groups: Groups { num_groups: 8, topk_groups: 4 }, renormalize: true, scale: 2.5 };
    let cases = [
        ("qwen2_moe", softmax(false), 32, 0),
        ("qwen3_moe", softmax(false), 0, 0),
        ("qwen3_next", softmax(true), 32, 0),
        ("qwen3_5_moe", softmax(true), 32, 0),
        ("interns2_mobius", softmax(true), 32, 0),
        ("mixtral", softmax(true), 0, 0),
        ("olmoe", softmax(false), 0, 0),
        ("deepseek_v2", Family::DeepSeekV2 { groups: None, renormalize: false, scale: 1.0 }, 2 * 24, 0),
        ("deepseek_v3", v3, 24, 3),
    ];
    for (name, family, shared_width, first) in cases {
        let config = json!({"model_type": name, "num_hidden_layers": 9, "hidden_size": 16, "intermediate_size": 40, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32, "num_experts": 64, "num_experts_per_tok": 2});
        let model = parse(&config)?;
        same(name, (model.shape.router.family, model.shape.shared_width), (family, shared_width))?;
        same(name, model.shape.expert_width, if matches!(name, "mixtral" | "olmoe") { 40 } else { 24 })?;
        same(name, model.shape.shared_gate, shared_width == 32)?;
        same(name, (model.moe_layers().next(), model.dtype), (Some(first), None))?;
        same(name, model.num_banks, (name == "interns2_mobius").then_some(4))?;
        same(name, (model.architecture.name(), model.architecture.has_f32_logits()), (name, name.starts_with("deepseek")))?;
        same(name, model.architecture.has_f32_weights(), name.starts_with("deepseek") || name == "mixtral")?;
        // Every name of the number of experts, and two that agree.
        for key in ["num_local_experts", "n_routed_experts"] {
            let mut other = config.clone();
            other[key] = json!(64);
            same(name, parse(&other)?.shape, model.shape)?;
            other.as_object_mut().ok_or("object")?.remove("num_experts");
            same(name, parse(&other)?.shape, model.shape)?;
            other["num_experts"] = json!(32);
            refused(name, parse(&other), &["`num_", "expected"])?;
        }
        // Where the class looks at the key.
        let mut flag = config.clone();
        for value in [true, false] {
            flag["norm_topk_prob"] = json!(value);
            let got = match parse(&flag)?.shape.router.family {
                Family::Softmax { renormalize } | Family::DeepSeekV2 { renormalize, .. } | Family::DeepSeekV3 { renormalize, .. } => {
                    renormalize
                }
            };
            let want = match name {
                "qwen3_5_moe" | "mixtral" => true,
                "deepseek_v2" => false,
                _ => value,
            };
            same(&format!("{name}, norm_topk_prob {value}"), got, want)?;
        }
    }
    for (key, name, want) in
        [("dtype", "float16", DType::F16), ("torch_dtype", "float32", DType::F32), ("torch_dtype", "torch.bfloat16", DType::BF16)]
    {
        same(name, parse(&Draft::toy().set("torch_dtype", json!(null)).set(key, json!(name)).config)?.dtype, Some(want))?;
    }
    Ok(())
}

fn dense() -> Result<(), Failed> {
    let moe = |draft: &Draft| -> Result<Vec<usize>, Failed> { Ok(parse(&draft.config)?.moe_layers().collect()) };
    let qwen = Draft::toy().set("num_hidden_layers", json!(8));
    same("all", moe(&qwen)?, (0..8).collect())?;
    same(
        "null",
        moe(&Draft {
            config: {
                let mut c = qwen.config.clone();
                c["mlp_only_layers"] = json!(null);
                c
            },
            ..qwen.clone()
        })?,
        (0..8).collect(),
    )?;
    same("listed", moe(&qwen.clone().set("mlp_only_layers", json!([5, 0, 99])))?, vec![1, 2, 3, 4, 6, 7])?;
    same("step", moe(&qwen.clone().set("decoder_sparse_step", json!(3)))?, vec![2, 5])?;
    same("both", moe(&qwen.clone().set("decoder_sparse_step", json!(2)).set("mlp_only_layers", json!([3])))?, vec![1, 5, 7])?;
    same("none", moe(&qwen.set("decoder_sparse_step", json!(9)))?, vec![])?;
    let deepseek = Draft::of("deepseek_v3")?.set("num_hidden_layers", json!(8));
    same("first", moe(&deepseek.clone().set("first_k_dense_replace", json!(3)))?, vec![3, 4, 5, 6, 7])?;
    same("freq", moe(&deepseek.clone().set("first_k_dense_replace", json!(3)).set("moe_layer_freq", json!(2)))?, vec![4, 6])?;
    same("beyond", moe(&deepseek.set("first_k_dense_replace", json!(8)))?, vec![])?;
    // The layers themselves.
    let checkpoint = |draft: Draft| -> Result<_, Failed> { Ok(moe_kernels::layer::Checkpoint::open(draft.write()?.path())?) };
    let two = checkpoint(Draft::toy().set("num_hidden_layers", json!(9)).set("mlp_only_layers", json!([0, 3])))?;
    refused("dense", two.layer(3), &["layer is 3, which is dense", "1, 2, 4, 5, ..."])?;
    refused("end", two.layer(9), &["layer is 9", "less than 9"])?;
    refused("end", two.layer(usize::MAX), &["less than 9"])?;
    refused("other", two.layer(1), &["no tensor begins with", "`model.layers.1.`"])
}

fn bad_values() -> Result<(), Failed> {
    let big = 1_000_000_000_000u64;
    let cases = [
        (
            "model_type",
            json!("llama"),
            &[
                "`llama`",
                "qwen2_moe",
                "qwen3_moe",
                "qwen3_next",
                "qwen3_5_moe",
                "interns2_mobius",
                "mixtral",
                "olmoe",
                "deepseek_v2",
                "deepseek_v3",
            ][..],
        ),
        ("model_type", json!(7), &["`model_type` is missing"]),
        ("model_type", json!(null), &["`model_type` is missing", "mixtral"]),
        ("num_experts", json!(big), &["`num_experts` is 1000000000000", "an integer from 1 to"]),
        ("num_experts", json!(0), &["`num_experts` is 0"]),
        ("num_experts", json!(1), &["num_experts is 1"]),
        ("num_experts", json!(-4), &["`num_experts` is -4"]),
        ("num_experts", json!(2.5), &["`num_experts` is 2.5"]),
        ("num_experts", json!("2"), &["`num_experts` is `2`"]),
        ("num_experts", json!(1 << 20), &["num_experts is 1048576"]),
        ("num_experts", json!(null), &["`num_experts` or `num_local_experts` or `n_routed_experts` is missing"]),
        ("hidden_size", json!(0), &["`hidden_size` is 0"]),
        ("hidden_size", json!(9), &["hidden is 9", "multiple of 8"]),
        ("hidden_size", json!(null), &["`hidden_size` is missing"]),
        ("hidden_size", json!(big), &["`hidden_size` is 1000000000000"]),
        ("hidden_size", json!([8]), &["`hidden_size` is a list of 1"]),
        ("moe_intermediate_size", json!(-8), &["`moe_intermediate_size` is -8"]),
        ("num_hidden_layers", json!(big), &["`num_hidden_layers` is"]),
        ("num_experts_per_tok", json!(3), &["k is 3", "at most num_experts"]),
        ("num_experts_per_tok", json!(null), &["`num_experts_per_tok` is missing"]),
        ("norm_topk_prob", json!("yes"), &["`norm_topk_prob` is `yes`", "true or false"]),
        ("hidden_act", json!("gelu"), &["`hidden_act` is `gelu`, expected silu"]),
        ("hidden_act", json!(["silu"]), &["`hidden_act` is a list of 1"]),
        ("torch_dtype", json!("int8"), &["`torch_dtype` is `int8`"]),
        ("mlp_only_layers", json!([0, -1]), &["`mlp_only_layers` is -1"]),
        ("mlp_only_layers", json!(3), &["`mlp_only_layers` is 3", "a list"]),
        ("decoder_sparse_step", json!(0), &["`decoder_sparse_step` is 0"]),
        ("text_config", json!([]), &["`text_config` is a list of 0"]),
        ("text_config", json!({}), &["`text_config.hidden_size` is missing"]),
        ("quantization_config", json!({"quant_method": "gptq", "bits": 4}), &["`quantization_config.quant_method` is `gptq`"]),
        ("quantization_config", json!({"quant_method": "fp8"}), &["`quantization_config.weight_block_size` is []"]),
        ("quantization_config", json!(8), &["`quantization_config` is 8"]),
        ("model_type", json!("x".repeat(100_000)), &["xxx..."]),
    ];
    for (key, value, words) in cases {
        refused(key, parse(&Draft::toy().set(key, value).config), &[&["config.json"], words].concat())?;
    }
    let deepseek = [
        ("scoring_func", json!("softmax"), &["`scoring_func` is `softmax`, expected sigmoid"][..]),
        ("topk_method", json!("greedy"), &["`topk_method` is `greedy`, expected noaux_tc"]),
        ("n_group", json!(3), &["num_groups is 3", "a divisor of num_experts"]),
        ("topk_group", json!(5), &["topk_groups is 5"]),
        ("topk_group", json!(0), &["`topk_group` is 0"]),
        ("routed_scaling_factor", json!(1e300), &["`routed_scaling_factor` is 1e+300"]),
        ("routed_scaling_factor", json!("2.5"), &["`routed_scaling_factor` is `2.5`"]),
        ("first_k_dense_replace", json!(-1), &["`first_k_dense_replace` is -1"]),
        ("moe_layer_freq", json!(0), &["`moe_layer_freq` is 0"]),
        ("n_shared_experts", json!(1 << 20), &["shared_width is"]),
    ];
    for (key, value, words) in deepseek {
        refused(key, parse(&Draft::of("deepseek_v3")?.set(key, value).config), words)?;
    }
    let v2 = Draft::of("deepseek_v3")?.set("model_type", json!("deepseek_v2"));
    refused(
        "V2",
        parse(&v2.clone().set("topk_method", json!("noaux_tc")).config),
        &["`topk_method` is `noaux_tc`", "group_limited_greedy"],
    )?;
    let no_group = v2.set("topk_method", json!("group_limited_greedy")).set("n_group", json!(null));
    refused("V2", parse(&no_group.config), &["`n_group` is missing"])
}

fn bad_json() -> Result<(), Failed> {
    let cases: [(&str, Vec<u8>, &[&str]); 10] = [
        ("empty", vec![], &["config.json"]),
        ("cut", b"{\"model_type\": \"mix".to_vec(), &["config.json:1"]),
        ("list", b"[]".to_vec(), &["is not an object"]),
        ("twice", b"{\"hidden_size\": 8,\n\"hidden_size\": 16}".to_vec(), &["config.json:2", "`hidden_size` is there twice"]),
        ("twice, deeper", b"{\"a\": [{\"b\": 1, \"b\": 1}]}".to_vec(), &["`b` is there twice"]),
        ("behind", b"{} {}".to_vec(), &["trailing characters"]),
        ("not UTF-8", b"{\"model_type\": \"\xFF\"}".to_vec(), &["config.json"]),
        ("infinite", b"{\"hidden_size\": 1e999}".to_vec(), &["out of range"]),
        ("deep lists", [vec![b'['; 100_000], vec![b']'; 100_000]].concat(), &["recursion limit"]),
        ("deep objects", "{\"a\":".repeat(100_000).into_bytes(), &["recursion limit"]),
    ];
    for (what, bytes, words) in cases {
        refused(what, Model::parse(&bytes, "config.json".as_ref()), words)?;
    }
    Ok(())
}
