"""What products in eight bits do to the loss of a small model, against bfloat16 ones.

    python benchmarks/eight_bit_training.py [--steps N] [--seed N]

A two-layer transformer reads the bytes of this package's own source, the same windows in the same
order with each format; the loss is the mean of the last 20 steps.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
from claims import Claim, report

from tpukit import Workload, get_preset

SOURCE = Path(__file__).parents[1] / "src" / "tpukit"
BATCH, LENGTH, LAST = 16, 128, 20
WORST = 1.0  # % of the loss


def windows(steps: int, seed: int) -> np.ndarray:
    """Bytes to read, (steps, batch, length + 1)."""
    text = b"".join(path.read_bytes() for path in sorted(SOURCE.glob("*/*.py")))
    every = np.frombuffer(text, np.uint8)
    starts = np.random.default_rng(seed).integers(0, len(every) - LENGTH - 1, size=(steps, BATCH))
    return every[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int32)


def last_loss(matmul: str, batches: np.ndarray, seed: int) -> float:
    """Train from the same start and return the loss at the end."""
    config = get_preset("tiny", n_layers=2, matmul=matmul)
    work = Workload(config, batch_size=BATCH, sequence_length=LENGTH)
    state, step = jax.jit(work.init)(jax.random.key(seed)), jax.jit(work.train_step)
    losses: list[float] = []
    for batch in batches:
        state, metrics = step(state, {"inputs": batch[:, :-1], "targets": batch[:, 1:]})
        losses.append(float(metrics["loss"]))
    return float(np.mean(losses[-LAST:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    batches = windows(options.steps, options.seed)
    wide = last_loss("dtype", batches, options.seed)
    report(Claim("loss, bfloat16", wide, ""))
    for matmul in ("float8", "int8"):
        loss = last_loss(matmul, batches, options.seed)
        report(
            Claim(f"loss, {matmul}", loss, ""),
            Claim(f"{matmul} over bfloat16", 100 * (loss / wide - 1), "%", at_most=WORST),
        )


if __name__ == "__main__":
    main()
