"""Train your own equinox model through TPUTrainer: checkpoints, metrics and resume included.

python examples/train_equinox.py [--steps 200] [--out runs/equinox]
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp

import tpukit
from tpukit.job import TrainingSettings
from tpukit.training import TPUTrainer

VOCABULARY, WIDTH, PAST = 257, 24, 8


class NextByte(eqx.Module):
    """An MLP that sees the last eight bytes."""

    embed: eqx.nn.Embedding
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(PAST * WIDTH, VOCABULARY, width_size=256, depth=1, key=second)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits (S, 257) for the tokens (S,) of one example."""
        x = jnp.pad(jax.vmap(self.embed)(tokens), ((PAST - 1, 0), (0, 0)))
        seen = jnp.concatenate([x[shift : shift + len(tokens)] for shift in range(PAST)], axis=1)
        return jax.vmap(self.mlp)(seen)


def main() -> None:
    """Train, then go on where it stopped."""
    tpukit.configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/equinox"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    text = options.out / "text.txt"
    text.write_text("\n".join(topics[name] for name in sorted(topics)))

    def train(steps: int):
        trainer = TPUTrainer(
            model=NextByte(jax.random.key(0)),
            use_bf16=False,
            run_dir=options.out / "run",
            settings=TrainingSettings(
                tokenizer="bytes", learning_rate=3e-3, schedule="constant", log_every=10
            ),
        )
        return trainer.train(text, steps, batch_size=16, sequence_length=64)

    half = train(options.steps // 2)
    whole = train(options.steps)
    print(f"first half   steps 1 to {half.steps}, loss {half.losses[-1]:.3f}")
    print(f"second half  resumed from {whole.resumed_from}, loss {whole.losses[-1]:.3f}")


if __name__ == "__main__":
    main()
