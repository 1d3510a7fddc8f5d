"""Training and decoding on one H200 beside torch, plain jax and transformers.

python benchmarks/h200.py train
python benchmarks/h200.py torch
python benchmarks/h200.py generate
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness import (
    GPU,
    MEASURED,
    Result,
    Subcommand,
    is_here,
    read_command_line,
    report,
    run_command,
)

PROGRAMS = Path(__file__).parent / "h200_programs"
sys.path.insert(0, str(PROGRAMS))

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "train",
        "a training step beside plain jax and torch",
        options={
            "--models": {"default": "350m,1b,3b,moe-8x1b"},
            "--steps": {"type": int, "default": 30},
            "--programs": {"default": "torch,tpukit,bare_step,plain_jax"},
        },
        needs=(GPU,),
    ),
    Subcommand(
        "torch",
        "a torch module's training step beside torch.compile",
        options={
            "--models": {"default": "350m"},
            "--steps": {"type": int, "default": 30},
        },
        needs=(GPU, "torch"),
    ),
    Subcommand(
        "generate",
        "decoding beside transformers",
        options={
            "--model": "1b",
            "--rows": {"default": "1,64"},
            "--prompt": {"type": int, "default": 128},
            "--new": {"type": int, "default": 384},
            "--variants": {"default": "apart,graphs,no-triton"},
            "--programs": {"default": "transformers,tpukit"},
            "--repeats": {"type": int, "default": 3},
            "--cpu": {"action": "store_true", "help": "run without a GPU, to try the benchmark"},
        },
    ),
)

from shapes import HEAD, SHAPES, VOCABULARY, Shape, write_tokens

WARM = 10


def run(
    program: str, model: str, tokens: Path, *, warm: int = WARM, timeout_s: float = 280
) -> dict | None:
    return report_of(program, [model, str(tokens), str(warm)], timeout_s=timeout_s)


def report_of(
    program: str, arguments: list[str], *, timeout_s: float, environment: dict | None = None
) -> dict | None:
    """What a program of h200_programs/ reports from its own process; None if it failed."""
    command = [sys.executable, str(PROGRAMS / f"{program}_program.py"), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment
        )
    except subprocess.TimeoutExpired:
        print(f"  {program}: not done after {timeout_s:.0f} s")
        return None
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            return json.loads(line.removeprefix("REPORT "))
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    print(f"  {program}: failed ({last[:300]})")
    return None


def compare(model: str, steps: int, programs: Sequence[str]) -> list[Result]:
    shape = SHAPES[model]
    programs = ["tpukit"] if shape.experts else programs
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        if "tpukit" in programs:
            # Its products are timed before anything is measured: that leaves a warm chip behind.
            write_tokens(tokens, shape, 2)
            run("tpukit", model, tokens, warm=1)
        write_tokens(tokens, shape, steps)
        for program in programs:
            measured = run(program, model, tokens)
            if measured is None:
                continue
            found[program] = measured
            print(
                f"  {program:<10} {measured['step_s'] * 1e3:7.1f} ms  "
                f"{shape.batch * 2048 / measured['step_s']:9.0f} tokens/s  "
                f"{shape.flops / measured['step_s'] / 1e12:6.1f} TFLOP/s  "
                f"{measured['peak_bytes'] / 1e9:6.1f} GB  loss {measured['losses'][0]:.3f} -> "
                f"{measured['losses'][-1]:.3f}",
                flush=True,
            )
    ours, theirs, plain = (found.get(name) for name in ("tpukit", "torch", "plain_jax"))
    claims = []
    bare = found.get("bare_step")
    if ours and bare:
        ratio = ours["step_s"] / bare["step_s"]
        claims.append(Result(f"{model}: TPUTrainer over its bare step", ratio, "x", at_most=1.01))
    if ours and theirs:
        pairs = zip(ours["losses"], theirs["losses"], strict=True)
        apart = max(abs(mine / other - 1) for mine, other in pairs)
        claims += [
            Result(
                f"training of {model} against torch.compile",
                theirs["step_s"] / ours["step_s"],
                "×",
                at_least=1.05,
                key=f"train_{model}_torch",
                form=".3f",
                **MEASURED,
            ),
            Result(
                f"{model}: peak memory against torch",
                ours["peak_bytes"] / theirs["peak_bytes"],
                "x",
                at_most=1.0,
            ),
            Result(
                f"{model}: largest difference of a step's losses", 100 * apart, "%", at_most=1.0
            ),
        ]
    if ours and plain:
        claims.append(
            Result(
                f"training of {model} against plain jax",
                plain["step_s"] / ours["step_s"],
                "×",
                at_least=1.15,
                key=f"train_{model}_jax",
                form=".2f",
                **MEASURED,
            )
        )
    return claims


def run_train(options):
    """Training on one NVIDIA GPU: `TPUTrainer` against torch.compile and plain jax, in one run.

    Every program gets the same initial weights, tokens, batch and precision (float32 masters and
    moments, bfloat16 products, AdamW) and runs in a process of its own, one after another, torch
    first: a chip that is at its power limit gets slower as it gets warmer. Losses are compared
    step by step. Our step also runs in a bare loop, to see what the trainer adds. The mixture of
    experts has no contender. TFLOP/s count causal attention once.
    """
    claims = []
    for model in options.models.split(","):
        print(f"{model}:", flush=True)
        claims += compare(model, options.steps, options.programs.split(","))
    report(*claims)


def torch_compare(model: str, steps: int) -> list[Result]:
    shape = SHAPES[model]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npy"
        write_tokens(tokens, shape, steps)
        for program in ("torch", "torch_on_jax"):
            measured = run(program, model, tokens)
            if measured is None:
                return []
            found[program] = measured
            print(
                f"  {program:<13} {measured['step_s'] * 1e3:7.1f} ms  "
                f"{shape.flops / measured['step_s'] / 1e12:6.1f} TFLOP/s  "
                f"{measured['peak_bytes'] / 1e9:6.1f} GB  loss {measured['losses'][0]:.3f} -> "
                f"{measured['losses'][-1]:.3f}",
                flush=True,
            )
    theirs, ours = found["torch"], found["torch_on_jax"]
    apart = max(abs(a / b - 1) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    speed = theirs["step_s"] / ours["step_s"]
    return [
        Result(
            f"a torch module of {model}, our fused step against torch.compile",
            speed,
            "×",
            at_least=0.95,
            key=f"torch_{model}",
            form=".3f",
            **MEASURED,
        ),
        Result(f"{model}: largest difference of a step's losses", 100 * apart, "%", at_most=1.0),
    ]


def run_torch(options):
    """A torch module on one NVIDIA GPU: our fused step against torch.compile, in one run.

    Both programs run the same module from the same weights on the same tokens, in processes of
    their own, torch first: float32 masters and moments, bfloat16 products, AdamW. torch's goes
    through torch.compile, SDPA and a fused AdamW; ours through `TPUBackend.train_step`, with our
    attention and cross-entropy. Losses are compared step by step.
    """
    claims = []
    for model in options.models.split(","):
        print(f"{model}:", flush=True)
        claims += torch_compare(model, options.steps)
    report(*claims)


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


def generate_run(program: str, request: dict, *, flags: str = "") -> dict | None:
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


def generate_compare(asked: argparse.Namespace, rows: int, folder: str) -> list[Result]:
    shape = SHAPES[asked.model]
    roof = roof_s(shape, rows, asked.prompt, asked.new)
    request = {
        "model": asked.model, "rows": rows, "prompt": asked.prompt, "new": asked.new,
        "repeats": asked.repeats, "folder": folder, "cpu": asked.cpu,
    }  # fmt: skip
    programs = asked.programs.split(",")
    theirs = generate_run("transformers", request) if "transformers" in programs else None
    if theirs is not None:
        for way, problem in theirs["problems"].items():
            print(f"  transformers {way}: {problem}")
        for way, step in theirs["ways"].items():
            show(f"transformers {way}"[:18], {"step_s": step}, rows, roof)
    best: dict | None = None
    for name in asked.variants.split(",") if "tpukit" in programs else ():
        loop, flags = VARIANTS[name]
        found = generate_run("tpukit", {**request, "loop": loop}, flags="" if asked.cpu else flags)
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
        Result(f"{what}: decode", rows / best["step_s"], "tokens/s"),
        Result(f"{what}: share of the HBM roof", share, "%"),
    ]
    if theirs is not None and theirs["step_s"] is not None:
        ratio = theirs["step_s"] / best["step_s"]
        claims.append(
            Result(
                f"decode of {what}, against transformers compiled with a static cache",
                ratio,
                "×",
                at_least=1.2,
                key=f"generate_{asked.model}_{rows}",
                form=".2f",
                **MEASURED,
            )
        )
        print(f"  first tokens equal until rows part: {100 * agreement(best, theirs):.0f} %")
    return claims


def run_generate(options):
    """Compare decoding with transformers compiled with a static cache, in one run.

    Random weights in bfloat16, the same for both, greedy. A step adds a token to every row. Ours
    is one program that loops on the device; theirs is the faster of `generate` and a bare loop
    around the forward pass, compiled with mode="reduce-overhead". `transformers` is whatever
    PYTHONPATH finds. Variants of ours differ in how layers run and in XLA's flags, each in a
    process of its own; the fastest counts. The roof is reading all weights but the embedding
    table, and the keys and values that are there on average, once a step. `--cpu` runs it without
    a GPU, to see that it runs.
    """
    if not options.cpu and not is_here(GPU):
        sys.exit("decoding is measured on an NVIDIA GPU; try it without one by --cpu --model tiny")
    claims: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        if "transformers" in options.programs:
            generate_run("tpukit", {"model": options.model, "export": folder, "loop": None})
        for rows in map(int, options.rows.split(",")):
            print(f"{options.model} in bfloat16, {rows} rows:", flush=True)
            claims += generate_compare(options, rows, folder)
    report(*claims)


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        train=run_train,
        torch=run_torch,
        generate=run_generate,
    )
