"""A torch module on one NVIDIA GPU: our fused step against torch.compile, in one run.

    python benchmarks/torch_h200.py [--models 350m] [--steps 30]

Both programs run the same module from the same weights on the same tokens, in processes of their
own, torch first: float32 masters and moments, bfloat16 products, AdamW. torch's goes through
torch.compile, SDPA and a fused AdamW; ours through `TPUBackend.train_step`, with our attention and
cross-entropy. Losses are compared step by step.
"""

import argparse
import tempfile
from pathlib import Path

from claims import Claim, report
from train_h200 import SHAPES, has_gpu, run, write_tokens


def compare(model: str, steps: int) -> list[Claim]:
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
        Claim(f"{model}: a torch module's step against torch.compile", speed, "x", at_least=0.95),
        Claim(f"{model}: largest difference of a step's losses", 100 * apart, "%", at_most=1.0),
    ]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--models", default="350m")
    options.add_argument("--steps", type=int, default=30)
    asked = options.parse_args()
    if not has_gpu():
        print("no NVIDIA GPU here; run it on one (docs/torch.md has the last figures)")
        return
    claims = []
    for model in asked.models.split(","):
        print(f"{model}:", flush=True)
        claims += compare(model, asked.steps)
    report(*claims)


if __name__ == "__main__":
    main()
