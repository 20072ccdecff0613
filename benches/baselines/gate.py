"""Torch and Triton on the shapes of `moe bench gate`: python3 gate.py [--json FILE] [--processes N] [--quick]

Each figure is the time of a CUDA graph of NODES equal calls over NODES: median of REPLAYS replays, then the median, least and greatest of the processes. Weights
rotate over 40 buffers and inputs over 8, as in the Rust benchmark. Arms are checked against f64 and timed in turns, in reversed order in every second process.
A Triton kernel is tuned over a few block sizes and its best one counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

NODES, REPLAYS, ROUNDS = 200, 25, 5
NUM_W, NUM_X = 40, 8
WARMERS = 12  # processes that compile at the same time, before anything is measured
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@triton.jit
def dot_kernel(x, w, out, K, SIGMOID: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        i = start + tl.arange(0, BLOCK)
        acc += tl.load(x + row * K + i, i < K, 0.0).to(tl.float32) * tl.load(w + i, i < K, 0.0).to(tl.float32)
    dot = tl.sum(acc)
    tl.store(out + row, tl.sigmoid(dot) if SIGMOID else dot)


@triton.jit
def mul_kernel(x, w, s, out, K, N, ADD: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        i = start + tl.arange(0, BLOCK)
        acc += tl.load(x + row * K + i, i < K, 0.0).to(tl.float32) * tl.load(w + i, i < K, 0.0).to(tl.float32)
    gate = tl.sigmoid(tl.sum(acc))
    for start in range(0, N, COLUMNS):
        n = start + tl.arange(0, COLUMNS)
        value = gate * tl.load(s + row * N + n, n < N).to(tl.float32)
        if ADD:
            value += tl.load(out + row * N + n, n < N).to(tl.float32)
        tl.store(out + row * N + n, value, n < N)


def cases(quick: bool) -> list:
    """form, dtype, T, K, N"""
    ks = [2048] if quick else [32, 1024, 2048, 4096, 16384, 65536, 131072, 262144]
    ts = [64] if quick else [2, 8, 64, 512, 4096]
    found = []
    for dtype in ["bf16"] if quick else ["bf16", "f16"]:
        found += [(form, dtype, 1, k, 0) for k in ks for form in ["dot", "gate"]]
        found += [("gate", dtype, t, 2048, 0) for t in ts]
    found += [(form, "bf16", t, 2048, 2048) for form in ["gate_mul", "gate_mul_add"] for t in ([1, 64] if quick else [1, 8, 64, 512, 4096])]
    return found


class Case:
    def __init__(self, form, dtype, t, k, n):
        self.form, self.t, self.k, self.n = form, t, k, n
        torch.manual_seed(k + t)
        make = lambda *shape: (torch.rand(*shape, device="cuda") * 2 - 1).to(DTYPES[dtype])
        self.x = [make(t, k) for _ in range(NUM_X)]
        self.w = [make(1, k) * (3 / k**0.5) for _ in range(NUM_W)]
        self.s = [make(t, max(n, 1)) for _ in range(NUM_X)]
        self.out = [make(t, max(n, 1)) for _ in range(NUM_X)]

    def arms(self) -> dict:
        x, w, s, out, k, n, t = self.x, self.w, self.s, self.out, self.k, self.n, self.t
        sigmoid = self.form != "dot"
        arms = {}
        if n == 0:
            activation = torch.sigmoid if sigmoid else (lambda y: y)
            arms["torch linear"] = lambda i: activation(F.linear(x[i % NUM_X], w[i % NUM_W]))
            arms["torch mul, sum"] = lambda i: activation((x[i % NUM_X] * w[i % NUM_W]).sum(-1, keepdim=True))
        elif self.form == "gate_mul":
            arms["torch linear, sigmoid, mul"] = lambda i: torch.sigmoid(F.linear(x[i % NUM_X], w[i % NUM_W])) * s[i % NUM_X]
        else:
            arms["torch linear, sigmoid, mul, add"] = lambda i: out[i % NUM_X].add_(torch.sigmoid(F.linear(x[i % NUM_X], w[i % NUM_W])) * s[i % NUM_X])
        for block, warps in self.triton_configs():
            if n == 0:
                run = lambda i, block=block, warps=warps: (dot_kernel[(t,)](x[i % NUM_X], w[i % NUM_W], out[i % NUM_X], k, sigmoid, block, num_warps=warps), out[i % NUM_X])[1]
            else:
                run = lambda i, block=block, warps=warps: (
                    mul_kernel[(t,)](x[i % NUM_X], w[i % NUM_W], s[i % NUM_X], out[i % NUM_X], k, n, self.form == "gate_mul_add", block, 2048, num_warps=warps),
                    out[i % NUM_X],
                )[1]
            arms[f"triton {block}/{warps}"] = run
        return arms

    def triton_configs(self) -> list:
        whole = triton.next_power_of_2(self.k)
        if whole <= 4096:
            return [(whole, warps) for warps in ([1] if whole < 256 else [4, 8, 16])]
        return [(4096, 16), (8192, 16), (8192, 32)] if whole <= 16384 else [(8192, 32), (16384, 32)]

    def check(self, name: str, run) -> None:
        for i in [0, 43]:
            before = self.out[i % NUM_X].double() if self.form == "gate_mul_add" else None
            logit = (self.x[i % NUM_X].double() * self.w[i % NUM_W].double()).sum(-1, keepdim=True)
            want = logit if self.form == "dot" else torch.sigmoid(logit)
            if self.n:
                want = want * self.s[i % NUM_X].double()
            if before is not None:
                want = before + want
            got = run(i).double()
            # Two roundings of a number of size 4 at most in bf16.
            worst = (got - want).abs().max().item()
            assert worst <= 4 * 2**-8, f"{name} {self.form} T={self.t} K={self.k}: {worst} from f64"


class Replay:
    def __init__(self, run):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for i in range(4):
                run(i)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(NODES):
                run(i)
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS // ROUNDS + 1)]

    def time(self) -> list:
        for _ in range(2):
            self.graph.replay()
        self.events[0].record()
        for event in self.events[1:]:
            self.graph.replay()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e3 / NODES for a, b in zip(self.events, self.events[1:])]


def eager(run) -> float:
    """us of one call between two events, median."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for i in range(REPLAYS):
        torch.cuda.synchronize()
        start.record()
        run(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def process(index: int, quick: bool) -> None:
    for spec in cases(quick):
        case = Case(*spec)
        arms = case.arms()
        for name, run in arms.items():
            case.check(name, run)
        replays = {name: Replay(run) for name, run in arms.items()}
        times = {name: [] for name in arms}
        for round_idx in range(ROUNDS):
            names = list(arms) if (round_idx + index) % 2 == 0 else list(arms)[::-1]
            for name in names:
                times[name] += replays[name].time()
        if case.form != "gate_mul_add":  # that one has changed its own input many times
            for name, run in arms.items():
                case.check(name, run)
        line = {name: {"graph": statistics.median(t), "eager": eager(arms[name])} for name, t in times.items()}
        print(json.dumps({"case": spec, "arms": line}), flush=True)
        del replays, case, arms
        torch.cuda.empty_cache()


def warm(index: int, quick: bool) -> None:
    """Compiles the Triton kernels of every WARMERS-th case, into Triton's cache on disk."""
    for spec in cases(quick)[index::WARMERS]:
        for run in Case(*spec).arms().values():
            run(0)
    torch.cuda.synchronize()


def report(collected: dict, num_processes: int, path: str) -> None:
    rows = []
    for case, arms in collected.items():
        figures = {name: [statistics.median(v), min(v), max(v)] for name, runs in arms.items() for v in [[r["graph"] for r in runs]]}
        eagers = {name: statistics.median([r["eager"] for r in runs]) for name, runs in arms.items()}
        best = min((name for name in figures if name.startswith("triton")), key=lambda name: figures[name][0])
        for name in [name for name in figures if not name.startswith("triton")] + [best]:
            rows.append({"case": dict(zip(["form", "dtype", "t", "k", "n"], case)), "arm": name, "graph_us": figures[name], "eager_us": eagers[name]})
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}; {num_processes} processes; us per graph node: median (least to greatest of the processes); us eager between events")
    for row in rows:
        c, (median, least, greatest) = row["case"], row["graph_us"]
        print(f"{c['form']:13}{c['dtype']:5}T {c['t']:<5}K {c['k']:<7}N {c['n']:<5}{row['arm']:33}{median:8.3f} ({least:.3f} to {greatest:.3f}){row['eager_us']:9.2f}")
    if path:
        with open(path, "w") as file:
            json.dump({"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name(), "num_processes": num_processes, "rows": rows}, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one process and few sizes")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further process after this time")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process is not None:
        process(arguments.process, arguments.quick)
        return
    if arguments.warm is not None:
        warm(arguments.warm, arguments.quick)
        return
    collected, start = {}, time.time()
    options = ["--quick"] if arguments.quick else []
    warmers = [subprocess.Popen([sys.executable, __file__, "--warm", str(index)] + options) for index in range(WARMERS)]
    assert all([warmer.wait() == 0 for warmer in warmers]), "a kernel does not compile"
    print(f"compiled after {time.time() - start:.0f} s", flush=True)
    num_processes = 0
    for index in range(1 if arguments.quick else arguments.processes):
        if time.time() - start > arguments.seconds:
            break
        num_processes += 1
        command = [sys.executable, __file__, "--process", str(index)] + options
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        for line in map(json.loads, output.splitlines()):
            for name, figures in line["arms"].items():
                collected.setdefault(tuple(line["case"]), {}).setdefault(name, []).append(figures)
        print(f"process {index} done after {time.time() - start:.0f} s", flush=True)
    report(collected, num_processes, arguments.json)


if __name__ == "__main__":
    main()
