"""Makes the samples olmoe, qwen3_next, qwen3_5_moe and deepseek_v2 beside this file: toy checkpoints saved by transformers, with the MoE block of layer 1
recorded. Needs torch 2.11.0 and transformers 5.17.0 (CPU). Only the tensors of that block are kept.

Weights: the library's own initialisation, seed 3, router and shared gate x 8, the block's other matrices x 2, rounded to bf16. Input: 48 tokens of N(0, 1).
Seeds of the input are tried from 7 on until no recorded bf16 score ties for the last place, so that the choice of experts is unique.
"""

import json
import pathlib

import torch
import transformers
from safetensors.torch import load_file, save_file

HIDDEN, TOKENS, EXPERTS, K = 128, 48, 16, 4
COMMON = dict(vocab_size=256, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256)
GQA = dict(num_key_value_heads=2, num_experts=EXPERTS, num_experts_per_tok=K)
LINEAR = dict(head_dim=32, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
WIDTHS = dict(moe_intermediate_size=64, shared_expert_intermediate_size=96)


def configs():
    yield "olmoe", transformers.OlmoeConfig(**COMMON, **GQA, intermediate_size=64, eos_token_id=1, pad_token_id=0)
    yield "qwen3_next", transformers.Qwen3NextConfig(**COMMON, **GQA, **LINEAR, **WIDTHS, intermediate_size=256)
    text = transformers.Qwen3_5MoeTextConfig(**COMMON, **GQA, **LINEAR, **WIDTHS).to_dict()
    vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=HIDDEN)
    yield "qwen3_5_moe", transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    yield "deepseek_v2", transformers.DeepseekV2Config(
        **COMMON, num_key_value_heads=4, intermediate_size=256, moe_intermediate_size=64, n_routed_experts=EXPERTS, num_experts_per_tok=K,
        n_shared_experts=2, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, first_k_dense_replace=1,
        topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=16.0)


def scaled(model):
    for name, parameter in model.named_parameters():
        if ".mlp." in name:
            parameter.data.mul_(8 if "gate.weight" in name else 2)
    return model.to(torch.bfloat16)


def record(block, x, run, tensors):
    def hook(name):
        def keep(_module, _inputs, outputs):
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            tensors.update({f"{run}.{name}.{i}": t.detach().clone().contiguous() for i, t in enumerate(outputs)})
        return keep

    hooks = [module.register_forward_hook(hook(name)) for name, module in block.named_children()]
    with torch.no_grad():
        y = block(x)
    for h in hooks:
        h.remove()
    tensors[f"{run}.input"] = x.clone()
    tensors[f"{run}.output"] = (y[0] if isinstance(y, tuple) else y).clone().contiguous()


def has_tie(tensors):
    scores = tensors["bf16.gate.0"].float().sort(descending=True).values
    return bool((scores[:, K - 1] == scores[:, K]).any())


def main():
    folder = pathlib.Path(__file__).parent
    for name, config in configs():
        torch.manual_seed(3)
        auto = transformers.AutoModelForImageTextToText if name == "qwen3_5_moe" else transformers.AutoModelForCausalLM
        model = scaled(auto.from_config(config).to(torch.float32))
        path = folder / name
        model.save_pretrained(path)
        kept = {k: t for k, t in load_file(path / "model.safetensors").items() if ".layers.1.mlp." in k}
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
        (path / "generation_config.json").unlink(missing_ok=True)
        layers = next(m for n, m in model.named_modules() if n.endswith("layers") and "visual" not in n)
        for seed in range(7, 100):
            x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
            tensors = {}
            for run, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
                block = layers[1].mlp.to(dtype)
                record(block, x.to(dtype), run, tensors)
            layers[1].mlp.to(torch.bfloat16)
            if not has_tie(tensors):
                break
        save_file(tensors, path / "golden_layer1.safetensors")
        print(json.dumps({"model": name, "input_seed": seed, "tensors": len(kept)}))


if __name__ == "__main__":
    main()
