"""What few bits leave of small language models trained here: weights and KV cache.

python benchmarks/vq_lm.py weights
python benchmarks/vq_lm.py cache
"""

import argparse
import json
import sysconfig
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import MEASURED, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "weights",
        "perplexity and KL of quantized weights",
        options={
            "--models": {"default": "gated,plain"},
            "--seeds": {"type": int, "default": 3},
            "--steps": {"type": int, "default": 2000},
            "--batches": {"type": int, "default": 8, "help": "To calibrate with, and to judge by"},
            "--calibrate": {"type": int, "help": "Batches to calibrate with, if others"},
            "--tune": {"type": int, "default": 0, "help": "Steps of tuning, of what is compared"},
            "--tune-budgets": {"action": "store_true", "help": "Plans at the budgets, too"},
            "--first-seed": {"type": int, "default": 0},
            "--generation": {"action": "store_true", "help": "Score what plans write, too"},
            "--trellis": {"action": "store_true", "help": "Trellises too"},
            "--formats": {"help": "These and no others, like vq2,trellis2:256,int8"},
            "--quick": {"action": "store_true", "help": "A tiny model and few formats"},
            "--verbose": {"action": "store_true", "help": "Print every matrix"},
            "--out": {"type": Path, "help": "file of all rows"},
        },
    ),
    Subcommand(
        "cache",
        "greedy text with a quantized KV cache",
        options={
            "--models": {"default": "gated,plain"},
            "--seeds": {"type": int, "default": 1},
            "--steps": {"type": int, "default": 3000},
            "--length": {"type": int, "default": 1024},
            "--batch": {"type": int, "default": 16},
            "--rows": {"type": int, "default": 128},
            "--quick": {"action": "store_true", "help": "a smoke test"},
            "--out": {"type": Path, "help": "file of all rows"},
        },
    ),
)

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpukit import Workload, get_preset
from tpukit.hardware.stored_formats import CACHE_FORMATS
from tpukit.models.stored.running import dense_parameters
from tpukit.quantization import fit_cache
from tpukit.quantization.cache.retention import CacheJudge
from tpukit.quantization.integers import rounded_matrix
from tpukit.quantization.measures.evaluation import QuantizationEvaluator, generation_score
from tpukit.quantization.model import matrix_of, replaced, with_parts
from tpukit.quantization.plan import make_plan
from tpukit.quantization.search.calibrated import Calibrated, RoundingMethod, Stored
from tpukit.quantization.search.candidates import Chosen, FormatCandidates, make_candidates
from tpukit.quantization.search.search import Ladder
from tpukit.quantization.search.tuning import tune_parameters
from tpukit.quantization.subject import make_subject

LENGTH, BATCH, STEPS_A_CALL = 256, 32, 250
COMMON = {"vocab_size": 256, "max_seq_len": 512, "dtype": "float32", "param_dtype": "float32"}
MODELS: dict[str, dict[str, Any]] = {
    # Llama's block: gated, few key heads.
    "gated": {
        "d_model": 256,
        "n_layers": 4,
        "n_heads": 8,
        "n_kv_heads": 4,
        "head_dim": 32,
        "d_ff": 768,
    },
    # GPT-2's: two matrices a block, narrower and deeper.
    "plain": {
        "d_model": 192,
        "n_layers": 6,
        "n_heads": 6,
        "n_kv_heads": 6,
        "head_dim": 32,
        "d_ff": 768,
        "gated_mlp": False,
        "activation": "gelu",
    },
    "quick": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 2,
        "head_dim": 32,
        "d_ff": 128,
    },
}
GROUP = 64
INTEGERS = (2, 3, 4)
VECTORS = ("vq:1x256x6", "vq2", "vq:1x256x3", "vq4")
TRELLISES = ("trellis1:128", "trellis2:256", "trellis3:256", "trellis4:256")
WIDE = ("int4", "int8", "bf16")
QUICK = ("vq:1x16x4", "vq:1x16x2", "int4", "bf16")
BUDGETS = (2.1, 2.5, 3.25)
ABOUT = 0.1  # bits more that a uniform format may take
TARGETS = (0.90, 0.95, 0.98)
LESS_KL = 50.0  # %


def text() -> dict[str, np.ndarray]:
    """Bytes of the standard library, by what they are for; a file is in one part only.

    Calibrating takes files that the model was trained on, too, as one would; judging never does.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: dict[str, list[bytes]] = {"train": [], "calibrate": [], "judge": []}
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-s]*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        drawn = zlib.crc32(str(path.relative_to(root)).encode()) % 10
        parts["calibrate" if drawn == 8 else "judge" if drawn == 9 else "train"].append(
            path.read_bytes()
        )
    parts["calibrate"] += parts["train"]
    return {name: np.frombuffer(b"".join(all_), np.uint8) for name, all_ in parts.items()}


def windows(data: np.ndarray, count: int, seed: int) -> np.ndarray:
    """(count, batch, length + 1) of text."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(data) - LENGTH - 1, (count, BATCH))
    return data[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int32)


def batches(data: np.ndarray, count: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Windows of text, with what comes next."""
    found = windows(data, count, seed)
    return [{"inputs": one[:, :-1], "targets": one[:, 1:]} for one in found]


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

    def step(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        batch = {"inputs": windows[:, :-1], "targets": windows[:, 1:]}
        state, metrics = work.train_step(state, batch)
        return state, metrics["loss"]

    # Many steps a call: a small model's step is shorter than a call.
    some_steps = jax.jit(partial(jax.lax.scan, step), donate_argnums=0)
    state = jax.jit(work.init)(jax.random.key(seed))
    text = windows(data, steps, seed)
    for start in range(0, steps, STEPS_A_CALL):
        state, losses = some_steps(state, text[start : start + STEPS_A_CALL])
    print(f"{name} seed {seed}: trained to loss {float(losses[-1]):.3f}", flush=True)
    return config, state.params


def integer_rows(calibrated: Calibrated, names: list[str]) -> dict[str, tuple[Any, float]]:
    """Every matrix in integers, to nearest and by GPTQ, and the bits a weight, by the method."""
    seen = calibrated.statistics(names)
    weights = {n: matrix_of(calibrated.subject.params, calibrated.by_name[n]) for n in names}

    def one(job: tuple[str, int, str]) -> tuple[jax.Array, float]:
        method, bits, name = job
        weight = weights[name]
        # GPTQ of inputs that have nothing to do with one another rounds to nearest.
        hessian = seen[name].hessian if method == "GPTQ" else jnp.eye(weight.shape[0])
        found, size = rounded_matrix(weight, bits, group=GROUP, hessian=hessian, method="gptq")
        return found, size * weight.size

    total = sum(weight.size for weight in weights.values())
    rows: dict[str, tuple[Any, float]] = {}
    jobs = [(m, b, n) for b in INTEGERS for m in ("RTN", "GPTQ") for n in names]
    with ThreadPoolExecutor(8) as pool:
        made = dict(zip(jobs, pool.map(one, jobs), strict=True))
    for bits in INTEGERS:
        for method in ("RTN", "GPTQ"):
            own = {name: made[method, bits, name] for name in names}
            parts = {name: part for name, (part, _) in own.items()}
            rows[f"{method} int{bits}"] = parts, sum(size for _, size in own.values()) / total
    return rows


def measure(evaluator: QuantizationEvaluator, params: Any, bits: float) -> dict[str, float]:
    """Bits, perplexity kept, KL and agreement, on the evaluator's text."""
    found = evaluator(params)
    assert found.kl is not None
    assert found.agreement is not None
    return {
        "bits": bits,
        "kept": found.retention.value,
        "kept_low": found.retention.low,
        "kl": found.kl.value,
        "kl_low": found.kl.low,
        "kl_high": found.kl.high,
        "same": found.agreement.value,
    }


class Seed:
    """One model of one seed, its candidates, and text that neither saw."""

    def __init__(self, name: str, seed: int, options: argparse.Namespace) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        data = text()
        config, params = train(name, data["train"], options.steps, seed)
        self._lap("train")
        given, judged, fresh = (
            batches(data[part], count, number + seed)
            for part, count, number in (
                ("calibrate", options.calibrate, 0),
                ("judge", options.batches, 1000),
                ("judge", options.batches, 2000),
            )
        )
        self.subject = make_subject(config, params, given[0])
        self.given, self.judged, self.fresh = (
            [self.subject.batch(one) for one in some] for some in (given, judged, fresh)
        )
        rounding = RoundingMethod(integers="gptq", seed=seed)
        said = print if options.verbose else lambda line: None
        self.calibrated = Calibrated.of(self.subject, self.given, self.judged, rounding, said)
        self.other = self.calibrated.evaluator.beside(self.subject.params, self.fresh)
        self.generates, self.steps, self.seed = options.generation, options.tune, seed
        self.tuned_sizes = ("same_bytes", "same_budget")[: 1 + options.tune_budgets]
        plan = make_plan(self.calibrated.matrices, "int4")
        self.integers = integer_rows(self.calibrated, list(plan.quantized))
        self._lap("integers")
        self.candidates = make_candidates(self.calibrated, plan, options.formats)
        self.ladder = Ladder.of(self.candidates)
        self.plans: dict[str, Chosen] = {}
        self._lap("candidates")

    def _lap(self, what: str) -> None:
        now = time.perf_counter()
        self.seconds[what], self._started = now - self._started, now
        print(f"  {what}: {self.seconds[what]:.1f} s", flush=True)

    def params(self, parts: dict[str, Any]) -> Any:
        return replaced(self.subject.params, self.calibrated.matrices, parts)

    def judge(self, chosen: Chosen) -> dict[str, float]:
        parts = {name: one.stored.part for name, one in chosen.items()}
        bits = self.candidates.bits(chosen)
        return measure(self.calibrated.evaluator, self.params(parts), bits)

    def tuned(self, chosen: Chosen) -> dict[str, Any]:
        """What tuned choices lose on the text they are judged by, and on other text."""
        parts = {name: one.stored.part for name, one in chosen.items()}
        stored = with_parts(self.subject.params, self.calibrated.matrices, parts)
        started = time.perf_counter()
        stored, found = tune_parameters(
            self.subject, stored, self.given, steps=self.steps, seed=self.seed
        )
        params, bits = dense_parameters(stored), self.candidates.bits(chosen)
        return {
            **measure(self.calibrated.evaluator, params, bits),
            "other_kl": measure(self.other, params, bits)["kl"],
            "tuning": found.to_dict(),
            "seconds": time.perf_counter() - started,
        }

    def tune(self, searched: dict[str, Any]) -> None:
        """Tune the plans of the search and the formats they are compared with, each plan once."""
        plans: dict[str, Chosen] = {}
        wanted: list[tuple[str, dict[str, Any], float]] = []
        for found in filter(None, searched.values()):
            best = found["best_uniform"]
            if best in self.candidates.formats:
                plans[best] = self.candidates.uniform(best)
                wanted.append((best, found, found["kl"]))
            for what in self.tuned_sizes:
                # A budget that the uniform format uses up needs no tuning of its own.
                spare = what in found and found[what]["bits"] - found["same_bytes"]["bits"]
                if what in found and (what == "same_bytes" or spare > ABOUT):
                    label = json.dumps(found[what]["formats"])
                    plans[label] = self.plans[label]
                    wanted.append((label, found[what], found["kl"]))
        # Each plan is a program of its own: they compile side by side.
        with ThreadPoolExecutor(8) as pool:
            made = dict(zip(plans, pool.map(self.tuned, plans.values()), strict=True))
        for label, row, uniform in wanted:
            row["tuned"] = {
                **made[label],
                "less_kl_percent": 100 * (1 - made[label]["kl"] / uniform),
            }
        for budget, found in searched.items():
            if not found or "tuned" not in found:
                continue
            for what in self.tuned_sizes:
                if "tuned" in found.get(what, {}):
                    own = found[what]["tuned"]
                    less = 100 * (1 - own["kl"] / found["tuned"]["kl"])
                    own["less_than_tuned_percent"] = less
                    print(
                        f"  {budget} {what} tuned: KL {own['kl']:.4f}, "
                        f"{own['less_kl_percent']:.1f} % below {found['best_uniform']}, {less:.1f} "
                        f"% below it tuned ({found['tuned']['kl']:.4f}), {own['seconds']:.0f} s",
                        flush=True,
                    )

    def rows(self, formats: tuple[str, ...]) -> dict[str, Any]:
        """Uniform formats, the search at their bytes, and targets."""
        uniform = {
            label: measure(self.calibrated.evaluator, self.params(parts), bits)
            for label, (parts, bits) in self.integers.items()
        }
        uniform |= {one: self.judge(self.candidates.uniform(one)) for one in formats}
        for label, row in uniform.items():
            print(
                f"  {label:<12} {row['bits']:5.2f} bits: kept {row['kept']:.4f}, KL {row['kl']:.4f}"
            )
        searched = {str(budget): self.at_budget(budget, uniform) for budget in BUDGETS}
        self._lap("search")
        if self.steps:
            self.tune(searched)
            self._lap("tune")
        targets = {str(target): self.at_target(target) for target in TARGETS}
        self._lap("targets")
        return {
            "uniform": uniform,
            "search": searched,
            "targets": targets,
            "choices": table_of(self.candidates),
            "seconds": self.seconds,
        }

    def most_gain(self, format: str) -> float | None:
        """Estimate by how many percent bits for whole matrices could beat a format at its bytes.

        Costs of matrices are taken to add up, and to fall to a fourth with every bit a weight, as
        squared errors do at best. Then equal slopes leave the geometric mean of what weights cost,
        and a uniform format their mean.
        """
        if format not in self.candidates.formats:
            return None
        uniform = self.candidates.uniform(format)
        shapes = [self.calibrated.by_name[name].shape for name in uniform]
        weights = np.array([rows * columns for rows, columns in shapes], float)
        each = np.array([max(one.cost, 1e-12) for one in uniform.values()]) / weights
        share = weights / weights.sum()
        return 100 * float(1 - np.exp(share @ np.log(each)) / (share @ each))

    def at_budget(self, budget: float, uniform: dict[str, Any]) -> dict[str, Any] | None:
        """The best uniform format at about a budget; the search at its bytes and at the budget."""
        fair = {one: row for one, row in uniform.items() if row["bits"] <= budget + ABOUT}
        if not fair:
            return None
        best = min(fair, key=lambda one: fair[one]["kl"])
        found: dict[str, Any] = {"best_uniform": best, **fair[best]}
        found["most_gain_percent"] = self.most_gain(best)
        sizes = {"same_bytes": fair[best]["bits"], "same_budget": max(budget, fair[best]["bits"])}
        for what, bits in sizes.items():
            if self.candidates.bits(self.ladder.choices(0)) > bits:
                continue
            chosen = self.ladder.within(bits * self.candidates.weights / 8)
            row = self.judge(chosen)
            less = 100 * (1 - row["kl"] / fair[best]["kl"])
            formats = {name: one.stored.format for name, one in chosen.items()}
            found[what] = {**row, "less_kl_percent": less, "formats": formats}
            self.plans[json.dumps(formats)] = chosen
            print(
                f"  {budget} {what}: {row['bits']:.3f} bits, KL {row['kl']:.4f}, "
                f"{less:.1f} % below {best}",
                flush=True,
            )
        return found

    def at_target(self, target: float) -> dict[str, Any]:
        """The smallest plan that surely keeps so much of held-out text, and what of other text."""
        steps = self.ladder.until(target, len(self.ladder.upgrades))
        reached = steps is not None
        chosen = self.ladder.choices(len(self.ladder.upgrades) if steps is None else steps)
        parts = {name: one.stored.part for name, one in chosen.items()}
        bits, params = self.candidates.bits(chosen), self.params(parts)
        written = None
        if self.generates:
            stored = with_parts(self.subject.params, self.calibrated.matrices, parts)
            written, _ = generation_score(self.subject, stored, self.judged[:1])
        return {
            "reached": reached,
            "on_held_out": measure(self.calibrated.evaluator, params, bits),
            "on_other_text": measure(self.other, params, bits),
            "generation": written and written.value,
        }


def table_of(candidates: FormatCandidates) -> dict[str, list[list[Any]]]:
    """Format, bytes, error of the output and expected KL of every choice."""

    def row(stored: Stored, cost: float) -> list[Any]:
        return [stored.format, stored.nbytes, stored.error, cost]

    return {
        name: [row(one.stored, one.cost) for one in choices]
        for name, choices in candidates.choices.items()
    }


def summarise(name: str, seeds: list[dict[str, Any]]) -> None:
    """Means over seeds beside their targets."""
    for label in seeds[0]["uniform"]:
        rows = [seed["uniform"][label] for seed in seeds]
        kept = float(np.mean([row["kept"] for row in rows]))
        what = f"perplexity that {label} keeps of {name} at {rows[0]['bits']:.2f} bits"
        key = f"{name}_{label}_kept".replace(" ", "_")
        report(Result(what, kept, "", key=key, form=".3f", **OUT_OF_SAMPLE))
    if "vq2" in seeds[0]["uniform"]:
        kept = [[s["uniform"][one]["kept"] for one in ("vq2", "GPTQ int2")] for s in seeds]
        worst = min(ours / theirs for ours, theirs in kept)
        report(Result(f"{name}: vq2 kept over GPTQ int2's, worst seed", worst, "×", at_least=1.0))
    for budget in BUDGETS:
        found = [seed["search"][str(budget)] for seed in seeds]
        for what in ("same_bytes", "same_budget"):
            said = f"{name}: KL below best uniform, {budget} bits, {what.replace('_', ' ')}"
            less = [one[what]["less_kl_percent"] for one in found if one and what in one]
            if less:
                report(Result(said, float(np.mean(less)), "%", at_least=LESS_KL))
            tuned = [one[what]["tuned"] for one in found if one and "tuned" in one.get(what, {})]
            if tuned:
                less = float(np.mean([row["less_kl_percent"] for row in tuned]))
                report(Result(f"{said}, tuned", less, "%", at_least=LESS_KL))
            both = [r["less_than_tuned_percent"] for r in tuned if "less_than_tuned_percent" in r]
            if both:
                report(Result(f"{said}, both tuned", float(np.mean(both)), "%"))
    for target in TARGETS:
        found = [seed["targets"][str(target)] for seed in seeds]
        said = ", ".join(
            f"{'met' if one['reached'] else 'refused'} at {one['on_held_out']['bits']:.2f} bits "
            f"({one['on_other_text']['kept']:.4f} on other text)"
            for one in found
        )
        print(f"{name}: target {target}: {said}")


def run_weights(options):
    """Measure small language models, trained here, with quantized weights on held-out text.

    The text is the source of Python's standard library, as bytes; whole files are held out. Every
    matrix of the layers is quantized (embedding and unembedding stay), each method on the same
    XᵀX: to nearest, GPTQ, vector codes, and a search over formats. Bits a weight include scales
    and codebooks. Kept is the full model's perplexity over the quantized one's.

    The search is compared with the best uniform format at 2.1, 2.5 and 3.25 bits: of all formats
    here that take no more than those bits (and a tenth), the one with the least KL on the text it
    is judged by. "Same bytes" gives the search what that format takes, and not a byte more; "same
    budget" gives it the bits that were asked for, which a uniform format cannot use up. It sees
    calibration text only, and so does `--tune`: plans of the search at the same bytes (with
    `--tune-budgets` at the budgets, too), and the uniform format they are compared with, are tuned
    alike, and all are judged by files that were neither trained nor calibrated with.

    Rows are written after every seed. `--quick` is a smoke test for a CPU: one tiny model, few
    formats.
    """
    named = options.formats
    options.formats = (*VECTORS, *(TRELLISES if options.trellis else ()), *WIDE)
    if named:
        options.formats = tuple(named.split(","))
    if options.quick:
        options.models, options.seeds, options.formats = "quick", 1, QUICK
        options.steps, options.batches = min(options.steps, 60), 2
    options.calibrate = options.calibrate or options.batches
    every: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in options.models.split(","):
            rows = Seed(name, seed, options).rows(options.formats)
            every.setdefault(name, []).append(rows)
            if options.out is not None:
                options.out.write_text(json.dumps(every, indent=1))
    for name, seeds in every.items():
        summarise(name, seeds)
    both: list[float] = []
    for budget in BUDGETS:
        found = [seed["search"][str(budget)] for seeds in every.values() for seed in seeds]
        same = [one.get("same_bytes", {}) for one in found if one]
        tuned = [one["tuned"] for one in same if "tuned" in one]
        less = [row["less_kl_percent"] for row in tuned]
        both += [
            row["less_than_tuned_percent"] for row in tuned if "less_than_tuned_percent" in row
        ]
        if less:
            what = (
                f"KL of search and tuning below the best uniform format at its bytes, {budget} bits"
            )
            spread = (min(less), max(less))
            key = f"kl_tuned_{budget}"
            report(
                Result(what, spread, "%", at_least=LESS_KL, key=key, form=".0f", **OUT_OF_SAMPLE)
            )
    if both:
        what = "gain of the search over a uniform format at the same bytes, both tuned alike"
        spread = (min(both), max(both))
        report(Result(what, spread, "%", key="kl_both_tuned", form=".0f", **OUT_OF_SAMPLE))


OUT_OF_SAMPLE = {"compares": "measured : measured", "sample": "out"}
BAR = 0.95
FOUR_BITS = ("int4", "pq4")
# Heads as wide as those of models that people serve: scales are shared within one.
HEADS = {
    "gated": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 64},
    "plain": {"n_heads": 3, "n_kv_heads": 3, "head_dim": 64},
}


def cache_train(
    name: str, data: np.ndarray, options: argparse.Namespace, seed: int
) -> tuple[Any, Any]:
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


def cache_measure(name: str, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every format."""
    data = text()
    config, params = cache_train(name, data["train"], options, seed)
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


def run_cache(options):
    """Measure greedy text of small language models, trained here, with a quantized KV cache.

    Models are those of `vq_lm.py` with heads of 64 channels, trained on the source of Python's
    standard library with rows of 1,024 bytes; prompts are 896 bytes of files nobody trained on,
    continued by 128 bytes, each the likeliest. All is compared with a bfloat16 cache of the same
    model. `free`: each cache goes on with its own text, and bytes are compared place by place, so
    that all after the first other one count as lost where they differ. `forced`: both read the
    bfloat16 cache's text, and choices are compared. Bits include scales and the tokens that stay
    in bfloat16, at 1,024 tokens.

    The first row, bfloat16 beside float32, is what the measure finds of no more than that.
    """
    if options.quick:
        options.steps, options.length, options.batch, options.rows = 20, 128, 4, 8
    rows = [
        row
        for name in options.models.split(",")
        for seed in range(options.seeds)
        for row in cache_measure(name, seed, options)
    ]
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))
    claims: list[Result] = []
    for name in options.models.split(","):
        four = [r for r in rows if r["model"] == name and r["label"] in FOUR_BITS]
        best = max(four, key=lambda row: row["free"]["value"])
        for row in four:
            what = f"a KV cache of {name} in {row['label']}"
            key = f"cache_{name}_{row['label']}"
            free, forced = row["free"]["value"], row["forced"]["value"]
            bar = BAR if row is best else None
            claims += [
                Result(
                    f"greedy tokens that {what} keeps of a bfloat16 one",
                    free,
                    at_least=bar,
                    key=f"{key}_free",
                    form=".3f",
                    **MEASURED,
                ),
                Result(
                    f"choices of next tokens that {what} shares with a bfloat16 one",
                    forced,
                    key=f"{key}_forced",
                    form=".4f",
                    **MEASURED,
                ),
            ]
    report(*claims)


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        weights=run_weights,
        cache=run_cache,
    )
