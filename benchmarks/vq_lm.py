"""What formats of few bits leave of small language models trained here, on text they never saw.

    python benchmarks/vq_lm.py [--models gated,plain] [--seeds 3] [--steps N] [--out rows.json]

The text is the source of Python's standard library, as bytes; whole files are held out. Every
matrix of the layers is quantized (embedding and unembedding stay), each method on the same XᵀX:
to nearest, GPTQ, vector codes, and a search over formats at the same bytes as the best uniform
one. Bits a weight include scales and codebooks. Kept is the full model's perplexity over the
quantized one's.

On a GPU with the defaults a seed of a model takes minutes. `--quick` is a smoke test.
"""

import argparse
import json
import sysconfig
import time
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from claims import Claim, report

from tpukit import Workload, get_preset
from tpukit.errors import TargetNotReached
from tpukit.models.stored.parameter import part_bytes
from tpukit.quantization import quantize_model
from tpukit.quantization.calibrated import Calibrated, Rounding
from tpukit.quantization.model import matrix_of, replaced
from tpukit.quantization.plan import make_plan
from tpukit.quantization.qwix_matrices import rounded_matrix
from tpukit.quantization.search import Choice, Ladder, build_ladder
from tpukit.quantization.subject import make_subject

LENGTH, BATCH = 256, 32
COMMON = {"vocab_size": 256, "max_seq_len": 512, "dtype": "float32", "param_dtype": "float32"}
MODELS: dict[str, dict[str, Any]] = {
    # Llama's block: gated, few key heads.
    "gated": {"d_model": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "d_ff": 768},
    # GPT-2's: two matrices a block, narrower and deeper.
    "plain": {
        "d_model": 192,
        "n_layers": 6,
        "n_heads": 6,
        "n_kv_heads": 6,
        "d_ff": 768,
        "gated_mlp": False,
        "activation": "gelu",
    },
}
GROUP = 64
INTEGERS = (2, 3, 4)
VECTORS = ("vq1.75", "vq2", "trellis2:256", "vq:2x64x4", "trellis3:256", "vq3.5", "vq4")
# Eight bits are qwix's, where it is installed.
WIDE = ("int4", "int8", "bf16") if find_spec("qwix") else ("int4", "bf16")
CANDIDATES = (*VECTORS, *WIDE)
BUDGETS = (2.1, 2.5, 3.25)
TARGETS = (0.90, 0.95, 0.98)
LESS_KL = 50.0  # %


def text() -> dict[str, np.ndarray]:
    """Bytes of the standard library, by what they are for; a file is in one part only."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[str, list[bytes]] = {"train": [], "calibrate": [], "judge": []}
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-s]*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        drawn = zlib.crc32(str(path.relative_to(root)).encode()) % 10
        parts["calibrate" if drawn == 8 else "judge" if drawn == 9 else "train"].append(
            path.read_bytes()
        )
    return {name: np.frombuffer(b"".join(all_), np.uint8) for name, all_ in parts.items()}


def batches(data: np.ndarray, count: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Windows of text, with what comes next."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(data) - LENGTH - 1, (count, BATCH))
    windows = data[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int32)
    return [{"inputs": one[:, :-1], "targets": one[:, 1:]} for one in windows]


def train(name: str, data: np.ndarray, steps: int, seed: int) -> tuple[Any, Any]:
    """A model's configuration and its parameters."""
    config = get_preset("tiny", **COMMON, **MODELS[name])
    work = Workload(
        config,
        batch_size=BATCH,
        sequence_length=LENGTH,
        optimizer=optax.adamw(
            optax.warmup_cosine_decay_schedule(0.0, 2e-3, 1 + steps // 20, 1 + steps)
        ),
    )
    state, step = jax.jit(work.init)(jax.random.key(seed)), jax.jit(work.train_step)
    for batch in batches(data, steps, seed):
        state, metrics = step(state, batch)
    print(f"{name} seed {seed}: trained to loss {float(metrics['loss']):.3f}", flush=True)
    return config, state.params


def uniform_rows(calibrated: Calibrated, vectors: tuple[str, ...]) -> dict[str, dict[str, Choice]]:
    """Every matrix in every uniform format, by the method's name."""
    plan = make_plan(calibrated.matrices, "int4")
    seen = calibrated.statistics(plan.quantized)
    rows: dict[str, dict[str, Choice]] = {}
    for name in plan.quantized:
        weight = matrix_of(calibrated.subject.params, calibrated.by_name[name])
        for bits in INTEGERS:
            for method in ("nearest", "gptq"):
                # GPTQ of inputs that have nothing to do with one another rounds to nearest.
                hessian = seen[name].hessian if method == "gptq" else jnp.eye(weight.shape[0])
                found, size = rounded_matrix(
                    weight, bits, group=GROUP, hessian=hessian, method="gptq"
                )
                label = f"{'RTN' if method == 'nearest' else 'GPTQ'} int{bits}"
                choice = Choice(label, found, round(size * weight.size / 8), 0.0)
                rows.setdefault(label, {})[name] = choice
        for format in vectors:
            part = calibrated.round(name, format, seen[name])
            choice = Choice(format, part, part_bytes(part), 0.0)
            rows.setdefault(format, {})[name] = choice
    return rows


def measure(ladder: Ladder, chosen: dict[str, Choice]) -> dict[str, float]:
    """Bits, perplexity kept, KL and agreement of one choice for every matrix."""
    calibrated = ladder.calibrated
    parts = {name: one.part for name, one in chosen.items()}
    params = replaced(calibrated.subject.params, calibrated.matrices, parts)
    found = calibrated.evaluator(params)
    assert found.kl is not None
    assert found.agreement is not None
    return {
        "bits": 8 * sum(one.nbytes for one in chosen.values()) / ladder.weights,
        "kept": found.retention.value,
        "kept_low": found.retention.low,
        "kl": found.kl.value,
        "kl_low": found.kl.low,
        "kl_high": found.kl.high,
        "same": found.agreement.value,
    }


def one_seed(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """All rows of one model."""
    data = text()
    config, params = train(name, data["train"], options.steps, seed)
    given = batches(data["calibrate"], options.batches, seed)
    judged = batches(data["judge"], options.batches, 1000 + seed)
    subject = make_subject(config, params, given[0])
    given, judged = ([subject.batch(one) for one in some] for some in (given, judged))
    calibrated = Calibrated.of(subject, given, judged, Rounding(seed=seed), lambda line: None)
    vectors = VECTORS if not options.quick else ("vq2",)
    candidates = CANDIDATES if not options.quick else ("vq2", *WIDE)
    started = time.perf_counter()
    uniform = uniform_rows(calibrated, vectors)
    ladder = build_ladder(calibrated, make_plan(calibrated.matrices, "int4"), candidates)
    rows = {label: measure(ladder, chosen) for label, chosen in uniform.items()}
    for label, row in rows.items():
        print(f"  {label:<12} {row['bits']:5.2f} bits: kept {row['kept']:.4f}, KL {row['kl']:.4f}")
    searched = {}
    for budget in BUDGETS:
        fair = {label: row for label, row in rows.items() if row["bits"] <= budget + 0.05}
        if not fair or 8 * ladder.nbytes(0) / ladder.weights > budget + 0.05:
            continue
        best = min(fair, key=lambda label: fair[label]["kl"])
        # The same bytes as the budget allows a uniform format, and no more.
        steps = ladder.within(max(budget, fair[best]["bits"]) * ladder.weights / 8)
        found = measure(ladder, ladder.choices(steps))
        less = 100 * (1 - found["kl"] / fair[best]["kl"])
        searched[str(budget)] = {**found, "best_uniform": best, "less_kl_percent": less}
    targets = {}
    for target in TARGETS:
        try:
            made = quantize_model(
                config,
                given,
                params=params,
                evaluation_data=judged,
                target_accuracy_retention=target,
                candidates=candidates,
                num_calibration_batches=options.batches,
                seed=seed,
            )
            reached = True
        except TargetNotReached as error:
            made, reached = error.best, False
        fresh = batches(data["judge"], options.batches, 2000 + seed)
        again = Calibrated.of(subject, given, [subject.batch(b) for b in fresh], Rounding(), print)
        targets[str(target)] = {
            "reached": reached,
            "bits": made.report.bits_per_weight,
            "kept_low": made.report.evaluation.retention.low,
            "kept_on_other_text": again.evaluator(made.model.dequantized()).retention.value,
            "generation": made.report.generation and made.report.generation.value,
        }
    seconds = time.perf_counter() - started
    return {"uniform": rows, "search": searched, "targets": targets, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gated,plain")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batches", type=int, default=8, help="To calibrate with, and to judge by")
    parser.add_argument("--quick", action="store_true", help="One vector format only")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    every: dict[str, list[dict[str, Any]]] = {}
    for name in options.models.split(","):
        every[name] = [one_seed(name, seed, options) for seed in range(options.seeds)]
        for label in every[name][0]["uniform"]:
            rows = [seed["uniform"][label] for seed in every[name]]
            kept = float(np.mean([row["kept"] for row in rows]))
            report(Claim(f"{name}: {label}, {rows[0]['bits']:.2f} bits, kept", kept, ""))
        kept = [[s["uniform"][one]["kept"] for one in ("vq2", "GPTQ int2")] for s in every[name]]
        worst = min(ours / theirs for ours, theirs in kept)
        report(Claim(f"{name}: vq2 kept over GPTQ int2's, worst seed", worst, "×", at_least=1.0))
        for budget in BUDGETS:
            searched = [seed["search"].get(str(budget)) for seed in every[name]]
            less = [one["less_kl_percent"] for one in searched if one]
            if less:
                what = f"{name}: KL below best uniform at {budget} bits"
                report(Claim(what, float(np.mean(less)), "%", at_least=LESS_KL))
        for target in TARGETS:
            found = [seed["targets"][str(target)] for seed in every[name]]
            said = ", ".join(
                f"{'met' if one['reached'] else 'refused'} at {one['bits']:.2f} bits "
                f"({one['kept_on_other_text']:.4f} on other text)"
                for one in found
            )
            print(f"{name}: target {target}: {said}")
    if options.out is not None:
        options.out.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
