"""What products in eight bits do to a language model's held-out loss: formats × seeds, paired.

    python benchmarks/fp8_loss_study.py prepare TEXT          # any machine: bytes to read
    python benchmarks/fp8_loss_study.py run TEXT RESULT.json  # a machine that trains
    python benchmarks/fp8_loss_report.py                      # table and curve of the kept result

A decoder reads bytes of source code and documentation. For one seed every format starts from the
same weights and reads the same windows in the same order, so that differences are the format's. How
far two runs part for no reason at all is measured too: "bf16 again" starts from weights that differ
by a millionth. Losses of a run are kept as they come: what was stopped is not lost.
"""

import argparse
import hashlib
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax

from tpukit.models import TransformerConfig
from tpukit.step import OptimizerSpec, Workload, build_optimizer

SHAPE = {"n_layers": 8, "d_model": 512, "d_ff": 1536, "n_heads": 8, "vocab_size": 256}
LENGTH, BATCH = 1024, 32
PEAK_RATE, WARMUP = 2e-3, 100
HELD_OUT_BATCHES, CURVE_EVERY = 32, 25
TEXT_BYTES = 40_000_000
FORMATS: dict[str, dict[str, object]] = {
    "bf16": {"matmul": "dtype"},
    "bf16 again": {"matmul": "dtype"},
    "fp8 static": {"matmul": "float8_static"},
    # Weights of a layer with a sixteenth of the inputs are four times as large: this bound makes
    # the constant scale as coarse for our 512 inputs as 224 is for the 8192 of a 70B model.
    "fp8 static, as at 8192": {"matmul": "float8_static", "float8_bound": 896.0},
    "fp8 by channel": {"matmul": "float8_channels"},
    "fp8 dynamic": {"matmul": "float8"},
    "int8": {"matmul": "int8"},
}
NUDGE = 1e-6


def text_files() -> Iterator[Path]:
    """Source and documentation of Python and of what is installed beside it, in order of path."""
    for folder in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(folder))
        for path in sorted(root.rglob("*")):
            is_text = path.suffix in (".py", ".md", ".rst", ".txt") and path.is_file()
            if is_text and not (folder == "stdlib" and "site-packages" in path.parts):
                yield path


def prepare(out: Path) -> None:
    """Write bytes for training and, of other files, for judging it."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    seen: set[str] = set()
    size = 0
    for path in text_files():
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        if digest in seen or not 500 < len(content) < 200_000:
            continue
        seen.add(digest)
        parts[int(digest, 16) % 20 == 0].append(content)
        size += len(content)
        if size > TEXT_BYTES:
            break
    train, held_out = (np.frombuffer(b"\n".join(parts[key]), np.uint8) for key in (False, True))
    np.savez_compressed(out, train=train, held_out=held_out)
    print(f"{train.size:,} bytes to train on, {held_out.size:,} held out, of {len(seen):,} files")


def windows(text: np.ndarray, count: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Random windows of a text, in batches."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        starts = rng.integers(0, text.size - LENGTH - 1, size=(BATCH, 1))
        window = text[starts + np.arange(LENGTH + 1)].astype(np.int32)
        yield {"inputs": window[:, :-1], "targets": window[:, 1:]}


class Study:
    """The workload of a format, compiled once for all seeds."""

    def __init__(self, format: str, steps: int) -> None:
        config = TransformerConfig(name="study", max_seq_len=LENGTH, **SHAPE, **FORMATS[format])
        rate = optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, WARMUP, steps, 0.1 * PEAK_RATE)
        work = Workload(
            config,
            batch_size=BATCH,
            sequence_length=LENGTH,
            optimizer=build_optimizer(OptimizerSpec(), rate),
        )
        self.format, self.steps = format, steps
        self.parameters = config.parameter_count().total
        self._init = jax.jit(work.init)
        self._step = jax.jit(work.train_step, donate_argnums=0)
        self._loss = jax.jit(lambda state, batch: work.train_step(state, batch)[1]["loss"])

    def run(self, text: dict[str, np.ndarray], seed: int) -> dict[str, object]:
        """Train from a seed; the training curve, the held-out loss and seconds."""
        state = self._init(jax.random.key(seed))
        if self.format == "bf16 again":
            nudged = jax.tree.map(lambda leaf: leaf * (1 + NUDGE), state.params)
            state = type(state)(state.step, nudged, state.opt_state, state.model_state)
        began, losses = time.perf_counter(), []
        for batch in windows(text["train"], self.steps, seed):
            state, metrics = self._step(state, batch)
            losses.append(metrics["loss"])
        curve = np.asarray(jax.device_get(losses), np.float64)
        seconds = time.perf_counter() - began
        judged = windows(text["held_out"], HELD_OUT_BATCHES, seed=12345)
        held_out = np.asarray([float(self._loss(state, batch)) for batch in judged])
        return {
            "format": self.format,
            "seed": seed,
            "held_out": held_out.mean(),
            "train": [round(float(part.mean()), 5) for part in _pieces(curve)],
            "seconds": round(seconds, 2),
        }


def _pieces(curve: np.ndarray) -> list[np.ndarray]:
    return np.array_split(curve, max(1, len(curve) // CURVE_EVERY))


def run(options: argparse.Namespace) -> None:
    """Train every format from every seed, seed by seed, and write what there is after each run."""
    text = dict(np.load(options.text))
    studies = [Study(format, options.steps) for format in options.formats.split(";")]
    found: list[dict[str, object]] = []
    began = time.perf_counter()
    for seed in range(options.seeds):
        for study in studies:
            found.append(study.run(text, seed))
            result = {
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "parameters": study.parameters,
                "shape": SHAPE,
                "steps": options.steps,
                "tokens": options.steps * BATCH * LENGTH,
                "text_sha256": hashlib.sha256(text["train"].tobytes()).hexdigest(),
                "runs": found,
            }
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            last = found[-1]
            print(
                f"{time.perf_counter() - began:6.1f} s  seed {seed}  {study.format:<24} held out "
                f"{last['held_out']:.5f}  {last['seconds']:.1f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("text", type=Path)
    running = commands.add_parser("run")
    running.add_argument("text", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--steps", type=int, default=1000)
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--formats", default=";".join(FORMATS))
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.text)
    else:
        run(options)


if __name__ == "__main__":
    main()
