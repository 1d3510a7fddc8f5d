"""Decode on one NVIDIA GPU: tpukit beside transformers compiled with a static cache, in one run.

    python benchmarks/generate_h200.py [--model 1b] [--rows 1,64] [--prompt 128] [--new 384]
        [--variants apart,graphs,loop,no-graphs,no-triton] [--programs tpukit,transformers]
        [--repeats 3] [--cpu]

Random weights in bfloat16, the same for both, greedy. A step adds a token to every row. Ours is one
program that loops on the device; theirs is the faster of `generate` and a bare loop around the
forward pass, compiled with mode="reduce-overhead". `transformers` is whatever PYTHONPATH finds.
Variants of ours differ in how layers run and in XLA's flags, each in a process of its own; the
fastest counts. The roof is reading all weights but the embedding table, and the keys and values
that are there on average, once a step. `--cpu` runs it without a GPU, to see that it runs.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from claims import Claim, report
from train_h200 import has_gpu, report_of

PROGRAMS = Path(__file__).parent / "h200"
sys.path.insert(0, str(PROGRAMS))
from shapes import HEAD, SHAPES, VOCABULARY, Shape  # noqa: E402  beside the programs

HBM_BYTES_PER_S = 4.8e12  # NVIDIA's H200 datasheet
TIMEOUT_S = 280
_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,WHILE"
# (whether layers are a loop, XLA's flags)
VARIANTS = {
    "apart": (False, ""),
    "graphs": (False, f"--xla_gpu_enable_command_buffer={_GRAPHS}"),
    "no-graphs": (False, "--xla_gpu_enable_command_buffer="),
    "no-triton": (False, "--xla_gpu_enable_triton_gemm=false"),
    "graphs-no-triton": (
        False,
        f"--xla_gpu_enable_triton_gemm=false --xla_gpu_enable_command_buffer={_GRAPHS}",
    ),
    "loop": (True, ""),
}


def roof_s(shape: Shape, rows: int, prompt: int, new: int) -> float:
    """Seconds in which a step's bytes are read at the datasheet's rate."""
    attention = shape.width * HEAD * (2 * shape.heads + 2 * shape.kv_heads)
    mlp = 3 * shape.width * shape.hidden
    weights = shape.layers * (attention + mlp) + shape.width * VOCABULARY
    held = prompt + new / 2
    cache = 2 * shape.layers * rows * held * shape.kv_heads * HEAD
    return 2 * (weights + cache) / HBM_BYTES_PER_S


def run(program: str, request: dict, *, flags: str = "") -> dict | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps(request))
        environment = {**os.environ}
        if request.get("cpu"):
            environment["TORCHDYNAMO_DISABLE"] = "1"  # it would compile C++
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        return report_of(
            f"generate_{program}", [str(file)], timeout_s=TIMEOUT_S, environment=environment
        )


def show(name: str, found: dict, rows: int, roof: float, note: str = "") -> None:
    step = found["step_s"]
    print(
        f"  {name:<18} {step * 1e3:8.3f} ms  {rows / step:10.0f} tokens/s  "
        f"{100 * roof / step:5.1f} % of the HBM roof  {note}",
        flush=True,
    )


def agreement(ours: dict, theirs: dict) -> float:
    """The share of first tokens that are the same until a row first differs."""
    same = total = 0
    for mine, other in zip(ours["first"], theirs["first"], strict=False):
        equal = [a == b for a, b in zip(mine, other, strict=False)]
        same += equal.index(False) if False in equal else len(equal)
        total += len(equal)
    return same / total if total else 0.0


def compare(asked: argparse.Namespace, rows: int, folder: str) -> list[Claim]:
    shape = SHAPES[asked.model]
    roof = roof_s(shape, rows, asked.prompt, asked.new)
    request = {
        "model": asked.model, "rows": rows, "prompt": asked.prompt, "new": asked.new,
        "repeats": asked.repeats, "folder": folder, "cpu": asked.cpu,
    }  # fmt: skip
    programs = asked.programs.split(",")
    theirs = run("transformers", request) if "transformers" in programs else None
    if theirs is not None:
        for way, problem in theirs["problems"].items():
            print(f"  transformers {way}: {problem}")
        for way, step in theirs["ways"].items():
            show(f"transformers {way}"[:18], {"step_s": step}, rows, roof)
    best: dict | None = None
    for name in asked.variants.split(",") if "tpukit" in programs else ():
        loop, flags = VARIANTS[name]
        found = run("tpukit", {**request, "loop": loop}, flags="" if asked.cpu else flags)
        if found is None:
            continue
        show(f"tpukit {name}"[:18], found, rows, roof, f"prompts {found['prompt_s'] * 1e3:.1f} ms")
        if best is None or found["step_s"] < best["step_s"]:
            best = found
    if best is None:
        return []
    what = f"{asked.model}, {rows} rows"
    share = 100 * roof / best["step_s"]
    claims = [
        Claim(f"{what}: decode", rows / best["step_s"], "tokens/s"),
        Claim(f"{what}: share of the HBM roof", share, "%"),
    ]
    if theirs is not None and theirs["step_s"] is not None:
        ratio = theirs["step_s"] / best["step_s"]
        claims.append(Claim(f"{what}: against transformers", ratio, "x", at_least=1.2))
        print(f"  first tokens equal until rows part: {100 * agreement(best, theirs):.0f} %")
    return claims


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="1b", choices=SHAPES)
    options.add_argument("--rows", default="1,64")
    options.add_argument("--prompt", type=int, default=128)
    options.add_argument("--new", type=int, default=384)
    options.add_argument("--variants", default="apart,graphs,no-triton")
    options.add_argument("--programs", default="transformers,tpukit")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--cpu", action="store_true")
    asked = options.parse_args()
    if not asked.cpu and not has_gpu():
        print("no NVIDIA GPU here; run it on one, or with --cpu --model tiny")
        return
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as folder:
        if "transformers" in asked.programs:
            run("tpukit", {"model": asked.model, "export": folder, "loop": None})
        for rows in map(int, asked.rows.split(",")):
            print(f"{asked.model} in bfloat16, {rows} rows:", flush=True)
            claims += compare(asked, rows, folder)
    report(*claims)


if __name__ == "__main__":
    main()
