"""Captured programs of others: predicted steps beside measured ones, and what a capture costs.

python benchmarks/captured.py frameworks
python benchmarks/captured.py cost
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from harness import DATA, HELD_TO_TARGET, Result, Subcommand, read_command_line, report, run_command

COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "frameworks",
        "steps of MaxText and Levanter, captured, beside measured ones",
        options={
            "--maxtext": {"help": "the interpreter of an environment that has MaxText"},
            "--levanter": {"help": "the same for Levanter"},
            "--only": {"default": "", "help": "rows whose name or slice contains this"},
            "--code": {"type": Path, "help": "a checkout of marin-community/marin"},
            "--work": {
                "type": Path,
                "default": Path("captured-frameworks"),
                "help": "folder for data",
            },
            "--recorded": {"action": "store_true", "help": "score what was written"},
        },
    ),
    Subcommand(
        "cost",
        "seconds and memory of a capture",
        options={
            "--only": {"default": "", "help": "cases whose name contains this: 8b@v6e-8"},
        },
    ),
)

from captured_trainer import SIZES

from tpukit import check_program
from tpukit.errors import TPUError
from tpukit.hardware.figure import bytes_text

DOCUMENTS, WORDS_PER_DOCUMENT = 300, 1000
SPECIAL = ("<unk>", "<s>", "</s>")
# Loads a module of an experiment, which registers an optimizer with Levanter, and then starts
# Levanter's own trainer. Modules that start runs on Marin's cluster are replaced by empty ones.
LAUNCHER = """\
import importlib.abc, importlib.machinery, importlib.util, runpy, sys, types

class Anything:
    def __init__(self, *args, **kwargs): pass
    def __call__(self, *args, **kwargs): return self
    def __getattr__(self, name): return self

class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("marin", "experiments"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []  # before names are made up, or it would be one of them
        module.__getattr__ = lambda name: Anything
        return module
    def exec_module(self, module): pass

sys.meta_path.append(Empty())  # the last, so that modules that are there come first
import levanter.optim, levanter.optim.config
levanter.optim.OptimizerConfig = levanter.optim.config.OptimizerConfig  # its place in 2025
for path in sys.argv.pop(1).split(","):
    name = path.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
if hasattr(module, "AdamaxConfig"):  # it registers itself when it is built, which is too late
    module.OptimizerConfig.register_subclass("adamax")(module.AdamaxConfig)
runpy.run_module("levanter.main.train_lm", run_name="__main__")
"""


@dataclass(frozen=True)
class TrainerCommand:
    """What is typed behind `tpukit check … --`.

    Attributes:
        words: The command.
        folder: The folder it runs in.
        environment: Variables that its recipe sets.
    """

    words: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def __str__(self) -> str:
        return shlex.join(self.words)


def command_of(
    row: Mapping[str, Any],
    python: str,
    folder: Path,
    *,
    code: Path | None = None,
    trainer: str = "",
) -> TrainerCommand:
    """Return the command of a row; its files are written into a folder.

    Args:
        row: A row of data/captured_frameworks.json.
        python: The interpreter of the framework's environment.
        folder: Gets configuration and stand-in data.
        code: A checkout that has the files which a row names as its `code`.
        trainer: The package and its version, because Levanter's configuration has changed.
    """
    if row["framework"] == "maxtext":
        return _maxtext(row, python, folder)
    config = levanter_config(row, folder, old=trainer.startswith("levanter "))
    return _levanter(row, python, folder, config, code)


def _maxtext(row: Mapping[str, Any], python: str, folder: Path) -> TrainerCommand:
    settings = {
        "run_name": "captured",
        "base_output_directory": str(folder / "output"),
        "model_name": row["model"],
        "enable_checkpointing": False,
        "dataset_type": "synthetic",
        "steps": 20,
        **row["settings"],
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    flags = " ".join(row["flags"])
    module = "maxtext.trainers.pre_train.train"
    return TrainerCommand(
        [python, "-m", module, *words], folder, {"LIBTPU_INIT_ARGS": flags} if flags else {}
    )


def levanter_config(row: Mapping[str, Any], folder: Path, *, old: bool) -> dict[str, Any]:
    """Return the configuration of a row, with a stand-in corpus; `old` is the format of 2025."""
    data = folder / f"words-{row['vocabulary']}"
    write_corpus(data, row["vocabulary"])
    tokenizer, texts = str(data / "tokenizer"), [str(data / "train.jsonl")]
    source = {"main": {"source": {"type": "url", "train_urls": texts}}}
    model = {**row["model"], "reference_checkpoint": tokenizer, "tokenizer": tokenizer}
    if old:
        model["seq_len"] = model.pop("max_seq_len")
    return {
        "data": {
            "tokenizer": tokenizer,
            "cache_dir": str(data / ("cache-2025" if old else "cache")),
            "shuffle": False,
            **({"train_urls": texts} if old else {"components": source}),
        },
        "model": model,
        **({} if old else {"train_seq_len": row["sequence"]}),
        "optimizer": row["optimizer"],
        "trainer": {
            "tracker": {"type": "noop"},
            "mp": "p=f32,c=bfloat16",
            "train_batch_size": row["batch"],
            "num_train_steps": row["steps"],
            "checkpointer": {"base_path": str(folder / "checkpoints")},
        },
    }


def _levanter(
    row: Mapping[str, Any], python: str, folder: Path, config: Mapping[str, Any], code: Path | None
) -> TrainerCommand:
    path = folder / f"{row['name'].replace('/', '-')}.yaml"
    path.write_text(json.dumps(config, indent=1))  # JSON is YAML, too
    arguments = ["--config_path", str(path)]
    # Blocks of the loss are timed on devices unless that is off, and nothing here has a time.
    untimed = {"LEVANTER_PALLAS_CE_AUTOTUNE_ON_MISS": "0"}
    if "code" not in row:
        words = [python, "-m", "levanter.main.train_lm", *arguments]
        return TrainerCommand(words, folder, untimed)
    if code is None:
        raise FileNotFoundError(f"{row['name']} needs {', '.join(row['code'])}; give --code")
    launcher = folder / "launch.py"
    launcher.write_text(LAUNCHER)
    return TrainerCommand([python, str(launcher), ",".join(row["code"]), *arguments], code, untimed)


def write_corpus(folder: Path, vocabulary: int) -> None:
    """Write documents of made-up words and a tokenizer with that many words, once."""
    done = folder / "train.jsonl"
    if done.exists():
        return
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    words = [*SPECIAL, *(f"w{number}" for number in range(vocabulary - len(SPECIAL)))]
    added = [
        {
            "id": number,
            "content": text,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, text in enumerate(SPECIAL)
    ]
    model = {
        "type": "WordLevel",
        "vocab": {w: n for n, w in enumerate(words)},
        "unk_token": "<unk>",
    }
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    split = {"type": "WhitespaceSplit"}
    file = {
        "version": "1.0",
        **empty,
        "added_tokens": added,
        "pre_tokenizer": split,
        "model": model,
    }
    (tokenizer / "tokenizer.json").write_text(json.dumps(file))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(about))
    (tokenizer / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": vocabulary})
    )
    lines = []
    for number in range(DOCUMENTS):
        text = " ".join(
            words[3 + (number * 7919 + at * 104729) % (vocabulary - 3)]
            for at in range(WORDS_PER_DOCUMENT)
        )
        lines.append(json.dumps({"text": text}))
    done.write_text("\n".join(lines) + "\n")


ROWS = DATA / "captured_frameworks.json"
PACKAGES = ("maxtext", "marin-levanter", "levanter")  # Levanter had its own name until 2025
BARS = {"maxtext": 0.05, "levanter": None}
LIMIT_S = 1800


def capture(row: dict[str, Any], python: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `tpukit check` finds of a row, or raise its reason."""
    folder = options.work / row["framework"]
    folder.mkdir(parents=True, exist_ok=True)
    code = None if options.code is None else options.code.resolve()
    trainer = version_of(python)
    command = command_of(row, python, folder, code=code, trainer=trainer)
    tpukit = str(Path(sys.executable).with_name("tpukit"))
    page = folder / f"{row['name'].replace('/', '-')}-{row['on']}.html"
    started = time.perf_counter()
    ended = subprocess.run(
        [
            *(tpukit, "check", "--on", row["on"]),
            *("--json", "--html", str(page), "--timeout", str(LIMIT_S)),
            "--",
            *command.words,
        ],
        cwd=command.folder,
        env={**os.environ, **command.environment},
        capture_output=True,
        text=True,
    )
    if not ended.stdout.strip().startswith("{"):
        raise RuntimeError(ended.stderr.strip()[-1500:] or f"exit code {ended.returncode}")
    found = json.loads(ended.stdout)
    about = found["capture"]
    return {
        "predicted_s": about["step_time_s"]["value"],
        "fits": found["verdict"] == "fits",
        "hbm_bytes": found["memory"]["total_bytes"],
        "trainer": trainer,
        "jax": about["versions"]["jax"],
        "compiler": ", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        "kernels": sorted({name for one in about["listed"] for name in one["kernels"]}),
        "capture_s": about["capture_s"]["value"],
        "compile_s": found["compile"]["compile_s"]["value"],
        "total_s": round(time.perf_counter() - started, 1),
        "host_peak_bytes": about["peak_bytes"]["value"],
        "date": f"{date.today()}",
    }


def version_of(python: str) -> str:
    """Return name and version of the trainer that an environment has."""
    text = (
        "import importlib.metadata as m\n"
        f"known = {{d.name: d.version for d in m.distributions() if d.name in {PACKAGES!r}}}\n"
        "print(' '.join(next(iter(known.items()))))"
    )
    found = subprocess.run([python, "-c", text], capture_output=True, text=True)
    if found.returncode:
        raise FileNotFoundError(f"{python} has none of {', '.join(PACKAGES)}")
    return found.stdout.strip()


def show(row: dict[str, Any], found: dict[str, Any]) -> None:
    """Print one row: predicted, measured, their ratio, and the code that was captured."""
    step = found["predicted_s"]
    ratio = "" if step is None else f"{step / row['measured_s']:.3f}"
    predicted = "–" if step is None else f"{step:.4f}"
    verdict = "" if found["fits"] else "  does not fit"
    print(
        f"{row['name']:<40} {row['on']:<8} predicted {predicted:>8} s  measured "
        f"{row['measured_s']:>8.4f} s  {ratio:>6}  {found['trainer']}, jax {found['jax']}{verdict}",
        flush=True,
    )


def ratios_of(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """Return predicted over measured of every row, by framework and version of the trainer."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for one in row.get("captured", ()):
            if one["predicted_s"]:
                ratio = one["predicted_s"] / row["measured_s"]
                found.setdefault((row["framework"], one["trainer"]), []).append(ratio)
    return found


def score(rows: list[dict[str, Any]]) -> None:
    """Print the spread of predicted over measured per framework and version of it."""
    for (framework, trainer), ratios in ratios_of(rows).items():
        errors, bar = [abs(ratio - 1) for ratio in ratios], BARS[framework]
        report(
            Result(f"{trainer}: predicted / measured, median", statistics.median(ratios), ""),
            Result(
                f"steps of {trainer}, captured, over published ones, {len(ratios)} rows",
                (min(ratios), max(ratios)),
                at_most=1 + bar if bar else None,
                key=trainer.split()[0],
                form=".3f",
                compares="model : published",
                sample="in" if framework == "maxtext" else "none",
            ),
            Result(f"{trainer}: largest error", max(errors), "", at_most=bar),
        )


def run_frameworks(options):
    """Steps of other people's trainers, captured unmodified, beside their published times.

    Each row of data/captured_frameworks.json is a published run with its settings. Its trainer
    runs as `tpukit check --on SLICE --json -- python -m …` in an environment of its own, and the
    predicted step goes into the row, with the version of the trainer that was captured.
    `--recorded` runs nothing and scores what is written.

    The measured code is seldom the captured one: published runs name a day, not a version. Rows
    that need a file of the experiment (an optimizer that Levanter does not have) name it as
    `code`, and take it from a checkout of Marin's repository.
    """
    options.work = options.work.resolve()
    rows: list[dict[str, Any]] = json.loads(ROWS.read_text())
    chosen = [
        row for row in rows if options.only in f"{row['framework']}/{row['name']}@{row['on']}"
    ]
    for row in chosen:
        python = getattr(options, row["framework"])
        if not options.recorded and python is not None:
            try:
                keep(row, capture(row, python, options))
            except (RuntimeError, FileNotFoundError) as error:
                print(f"{row['name']} on {row['on']}: not captured: {error}", flush=True)
        for found in row.get("captured", ()):
            show(row, found)
    score(chosen)


def keep(row: dict[str, Any], found: dict[str, Any]) -> None:
    """Write one row's result beside those of other versions of the trainer."""
    others = [one for one in row.get("captured", ()) if one["trainer"] != found["trainer"]]
    row["captured"] = [*others, found]
    rows = json.loads(ROWS.read_text())  # others may have been written since this run began
    same = [(row["name"], row["on"]) == (one["name"], one["on"]) for one in rows]
    rows[same.index(True)] = row
    ROWS.write_text(json.dumps(rows, indent=1) + "\n")


SLICES = {"v6e-8": 8, "v5p-128": 64, "v5p-1024": 512, "v5p-8192": 4096}
SCRIPT = Path(__file__).with_name("captured_trainer.py")
HEADINGS = (
    *("size", "chips", "verdict", "seconds to it", "of that compiler", "of that the rest"),
    *("host memory", "beside imports"),
)
IMPORTS = """
import time
started = time.perf_counter()
import jax, optax, numpy
took = time.perf_counter() - started
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(took, int(peak.split()[1]) * 1024)
"""


@dataclass(frozen=True)
class Imports:
    """What the program's imports take by themselves."""

    seconds: float
    peak_bytes: int

    @classmethod
    def measured(cls) -> "Imports":
        """Import the same modules in a process of their own."""
        command = [sys.executable, "-c", IMPORTS]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout.split()
        return cls(float(said[0]), int(said[1]))


@dataclass(frozen=True)
class Cost:
    """Of one capture, without anything kept from an earlier one."""

    verdict_s: float
    compile_s: float
    peak_bytes: int
    fits: bool


def measure(size: str, slice_name: str) -> Cost:
    """Run the script as if on a slice, up to the verdict on memory."""
    seen: list[float] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TPUKIT_CACHE_DIR"] = cache
        found = check_program(
            [sys.executable, str(SCRIPT), "--size", size],
            slice_name,
            memory_only=True,
            verdict=lambda _: seen.append(time.perf_counter() - started),
        )
    assert found.captured is not None
    return Cost(seen[0], found.compiled.compile_s, found.captured.peak_bytes, found.fits)


def run_cost(options):
    """What the verdict on an unmodified program costs: seconds, and memory of its process.

    `captured_trainer.py` is run as if on 8 to 4,096 chips, with four sizes of a model. Targets:
    the program's process stays within 2 GB beside what its imports take, and the verdict on memory
    takes at most 30 s beside imports and the compiler's own time.
    """
    imports = Imports.measured()
    print(f"imports: {imports.seconds:.1f} s, {bytes_text(imports.peak_bytes)}")
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    memory, rest = list[float](), list[float]()
    for size, slice_name in itertools.product(SIZES, SLICES):
        if options.only not in f"{size}@{slice_name}":
            continue
        chips = SLICES[slice_name]
        try:
            cost = measure(size, slice_name)
        except TPUError as error:
            print(f"| {size} | {chips:,} | {error} |", flush=True)
            continue
        memory.append((cost.peak_bytes - imports.peak_bytes) / 1e9)
        rest.append(cost.verdict_s - cost.compile_s - imports.seconds)
        cells = (
            *(size, f"{chips:,}", "fits" if cost.fits else "does not fit"),
            *(f"{seconds:.0f}" for seconds in (cost.verdict_s, cost.compile_s, rest[-1])),
            *(bytes_text(cost.peak_bytes), f"{memory[-1]:.2f} GB"),
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    report(
        Result(
            "host memory of a captured program beside its imports, 1 to 70 B on 8 to 4,096 chips",
            max(memory, default=0),
            "GB",
            at_most=2,
            key="capture_memory",
            form=".2f",
            **HELD_TO_TARGET,
        ),
        Result(
            "verdict on a captured program beside its imports and the compiler, the same cases",
            max(rest, default=0),
            "s",
            at_most=30,
            key="capture_verdict",
            form=".0f",
            **HELD_TO_TARGET,
        ),
    )


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        frameworks=run_frameworks,
        cost=run_cost,
    )
