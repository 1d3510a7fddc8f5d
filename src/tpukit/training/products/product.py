"""The matrix products that a step leaves to cuBLAS, as XLA writes them down.

They stand in the text of a compiled step, and in the file of autotuning results that
`xla_gpu_dump_autotune_results_to` writes and `xla_gpu_load_autotune_results_from` reads: blocks,
each a key that XLA makes of an instruction and what was best for it.
"""

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

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
NARROW = ("bf16", "f16")  # XLA's names
# XLA writes its results as text only where the file's name ends so.
SUFFIX = ".textproto"
_GEMM = re.compile(r"gemm \{([^{}]*)\}")
_ALGORITHM = re.compile(r"\s*\balgorithm: \d+")


@dataclass(frozen=True)
class Matrix:
    """A matrix: its type as XLA names it, its shape, and whether its rows are contiguous."""

    dtype: str
    shape: tuple[int, int]
    by_rows: bool = True


@dataclass(frozen=True)
class Product:
    """One matrix product as cuBLAS is asked for it."""

    left: Matrix
    right: Matrix
    out: Matrix
    contracting: tuple[int, int]

    @property
    def flops(self) -> int:
        """Multiplications and additions of one call."""
        return 2 * math.prod(self.out.shape) * self.left.shape[self.contracting[0]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Product":
        """What `to_dict` gave, also after a way through JSON."""
        left, right, out = (
            Matrix(one["dtype"], tuple(one["shape"]), one["by_rows"])
            for one in (data["left"], data["right"], data["out"])
        )
        return cls(left, right, out, tuple(data["contracting"]))


def products_in(text: str) -> Counter[Product]:
    """Narrow products that add to nothing, and how often the program calls each.

    Those count whose algorithm XLA chose from cuBLAS's.
    """
    matrices = {
        name: Matrix(dtype, (int(rows), int(columns)), order == "1,0")
        for name, dtype, rows, columns, order in _DEFINED.findall(text)
    }
    found: Counter[Product] = Counter()
    for line in text.splitlines():
        call, dimensions = _CALL.search(line), _DIMENSIONS.search(line)
        if call is None or dimensions is None or not _CHOSEN.search(line):
            continue
        out, left, right = (matrices.get(name) for name in call.groups())
        if out is None or left is None or right is None:
            continue
        if left.dtype in NARROW and right.dtype in NARROW:
            found[Product(left, right, out, (int(dimensions[1]), int(dimensions[2])))] += 1
    return found


def chosen_algorithm(text: str) -> int | None:
    """Which algorithm XLA took in a program of one product."""
    chosen = _CHOSEN.search(text)
    return None if chosen is None else int(chosen[1])


def blocks_of(text: str) -> list[str]:
    """The results in the file, one text each."""
    blocks, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                blocks.append(text[start : place + 1].strip())
                start = place + 1
    return blocks


def key_of(block: str) -> str | None:
    """What is the same whatever algorithm was chosen; None where it is not about cuBLAS."""
    return _GEMM.sub("gemm {}", block) if _GEMM.search(block) else None


def with_algorithm(block: str, algorithm: int) -> str:
    """The block with another choice in it."""
    return _GEMM.sub(
        lambda gemm: f"gemm {{{_ALGORITHM.sub('', gemm[1]).rstrip()} algorithm: {algorithm} }}",
        block,
    )
