"""What a KV cache in few bits leaves of the greedy text of small language models trained here.

    python benchmarks/kv_cache_bits.py [--models gated,plain] [--seeds 1] [--steps N] [--out F]

Models are those of `vq_lm.py` with heads of 64 channels, trained on the source of Python's standard
library with rows of 1,024 bytes; prompts are 896 bytes of files nobody trained on, continued by 128
bytes, each the likeliest. All is compared with a bfloat16 cache of the same model. `free`: each
cache goes on with its own text, and bytes are compared place by place, so that all after the first
other one count as lost where they differ. `forced`: both read the bfloat16 cache's text, and
choices are compared. Bits include scales and the tokens that stay in bfloat16, at 1,024 tokens.

The first row, bfloat16 beside float32, is what the measure finds of no more than that.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from claims import Claim, report
from vq_lm import COMMON, MODELS, text

from tpukit import Workload, get_preset
from tpukit.hardware.cache_formats import CACHE_FORMATS
from tpukit.quantization import fit_cache
from tpukit.quantization.cache.retention import CacheJudge

BAR = 0.95
FOUR_BITS = ("int4", "pq4")
# Heads as wide as those of models that people serve: scales are shared within one.
HEADS = {
    "gated": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 64},
    "plain": {"n_heads": 3, "n_kv_heads": 3, "head_dim": 64},
}


def train(name: str, data: np.ndarray, options: argparse.Namespace, seed: int) -> tuple[Any, Any]:
    """A model's configuration and its parameters."""
    length, rows, steps = options.length, options.batch, options.steps
    sizes = COMMON | {"max_seq_len": length} | MODELS[name] | HEADS[name]
    config = get_preset("tiny", **sizes)
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 1 + steps // 20, 1 + steps)
    work = Workload(config, batch_size=rows, sequence_length=length, optimizer=optax.adamw(rate))
    state, step = jax.jit(work.init)(jax.random.key(seed)), jax.jit(work.train_step)
    rng, metrics = np.random.default_rng(seed), {"loss": np.nan}
    for _ in range(steps):
        starts = rng.integers(0, len(data) - length - 1, rows)
        found = data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
        state, metrics = step(state, {"inputs": found[:, :-1], "targets": found[:, 1:]})
    print(f"{name} seed {seed}: trained to loss {float(metrics['loss']):.3f}", flush=True)
    return config, state.params


def measure(name: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every format."""
    data = text()
    config, params = train(name, data["train"], options, seed)
    rng = np.random.default_rng(100 + seed)
    length, new = options.length, options.length // 8

    def windows(part: str, count: int) -> np.ndarray:
        starts = rng.integers(0, len(data[part]) - length, count)
        return data[part][starts[:, None] + np.arange(length - new)].astype(np.int32)

    prompts, fitted = windows("judge", options.rows), windows("calibrate", 16)
    bare = {n: replace(CACHE_FORMATS[n], first=0, recent=0) for n in ("int4",)}
    asked: list[tuple[str, Any]] = [
        (n, CACHE_FORMATS[n]) for n in ("bf16", "int8", "int4", "pq4", "pq2")
    ]
    asked += [(f"{n}, no token in bfloat16", one) for n, one in bare.items()]
    how = {"new_tokens": new, "batch_size": options.rows}
    beside_bf16 = CacheJudge(config, params, prompts, **how)
    rows: list[dict[str, Any]] = []
    for label, format in asked:
        began = time.perf_counter()
        judge = beside_bf16
        if label == "bf16":
            judge = CacheJudge(config, params, prompts, reference=None, **how)
        found = judge(fit_cache(config, params, fitted, kv=format, seed=seed), target=BAR)
        rows.append({"model": name, "seed": seed, "label": label, **found.to_dict()})
        print(
            f"  {label:28s} {found.bits:5.2f} bits  free {found.free.text('.3f')}  "
            f"forced {found.forced.text('.4f')}  KL {found.kl.value:.2g}  "
            f"{'yes' if found.reached else 'no'}  {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gated,plain")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.steps, options.length, options.batch, options.rows = 20, 128, 4, 8
    rows = [
        row
        for name in options.models.split(",")
        for seed in range(options.seeds)
        for row in measure(name, seed, options)
    ]
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    claims: list[Claim] = []
    for name in options.models.split(","):
        four = [r for r in rows if r["model"] == name and r["label"] in FOUR_BITS]
        best = max(four, key=lambda row: row["free"]["value"])
        claims.append(
            Claim(
                f"{name}: greedy tokens kept at 4 bits ({best['label']})",
                best["free"]["value"],
                "",
                at_least=BAR,
            )
        )
    report(*claims)


if __name__ == "__main__":
    main()
