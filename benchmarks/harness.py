"""One command line, one printed line per figure and one result file for every benchmark.

A script reads its command line before it imports anything heavy, so `--help` is quick and a
missing package or machine is refused in one sentence:

    COMMAND_LINE = read_command_line(__name__, __doc__, Subcommand("speed", options={"--runs": 3}))
    import jax

    if __name__ == "__main__":
        run_command(COMMAND_LINE, speed=measure_speed)

A command that runs to its end writes the figures it reported to `results/<script>.json`, from which
`tools/figures.py` fills in README and docs.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
sys.path.append(str(HERE.parent / "tests" / "support"))  # models and runs that tests have too
DATA = HERE / "data"  # facts that benchmarks compile, measure or were published
PUBLISHED = DATA / "published_results.json"
GPU = "an NVIDIA GPU"
SIDES = ("model", "compiler", "measured", "published", "target")
SAMPLES = {"out": "out of sample", "in": "in sample", "none": "nothing fitted"}
# Fields of results whose two sides are of these kinds, with nothing fitted.
MEASURED = {"compares": "measured : measured", "sample": "none"}
MODELLED = {"compares": "model : model", "sample": "none"}
HELD_TO_TARGET = {"compares": "measured : target", "sample": "none"}
PACKAGES = ("tpukit", "jax", "libtpu", "torch")  # their versions are kept with every result


@dataclass(frozen=True)
class Result:
    """A figure that a benchmark reports, and the bar that it has to clear, if there is one.

    Attributes:
        what: The quantity, in words.
        value: A number, or several that one text shows (a range, a pair).
        key: Name in the result file; made from `what` where it is "".
        form: Format of each number in the documents.
        joint: Text between the numbers.
        compares: The two kinds of number that are compared, of `SIDES`, as "model : published".
        sample: A key of `SAMPLES`: whether something was fitted to the rows that are scored.
    """

    what: str
    value: float | tuple[float, ...]
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    key: str = ""
    form: str = ".4g"
    joint: str = " to "
    compares: str = ""
    sample: str = ""

    @property
    def name(self) -> str:
        """The key in the result file."""
        if self.key:
            return re.sub(r"[^\w.-]+", "_", self.key).strip("_")
        return re.sub(r"\W+", "_", self.what.lower()).strip("_")

    @property
    def values(self) -> tuple[float, ...]:
        """All of its numbers."""
        return self.value if isinstance(self.value, tuple) else (self.value,)

    @property
    def text(self) -> str:
        """The figure as documents state it; a range of equal ends is one number."""
        numbers = [re.sub(r"e([+-])0", r"e\1", f"{one:{self.form}}") for one in self.values]
        if self.joint == " to ":
            numbers = list(dict.fromkeys(numbers))
        first, *others = numbers
        if self.joint == " ± ":
            others = [number.lstrip("+-") for number in others]
        text = self.joint.join([first, *others]).replace("-", "−" if self.form[0] == "+" else "-")
        return f"{text} {self.unit}".strip()

    @property
    def target(self) -> str:
        """The bar as text; "" where there is none."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return "" if self.at_least is None else f"≥ {self.at_least:g}"

    @property
    def verdict(self) -> str:
        """Whether the worst of the numbers clears the bar; "" where there is none."""
        if not self.target:
            return ""
        low = self.at_most is None or max(self.values) <= self.at_most
        high = self.at_least is None or min(self.values) >= self.at_least
        return "met" if low and high else "MISSED"

    def __str__(self) -> str:
        line = f"{self.what:<52} {self.text:>16}"
        if not self.target:
            return line
        bar, worst = (
            (self.at_most, max(self.values))
            if self.at_most is not None
            else (self.at_least, min(self.values))
        )
        ratio = f"{worst / bar:6.2f}×  " if bar else ""
        return f"{line} target {self.target}  {ratio}{self.verdict}"


@dataclass(frozen=True)
class Subcommand:
    """One question that a script answers.

    Attributes:
        help: One line for the list of commands.
        options: Arguments of `add_argument` by flag; a bare value is a default of that type.
        needs: Packages by their import name, and machines (`GPU`).
        environment: Variables that are set before jax is imported, unless they are set already.
    """

    name: str
    help: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """What one command reported, where and when; `machine` and `versions` are {} in older runs."""

    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    figures: dict[str, Result]

    @cached_property
    def load(self) -> str:
        """Processes that wanted a core at the end of the run; "" where it was not kept."""
        return str(self.machine.get("load", ""))


REPORTED: list[Result] = []  # by the command that runs in this process


def report(*figures: Result) -> None:
    """Print each figure on a line of its own, and keep it for the result file."""
    for figure in figures:
        print(figure, flush=True)
    REPORTED.extend(figures)


def read_command_line(
    module: str, description: str, *commands: Subcommand, words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the command line of a script, before its heavy imports.

    Return an empty namespace if the script is imported by another. End the process for `--help`,
    for a wrong option, and if a package or machine that the command needs is missing.
    """
    if module != "__main__":
        return argparse.Namespace()
    summary, *_ = description.splitlines()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if len(commands) == 1 and not commands[0].name:
        _add_options(parser, commands[0])
    else:
        parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for command in commands:
            inner = parsers.add_parser(command.name, help=command.help, description=command.help)
            _add_options(inner, command)
    options = parser.parse_args(words)
    chosen = next(one for one in commands if one.name == getattr(options, "command", ""))
    for need in chosen.needs:
        if not is_here(need):
            parser.exit(2, f"{summary.rstrip('.')}: needs {need}, which is not on this machine\n")
    for name, value in chosen.environment.items():
        os.environ.setdefault(name, value)
    return options


def _add_options(parser: argparse.ArgumentParser, command: Subcommand) -> None:
    parser.add_argument("--json", action="store_true", help="print the result file's entry only")
    for flag, given in command.options.items():
        if isinstance(given, Mapping):
            parser.add_argument(*flag.split(), **given)
        else:
            parser.add_argument(flag, type=type(given), default=given, help=f"default {given}")


def is_here(need: str) -> bool:
    """Whether a package is installed, or a machine is this one."""
    if need == GPU:
        return Path("/dev/nvidiactl").exists()
    return importlib.util.find_spec(need) is not None


def run_command(
    options: argparse.Namespace,
    function: Callable[[argparse.Namespace], int | None] | None = None,
    **functions: Callable[[argparse.Namespace], int | None],
) -> None:
    """Call the chosen command, write what it reported to the result file, and end the process."""
    name = getattr(options, "command", "")
    called = function or functions[name.replace("-", "_")]
    words = [word for word in sys.argv[1:] if word != "--json"]
    script = Path(sys.argv[0]).stem
    with redirect_stdout(sys.stderr if options.json else sys.stdout):
        code = called(options)
    figures = {figure.name: figure for figure in REPORTED}
    done = Run(
        shlex.join(["python", f"benchmarks/{script}.py", *words]),
        f"{datetime.now(UTC):%Y-%m-%d}",
        describe_machine(),
        installed_versions(),
        figures,
    )
    if figures:
        write_runs(script, [*(_without(figures, one) for one in read_runs(script)), done])
    if options.json:
        print(json.dumps(as_plain(done), indent=1, ensure_ascii=False))
    sys.exit(code)


def _without(figures: Mapping[str, Result], older: Run) -> Run:
    kept = {name: figure for name, figure in older.figures.items() if name not in figures}
    return Run(older.command, older.date, older.machine, older.versions, kept)


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, load and GPU of this machine."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if _is_linux() else ():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    machine: dict[str, Any] = {
        "processor": processor,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    if is_here(GPU):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        machine["gpu"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return machine


def _is_linux() -> bool:
    return sys.platform == "linux"


def installed_versions() -> dict[str, str]:
    """Return the version of Python and of each installed package in `PACKAGES`."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def as_plain(done: Run) -> dict[str, Any]:
    """Return a run as JSON data; defaults of figures are left out."""
    figures = {}
    for name, figure in done.figures.items():
        defaults = Result("", 0.0)
        fields = asdict(figure).items()
        figures[name] = {
            key: value
            for key, value in fields
            if (key != "key" and value != getattr(defaults, key)) or key == "value"
        } | {"text": figure.text}
    return {
        "command": done.command,
        "date": done.date,
        "machine": done.machine,
        "versions": done.versions,
        "figures": figures,
    }


def read_runs(script: str) -> list[Run]:
    """Return the kept runs of a script, oldest first."""
    path = RESULTS / f"{script}.json"
    if not path.is_file():
        return []
    runs = []
    for entry in json.loads(path.read_text("utf-8")):
        figures = {}
        for name, row in entry.pop("figures").items():
            row.pop("text")
            if isinstance(row["value"], list):
                row["value"] = tuple(row["value"])
            figures[name] = Result(**row, key=name)
        runs.append(Run(**entry, figures=figures))
    return runs


def write_runs(script: str, runs: Sequence[Run]) -> None:
    """Replace the kept runs of a script; a run without figures is dropped."""
    RESULTS.mkdir(exist_ok=True)
    entries = [as_plain(one) for one in runs if one.figures]
    text = json.dumps(entries, indent=1, ensure_ascii=False) + "\n"
    (RESULTS / f"{script}.json").write_text(text, "utf-8")


def all_figures() -> Iterator[tuple[str, Run, Result]]:
    """Yield every kept figure with its script and its run."""
    for path in sorted(RESULTS.glob("*.json")):
        for done in read_runs(path.stem):
            for figure in done.figures.values():
                yield path.stem, done, figure
