"""Algorithms for a step's matmuls on one NVIDIA GPU, chosen under load (`tune_products`).

XLA runs each of cuBLAS's algorithms once on an idle chip and takes the fastest. Its choice differs
from start to start, by up to 8 % of a matmul, and in a step the chip is at its power limit. Here
the algorithms alternate at that limit, in a child process (`matmul_timing`), once per model and
chip, and XLA is given the outcome.

The matmuls are read from the text of the compiled step. The outcome is a file of autotuning
results, which `xla_gpu_dump_autotune_results_to` writes and `xla_gpu_load_autotune_results_from`
reads: entries, each with a key that XLA makes of an instruction and the best algorithm for it.
"""

import hashlib
import json
import math
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from ..runtime.child import ChildError, run_child
from ..runtime.files import cache_folder, private_folder, temporary_folder, write_json
from ..runtime.progress import Progress

SMALLEST_SHARE = 0.01  # of the FLOPs of all matmuls: smaller ones are not worth timing
TIMEOUT_S = 600.0
SECONDS_EACH = 4  # about, on an H200
_DEFINED = re.compile(
    r"^\s*(?:ROOT )?%([\w.\-]+) = \(?(\w+)\[(\d+),(\d+)\]\{(\d,\d)[^}]*\}", re.MULTILINE
)
_CALL = re.compile(
    r"%([\w.\-]+) = .*custom-call\(%([\w.\-]+), %([\w.\-]+)\), "
    r'custom_call_target="__cublas\$lt\$matmul"'
)
_DIMENSIONS = re.compile(
    r'"lhs_batch_dimensions":\[\],"lhs_contracting_dimensions":\["(\d)"\],'
    r'"rhs_batch_dimensions":\[\],"rhs_contracting_dimensions":\["(\d)"\]'
)
_CHOSEN = re.compile(r'"selected_algorithm":"(\d+)"')
SIXTEEN_BITS = ("bf16", "f16")  # XLA's names
SUFFIX = ".textproto"  # XLA writes its results as text only into such a file
_GEMM = re.compile(r"gemm \{([^{}]*)\}")
_ALGORITHM = re.compile(r"\s*\balgorithm: \d+")


@dataclass(frozen=True)
class Matrix:
    """A matrix: its type as XLA names it, its shape, and whether its rows are contiguous."""

    dtype: str
    shape: tuple[int, int]
    by_rows: bool = True


@dataclass(frozen=True)
class Matmul:
    """One matrix multiplication, as cuBLAS computes it."""

    left: Matrix
    right: Matrix
    out: Matrix
    contracting: tuple[int, int]

    @property
    def flops(self) -> int:
        """FLOPs of one call."""
        return 2 * math.prod(self.out.shape) * self.left.shape[self.contracting[0]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Matmul":
        """Build from the output of `to_dict`, also after JSON made lists of its tuples."""
        left, right, out = (
            Matrix(matrix["dtype"], tuple(matrix["shape"]), matrix["by_rows"])
            for matrix in (data["left"], data["right"], data["out"])
        )
        return cls(left, right, out, tuple(data["contracting"]))


def matmuls_in(text: str) -> Counter[Matmul]:
    """Count the 16-bit matmuls without an addend whose algorithm XLA chose from cuBLAS's."""
    matrices = {
        name: Matrix(dtype, (int(rows), int(columns)), order == "1,0")
        for name, dtype, rows, columns, order in _DEFINED.findall(text)
    }
    counts: Counter[Matmul] = Counter()
    for line in text.splitlines():
        call, dimensions = _CALL.search(line), _DIMENSIONS.search(line)
        if call is None or dimensions is None or not _CHOSEN.search(line):
            continue
        out, left, right = (matrices.get(name) for name in call.groups())
        if out is None or left is None or right is None:
            continue
        if left.dtype in SIXTEEN_BITS and right.dtype in SIXTEEN_BITS:
            counts[Matmul(left, right, out, (int(dimensions[1]), int(dimensions[2])))] += 1
    return counts


def chosen_algorithm(text: str) -> int | None:
    """Return the algorithm that XLA chose in a program of one matmul."""
    chosen = _CHOSEN.search(text)
    return None if chosen is None else int(chosen[1])


def split_results(text: str) -> list[str]:
    """Split a file of autotuning results into its entries."""
    entries, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                entries.append(text[start : position + 1].strip())
                start = position + 1
    return entries


def result_key(entry: str) -> str | None:
    """Return the entry without its algorithm; None if it is not about cuBLAS."""
    return _GEMM.sub("gemm {}", entry) if _GEMM.search(entry) else None


def with_algorithm(entry: str, algorithm: int) -> str:
    """Return the entry with another algorithm in it."""
    return _GEMM.sub(
        lambda gemm: f"gemm {{{_ALGORITHM.sub('', gemm[1]).rstrip()} algorithm: {algorithm} }}",
        entry,
    )


def tuned_options(text: str, *, progress: Progress, folder: Path | None = None) -> dict[str, Any]:
    """Return compiler options that make XLA use the algorithms that are fastest under load.

    Args:
        text: The step, compiled without these options.
        progress: Called with a message before the timing and after it.
        folder: Where results are kept; by default in the cache folder.

    Returns:
        No options where XLA's own choice stays.
    """
    matmuls = _worth_timing(text)
    if not matmuls:
        progress("there are no cuBLAS matmuls to time")
        return {}
    results = results_file(matmuls, folder)
    report = results.with_suffix(".json")
    if not results.is_file():
        progress(
            f"timing {len(matmuls)} matmuls under load, about {SECONDS_EACH * len(matmuls)} s, "
            "kept for the next run"
        )
        try:
            _time(matmuls, results, report)
        except ChildError as error:
            progress(f"the matmuls could not be timed, so XLA's choice stays: {error}")
            return {}
    timed = json.loads(report.read_text())
    changed = sum(matmul["usual"] != matmul["best"] for matmul in timed)
    progress(
        f"{len(timed)} matmuls timed under load; for {changed} another algorithm than XLA's first "
        "choice is faster"
    )
    return {"xla_gpu_load_autotune_results_from": str(results)}


def _worth_timing(text: str) -> list[Matmul]:
    counts = matmuls_in(text)
    total = sum(matmul.flops * count for matmul, count in counts.items())
    return [
        matmul
        for matmul, count in counts.most_common()
        if matmul.flops * count >= SMALLEST_SHARE * total
    ]


def results_file(matmuls: list[Matmul], folder: Path | None = None) -> Path:
    """Return the file of XLA's results for these matmuls on this chip."""
    about = json.dumps(
        [
            jax.__version__,
            jax.devices()[0].device_kind,
            sorted(json.dumps(matmul.to_dict()) for matmul in matmuls),
        ]
    )
    name = hashlib.sha256(about.encode()).hexdigest()[:24]
    return (folder or cache_folder("products")) / f"{name}{SUFFIX}"


def _time(matmuls: list[Matmul], results: Path, report: Path) -> None:
    """Time the matmuls in a child process, and keep what it found.

    Raises:
        ChildError: The child failed, or could time none of them.
    """
    private_folder(results.parent)
    # This process has taken most of the memory already; the child takes only what it needs.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with temporary_folder(inside=results.parent) as folder:
        made = folder / f"made{SUFFIX}"
        request = {"products": [matmul.to_dict() for matmul in matmuls], "results": str(made)}
        module = f"{__package__}.matmul_timing"
        timed = run_child(module, request, timeout_s=TIMEOUT_S, environment=environment)["report"]
        if not timed:
            raise ChildError("compiled alone, XLA rewrites all of them", kind="rewritten")
        write_json(report, timed)
        made.replace(results)  # last, so that its presence means that both files are complete
