"""Records what PyTorch computes for the shared expert's gate on a GPU and on a CPU: writes torch.json beside this file, or to the path given.

chain, by device: for every pattern of bf16 and f16, x [65536, 1] and w = 1: linear, sigmoid of it, that times s, that added to out, each stored in the type (the chain of
transformers' blocks). A table of 65536 values is kept as the exceptions from a formula in f64 and the SHA-256 of the whole table (little endian, NaN as 0x7FFF), so
whoever applies both has torch's table or knows that it has not.

dots, GPU: linear of four rows of several K, alone (T = 1) and together (T = 4), and both again without reduced precision inside the GEMM. Numbers come from SplitMix64:
element i of `values(seed)` is output i as 24 bits in [-1, 1); w has seed K, row r has seed K + 1 + r, and row 3 takes its signs from w, so nothing cancels.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
KS = [1, 32, 100, 1000, 1024, 2048, 4096, 5000, 16384, 65536, 131072]
ROWS = 4
NUM_PATTERNS = 1 << 16


def values(seed: int, num: int) -> np.ndarray:
    """SplitMix64 by counter, the upper 24 bits as a number in [-1, 1)."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, num + 1, dtype=np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return ((z >> np.uint64(40)).astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(1 / (1 << 23))


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The patterns of a tensor; every NaN is one pattern."""
    size = tensor.element_size()
    patterns = tensor.detach().cpu().contiguous().view({2: torch.int16, 4: torch.int32}[size]).numpy().ravel()
    patterns = patterns.view({2: np.uint16, 4: np.uint32}[size]).copy()
    patterns[torch.isnan(tensor.detach().cpu()).numpy().ravel()] = {2: 0x7FFF, 4: 0x7FFFFFFF}[size]
    return patterns


def rounded(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """To f32, then to the type, nearest even both times."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.astype(np.float32)).to(dtype)


def f64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().to(torch.float64).numpy().ravel()


def table(name: str, got: torch.Tensor, formula: np.ndarray, dtype: torch.dtype) -> dict:
    got_bits, formula_bits = bits(got), bits(rounded(formula, dtype))
    where = np.nonzero(got_bits != formula_bits)[0]
    print(f"  {name}: {len(where)} of {len(got_bits)} differ from the formula", flush=True)
    digest = hashlib.sha256(got_bits.astype("<u2").tobytes()).hexdigest()
    return {"sha256": digest, "exceptions": [[int(i), int(got_bits[i])] for i in where]}


def chain(dtype: torch.dtype, device: str) -> dict:
    patterns = torch.from_numpy(np.arange(NUM_PATTERNS, dtype=np.uint32).astype(np.uint16).view(np.int16)).view(dtype)
    x = patterns.reshape(-1, 1).to(device)
    w = torch.ones(1, 1, dtype=dtype, device=device)
    s = rounded(values(5, NUM_PATTERNS) * np.float32(3), dtype).reshape(-1, 1).to(device)
    out = rounded(values(6, NUM_PATTERNS) * np.float32(3), dtype).reshape(-1, 1).to(device)
    linear = F.linear(x, w)
    gate = F.sigmoid(linear)
    product = gate * s
    total = out + product
    # One token at a time, as decode runs it: another GEMM, and other element-wise kernels (no vector loads).
    num_other = 0
    for i in range(0, NUM_PATTERNS, 61):
        one = F.linear(x[i : i + 1], w)
        g = F.sigmoid(one)
        for got, want in [(one, linear[i]), (g, gate[i]), (g * s[i], product[i]), (out[i] + g * s[i], total[i])]:
            num_other += int((bits(got) != bits(want)).any())
    print(f"  one token at a time, every 61st: {num_other} differ", flush=True)
    with np.errstate(all="ignore"):
        return {
            "linear": table("linear", linear, f64(x), dtype),
            "sigmoid": table("sigmoid", gate, 1 / (1 + np.exp(-f64(linear))), dtype),
            "product": table("product", product, f64(gate) * f64(s), dtype),
            "sum": table("sum", total, f64(out) + f64(product), dtype),
        }


def ulp(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    info = torch.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), info.tiny)))
    return 2.0**exponent * info.eps


def dots(name: str, dtype: torch.dtype) -> list:
    matmul, found = torch.backends.cuda.matmul, []
    for k in KS:
        w = rounded(values(k, k), dtype)
        rows = [values(k + 1 + r, k) for r in range(ROWS)]
        rows[3] = np.copysign(rows[3], f64(w).astype(np.float32))
        x = rounded(np.stack(rows), dtype)
        exact = (x.to(torch.float64) * w.to(torch.float64)).sum(1).numpy()
        magnitude = (x.to(torch.float64) * w.to(torch.float64)).abs().sum(1).numpy()
        x, w = x.cuda(), w.reshape(1, -1).cuda()
        record = {"dtype": name, "k": k}
        for suffix, reduced in [("", True), ("_full", False)]:
            matmul.allow_bf16_reduced_precision_reduction = reduced
            matmul.allow_fp16_reduced_precision_reduction = reduced
            alone = torch.cat([F.linear(x[r : r + 1], w) for r in range(ROWS)])
            together = F.linear(x, w)
            for form, got in [("alone", alone), ("together", together)]:
                record[form + suffix] = [int(b) for b in bits(got)]
                bound = np.maximum(ulp(exact, dtype), 2.0**-20 * magnitude)
                worst = np.max(np.abs(f64(got) - exact) / bound)
                print(f"  {name} K {k} {form + suffix}: distance to exact / bound {worst:.3f}", flush=True)
        found.append(record)
    return found


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("torch.json")
    record = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": torch.cuda.get_device_name(), "chain": {}, "dots": []}
    record["cpu"] = torch.backends.cpu.get_cpu_capability()
    for name, device in [("bf16", "cuda"), ("f16", "cuda"), ("bf16", "cpu"), ("f16", "cpu")]:
        print(name, device)
        record["chain"][f"{device} {name}"] = chain(DTYPES[name], device)
    for name, dtype in DTYPES.items():
        record["dots"] += dots(name, dtype)
    # One line for each table and each K.
    lines = [", ".join(f'"{key}": {json.dumps(record[key])}' for key in ["torch", "cuda", "device", "cpu"])]
    tables = [f'"{name}": {{\n' + ",\n".join(f'"{step}": {json.dumps(t)}' for step, t in steps.items()) + "}" for name, steps in record["chain"].items()]
    lines.append('"chain": {\n' + ",\n".join(tables) + "}")
    lines.append('"dots": [\n' + ",\n".join(json.dumps(dot) for dot in record["dots"]) + "]")
    path.write_text("{" + ",\n".join(lines) + "}\n")
    json.loads(path.read_text())
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
