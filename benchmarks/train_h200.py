"""Training on one NVIDIA GPU: `TPUTrainer` against torch.compile and plain jax, in one run.

    python benchmarks/train_h200.py [--models 350m,1b,3b,moe-8x1b] [--steps 30]
        [--programs torch,tpukit,bare_step,plain_jax]

Every program gets the same initial weights, tokens, batch and precision (float32 masters and
moments, bfloat16 products, AdamW) and runs in a process of its own, one after another, torch first:
a chip that is at its power limit gets slower as it gets warmer. Losses are compared step by step.
Our step also runs in a bare loop, to see what the trainer adds. The mixture of experts has no
contender. TFLOP/s count causal attention once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from claims import Claim, report

PROGRAMS = Path(__file__).parent / "h200"
sys.path.insert(0, str(PROGRAMS))
from shapes import SHAPES, write_tokens  # noqa: E402  beside the programs that share it

WARM = 10


def run(
    program: str, model: str, tokens: Path, *, warm: int = WARM, timeout_s: float = 280
) -> dict | None:
    return report_of(program, [model, str(tokens), str(warm)], timeout_s=timeout_s)


def report_of(
    program: str, arguments: list[str], *, timeout_s: float, environment: dict | None = None
) -> dict | None:
    """What a program of h200/ reports, run in a process of its own; None where it failed."""
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


def has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    except OSError:
        return False


def compare(model: str, steps: int, programs: Sequence[str]) -> list[Claim]:
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
        claims.append(Claim(f"{model}: TPUTrainer over its bare step", ratio, "x", at_most=1.01))
    if ours and theirs:
        pairs = zip(ours["losses"], theirs["losses"], strict=True)
        apart = max(abs(mine / other - 1) for mine, other in pairs)
        claims += [
            Claim(
                f"{model}: speed against torch.compile",
                theirs["step_s"] / ours["step_s"],
                "x",
                at_least=1.05,
            ),
            Claim(
                f"{model}: peak memory against torch",
                ours["peak_bytes"] / theirs["peak_bytes"],
                "x",
                at_most=1.0,
            ),
            Claim(f"{model}: largest difference of a step's losses", 100 * apart, "%", at_most=1.0),
        ]
    if ours and plain:
        claims.append(
            Claim(
                f"{model}: speed against plain jax",
                plain["step_s"] / ours["step_s"],
                "x",
                at_least=1.15,
            )
        )
    return claims


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--models", default="350m,1b,3b,moe-8x1b")
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("--programs", default="torch,tpukit,bare_step,plain_jax")
    asked = options.parse_args()
    if not has_gpu():
        print("no NVIDIA GPU here; run it on one (docs/training.md has the last figures)")
        return
    claims = []
    for model in asked.models.split(","):
        print(f"{model}:", flush=True)
        claims += compare(model, asked.steps, asked.programs.split(","))
    report(*claims)


if __name__ == "__main__":
    main()
