"""Training in 8-bit floating point: the program, and the loss beside bfloat16.

python benchmarks/fp8.py program
python benchmarks/fp8.py prepare text.npz
python benchmarks/fp8.py study text.npz result.json
python benchmarks/fp8.py report
python benchmarks/fp8.py training
"""

import hashlib
import json
import sysconfig
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

from harness import (
    DATA,
    MEASURED,
    MODELLED,
    Result,
    Subcommand,
    read_command_line,
    report,
    run_command,
)

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "program",
        "what fp8 changes in the compiled program",
        options={
            "--only": {"default": "", "help": "part of a model's name"},
            "--layers": {"type": int, "help": "cut the models to this many"},
        },
    ),
    Subcommand(
        "prepare",
        "write the text of the loss study",
        options={"text": {"type": Path, "help": "file to write, .npz"}},
    ),
    Subcommand(
        "study",
        "train the models of the loss study",
        options={
            "text": {"type": Path, "help": "file that `prepare` wrote"},
            "out": {"type": Path, "help": "file to write, .json"},
            "--steps": 1000,
            "--seeds": 3,
            "--formats": {"help": "separated by semicolons; all by default"},
        },
    ),
    Subcommand(
        "report",
        "the table and curve of the loss study",
        options={
            "result": {
                "type": Path,
                "nargs": "?",
                "default": DATA / "fp8_loss_study.json",
                "help": "file that `study` wrote; the kept one by default",
            }
        },
    ),
    Subcommand(
        "training",
        "loss of a byte model trained in 8 bits",
        options={
            "--steps": {"type": int, "default": 200},
            "--seed": {"type": int, "default": 1},
        },
    ),
)

import jax
import numpy as np
import optax

from tpukit import configure_tpu_environment
from tpukit.compiler import compile_for
from tpukit.compiler.hlo import Computation, HloModule, trip_count
from tpukit.compiler.hlo.collectives import kind_of
from tpukit.models import TransformerConfig, get_preset
from tpukit.step import OptimizerSpec, Workload, build_optimizer

# model -> slice, examples of 8192 tokens, what the backward pass recomputes
PROGRAMS = {
    "llama3.1-8b": ("tpu7x-2x2x2", 16, "full"),
    "llama3.1-70b": ("tpu7x-4x4x4", 128, "full"),
    "mixtral-8x7b": ("tpu7x-2x2x4", 32, "full"),
}
LENGTH = 8192
FORMATS = {"bf16": "dtype", "fp8 static": "float8_static"}
MOVES = ("all-gather", "collective-permute")
# As the planner writes for a mesh without a tensor axis: products with gathered weights stay whole.
OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
COMPILE_S = 1800


def moved_bytes(module: HloModule) -> Counter[str]:
    """Bytes that gathers and permutes of one run make on a device, by number format."""
    found: Counter[str] = Counter()

    def visit(computation: Computation, times: int) -> None:
        for instruction in computation:
            if kind_of(instruction.opcode) in MOVES:
                whole = max(instruction.shapes, key=lambda shape: shape.bytes)
                found[whole.dtype] += times * whole.bytes
            elif not instruction.opcode.endswith(("-done", "-update")):
                loops = 1
                if instruction.opcode == "while":
                    loops = trip_count(instruction, computation, module) or 1
                for called in module.called_by(instruction):
                    visit(called, times * loops)

    visit(module.entry, 1)
    return found


def compare(model: str, layers: int | None) -> list[Result]:
    """Compile one model in both formats."""
    on, examples, remat = PROGRAMS[model]
    cut = {} if layers is None else {"n_layers": layers}
    steps: dict[str, float] = {}
    moved: dict[str, int] = {}
    for name, matmul in FORMATS.items():
        work = Workload(
            get_preset(model, matmul=matmul, **cut),
            batch_size=examples,
            sequence_length=LENGTH,
            remat=remat,
        )
        compiled = compile_for(
            *(work, on),
            mesh={"fsdp": -1},
            options=OPTIONS,
            until="schedule",
            timeout_s=COMPILE_S,
        )
        found = moved_bytes(compiled.module)
        steps[name] = compiled.predict().step_time_s
        moved[name] = found.total()
        by_format = ", ".join(f"{dtype} {size / 1e9:.2f} GB" for dtype, size in found.most_common())
        print(
            f"{model} on {on}, {name}: {compiled.memory.total_bytes / 2**30:.2f} GiB, predicted "
            f"step {steps[name]:.4f} s, moved {moved[name] / 1e9:.2f} GB ({by_format})",
            flush=True,
        )
    wide, narrow = FORMATS
    return [
        Result(
            f"step of {model} in static fp8 over that in bf16",
            steps[narrow] / steps[wide],
            at_most=1.0,
            key=f"step_{model}",
            form=".2f",
            **MODELLED,
        ),
        Result(f"{model}: fp8 static / bf16, moved", moved[narrow] / moved[wide], "x"),
    ]


def run_program(options):
    """Our step in bfloat16 and in static fp8 on TPU7x, by the real compiler: memory, gathers, step.

    No TPU is needed. Bytes moved are those that gathers and permutes make on one device in a step,
    by number format, loops counted as often as they run; the predicted step is our predictor's,
    whose error on published runs `benchmarks/predict.py` prints. With `--layers` the model is cut
    to so many, which compiles faster; shares of a step are then not those of the whole model.
    """
    configure_tpu_environment()
    for model in PROGRAMS:
        if options.only in model:
            report(*compare(model, options.layers))


SHAPE = {"n_layers": 8, "d_model": 512, "d_ff": 1536, "n_heads": 8, "vocab_size": 256}
STUDY_LENGTH, BATCH = 1024, 32
PEAK_RATE, WARMUP = 2e-3, 100
HELD_OUT_BATCHES, CURVE_EVERY = 32, 25
TEXT_BYTES = 40_000_000
STUDY_FORMATS: dict[str, dict[str, object]] = {
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
        starts = rng.integers(0, text.size - STUDY_LENGTH - 1, size=(BATCH, 1))
        window = text[starts + np.arange(STUDY_LENGTH + 1)].astype(np.int32)
        yield {"inputs": window[:, :-1], "targets": window[:, 1:]}


class Study:
    """The workload of a format, compiled once for all seeds."""

    def __init__(self, format: str, steps: int) -> None:
        config = TransformerConfig(
            name="study", max_seq_len=STUDY_LENGTH, **SHAPE, **STUDY_FORMATS[format]
        )
        rate = optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, WARMUP, steps, 0.1 * PEAK_RATE)
        work = Workload(
            config,
            batch_size=BATCH,
            sequence_length=STUDY_LENGTH,
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


def run_prepare(options):
    """Write bytes of source code and documentation for the loss study."""
    prepare(options.text)


def run_study(options):
    """Train every format from every seed, and write what there is after each run.

    A decoder reads bytes of source code and documentation. For one seed every format starts from
    the same weights and reads the same windows in the same order, so that differences are the
    format's. "bf16 again" starts from weights that differ by a millionth: its difference is the
    noise of a run.
    """
    text = dict(np.load(options.text))
    studies = [
        Study(format, options.steps)
        for format in (options.formats or ";".join(STUDY_FORMATS)).split(";")
    ]
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
                "tokens": options.steps * BATCH * STUDY_LENGTH,
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


ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "fp8_loss.svg"
BASE = "bf16"
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}  # 97.5 %, by degrees of freedom
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 320, 70, 20, 40
COLOURS = ("#888888", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


def by_format(result: dict, key: str) -> dict[str, list]:
    """What every run of a format has under `key`, in order of seeds."""
    found: dict[str, list] = defaultdict(list)
    for run in sorted(result["runs"], key=lambda run: run["seed"]):
        found[run["format"]].append(run[key])
    return found


def interval(differences: list[float]) -> tuple[float, float]:
    """The mean and how far from it the true one may lie."""
    n = len(differences)
    return mean(differences), STUDENT[n - 1] * stdev(differences) / n**0.5


def picture(result: dict) -> str:
    """Training losses of each format minus bfloat16's, means over seeds, as an SVG."""
    curves = by_format(result, "train")
    base = curves.pop(BASE)
    tokens = result["tokens"] / 1e6
    lines = {
        name: [
            mean(own[at] - other[at] for own, other in zip(runs, base, strict=True))
            for at in range(len(base[0]))
        ]
        for name, runs in curves.items()
    }
    # The first steps fall steeply: there the smallest shift in time is a large difference.
    first = len(base[0]) // 4
    high = max(abs(value) for line in lines.values() for value in line[first:]) * 1.1

    def x(at: int) -> float:
        return LEFT + (WIDTH - LEFT - 200) * (at - first) / (len(base[0]) - 1 - first)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value + high) / (2 * high))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value in (-high / 1.1, 0.0, high / 1.1):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 200}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'stroke="#cccccc"/><text x="{LEFT - 6}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{value:+.4f}</text>'
        )
    for colour, (row, (name, line)) in zip(COLOURS, enumerate(lines.items()), strict=False):
        points = " ".join(f"{x(at):.1f},{y(line[at]):.1f}" for at in range(first, len(line)))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<text x="{WIDTH - 190}" y="{TOP + 18 * (row + 1)}" fill="{colour}">{name}</text>'
        )
    for at in (first, len(base[0]) - 1):
        parts.append(
            f'<text x="{x(at):.1f}" y="{HEIGHT - 20}" text-anchor="middle">'
            f"{tokens * (at + 1) / len(base[0]):.0f} M tokens</text>"
        )
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 4}">training loss minus bfloat16\'s (nats a byte), '
        f"mean of {len(base)} seeds</text></svg>"
    )
    return "\n".join(parts) + "\n"


def run_report(options):
    """The table and the curve of the loss study, from the result kept beside this script.

    A format's difference is taken seed by seed from the bfloat16 run of the same seed; its
    interval is Student's, of 95 %. Writes docs/fp8_loss.svg.
    """
    result = json.loads(options.result.read_text())
    losses = by_format(result, "held_out")
    base = losses[BASE]
    print(f"{result['device']}, {result['parameters']:,} parameters, {result['tokens']:,} tokens")
    what = f"held-out loss after {result['tokens']:,} bytes in {BASE}, nats"
    report(Result(what, mean(base), key=f"loss_{BASE}", form=".4f", **MEASURED))
    for name, own in losses.items():
        if name == BASE:
            continue
        differences = [one - other for one, other in zip(own, base, strict=True)]
        middle, reach = interval(differences)
        seen = "none seen" if abs(middle) <= reach else "SEEN"
        print(
            f"{name:<26} {mean(own):.5f}  {middle:+.5f} ± {reach:.5f} nats "
            f"({100 * middle / mean(base):+.2f} ± {100 * reach / mean(base):.2f} %)  {seen}"
        )
        key = name.replace(",", "").replace(" ", "_")
        what = f"held-out loss after {result['tokens']:,} bytes in {name}, nats"
        report(
            Result(what, mean(own), key=f"loss_{key}", form=".4f", **MEASURED),
            Result(
                f"{what}, less that in {BASE}, {len(base)} seeds",
                (middle, reach),
                key=f"difference_{key}",
                form="+.4f",
                joint=" ± ",
                **MEASURED,
            ),
        )
    PICTURE.write_text(picture(result))
    print(f"wrote {PICTURE.relative_to(ROOT)}")


SOURCE = Path(__file__).parents[1] / "src" / "tpukit"
TRAINING_BATCH, TRAINING_LENGTH, LAST = 16, 128, 20
WORST = 1.0  # % of the loss


def training_windows(steps: int, seed: int) -> np.ndarray:
    """Bytes to read, (steps, batch, length + 1)."""
    text = b"".join(path.read_bytes() for path in sorted(SOURCE.glob("*/*.py")))
    every = np.frombuffer(text, np.uint8)
    starts = np.random.default_rng(seed).integers(
        0, len(every) - TRAINING_LENGTH - 1, size=(steps, TRAINING_BATCH)
    )
    return every[starts[..., None] + np.arange(TRAINING_LENGTH + 1)].astype(np.int32)


def last_loss(matmul: str, batches: np.ndarray, seed: int) -> float:
    """Train from the same start and return the loss at the end."""
    config = get_preset("tiny", n_layers=2, matmul=matmul)
    work = Workload(config, batch_size=TRAINING_BATCH, sequence_length=TRAINING_LENGTH)
    state, step = jax.jit(work.init)(jax.random.key(seed)), jax.jit(work.train_step)
    losses: list[float] = []
    for batch in batches:
        state, metrics = step(state, {"inputs": batch[:, :-1], "targets": batch[:, 1:]})
        losses.append(float(metrics["loss"]))
    return float(np.mean(losses[-LAST:]))


def run_training(options):
    """What products in eight bits do to the loss of a small model, against bfloat16 ones.

    A two-layer transformer reads the bytes of this package's own source, the same windows in the
    same order with each format; the loss is the mean of the last 20 steps.
    """
    batches = training_windows(options.steps, options.seed)
    wide = last_loss("dtype", batches, options.seed)
    report(Result("loss, bfloat16", wide, ""))
    for matmul in ("float8", "int8"):
        loss = last_loss(matmul, batches, options.seed)
        report(
            Result(f"loss, {matmul}", loss, ""),
            Result(
                f"loss with {matmul} matmuls after {options.steps} steps over bfloat16's",
                100 * (loss / wide - 1),
                "%",
                at_most=WORST,
                key=f"training_{matmul}",
                form=".1f",
                **MEASURED,
            ),
        )


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        program=run_program,
        prepare=run_prepare,
        study=run_study,
        report=run_report,
        training=run_training,
    )
