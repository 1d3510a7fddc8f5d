"""One measured kernel timing, and the share of a device it ran on."""

import gzip
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tpukit.hardware import get_chip

FOLDS = 5
# XLA's grouped products became several times faster between the blobs of these two months.
COMPILER_CHANGED = "2026-03"


@dataclass(frozen=True)
class Row:
    """A measurement with everything that decides how much work was done."""

    id: str
    case_id: str
    device: str
    op: str
    impl: str
    dims: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int] | None]
    dtypes: Mapping[str, str]
    config: Mapping[str, Any]
    static_args: Mapping[str, Any]
    mask_kind: str | None
    group_sizes: tuple[int, ...] | None
    measured_us: float
    timing_method: str
    source_date: str

    @cached_property
    def shape_key(self) -> str:
        """The same for rows of one shape, whatever device, implementation or type ran it.

        `reduction` and the mask leave the work nearly the same, so they do not make a new shape.
        """
        sizes = {
            name: value
            for name, value in self.dims.items()
            if name not in ("reduction", "activation", "variant", "triangle_type", "has_bias")
        }
        if self.op == "ragged_dot":  # a product and its two gradients are one layer
            sizes["k"], sizes["n"] = sorted((sizes["k"], sizes["n"]))
        family = self.op.removesuffix("_fwd").removesuffix("_bwd")
        return json.dumps([family, sizes], sort_keys=True)

    @cached_property
    def fold(self) -> int:
        """Which of the folds leaves this shape out of its fit."""
        return int(hashlib.sha256(self.shape_key.encode()).hexdigest(), 16) % FOLDS

    @property
    def comparison_key(self) -> str:
        """The same for rows that answer one question: which implementation is faster here."""
        types = sorted(set(self.dtypes.values()))
        asked = [self.static_args.get("return_residuals"), self.mask_kind, self.dims.get("variant")]
        return json.dumps([self.device, self.op, self.shape_key, types, asked, self.group_sizes])

    @property
    def timed_on_device(self) -> bool:
        """Timed by the device's own trace, not by a host that also dispatches."""
        return not self.timing_method.startswith(("host", "unknown"))

    @property
    def old_compiler(self) -> bool:
        """Measured before XLA's grouped products changed."""
        return self.source_date < COMPILER_CHANGED

    def dtype(self, argument: str) -> str:
        """Type of an argument without the remarks some sources add to it."""
        return self.dtypes[argument].split(" ")[0].split("(")[0]

    def item_bytes(self, argument: str) -> float:
        """Bytes of one element of an argument."""
        bits = re.search(r"\d+", self.dtype(argument))
        return int(bits.group()) / 8 if bits else 1.0  # bool

    def argument_bytes(self, argument: str) -> float:
        """Bytes of an argument in HBM, its last two axes padded to tiles; 0 when absent."""
        shape = self.shapes.get(argument)
        if not shape or argument not in self.dtypes:
            return 0.0
        return padded_bytes(shape, self.item_bytes(argument))


@dataclass(frozen=True)
class Device:
    """What one JAX device of a generation could do at best."""

    name: str
    peak_flops_per_us: float
    hbm_bytes_per_us: float
    mxu_size: int

    def mxu_us(self, flops: float) -> float:
        """Time of matrix products at the stated bf16 peak."""
        return flops / self.peak_flops_per_us

    def hbm_us(self, moved_bytes: float) -> float:
        """Time of HBM traffic at the stated bandwidth."""
        return moved_bytes / self.hbm_bytes_per_us

    def pad(self, size: float) -> int:
        """A size rounded up to whole passes of the matrix unit."""
        return round_up(size, self.mxu_size)


@lru_cache
def device_of(name: str) -> Device:
    """The ceilings of one JAX device, from the chip catalogue."""
    chip = get_chip(name)
    needed = "estimating a kernel's time"
    return Device(
        name,
        chip.per_device(chip.peak()).require(needed) * 1e6,
        chip.per_device(chip.hbm_gbps).require(needed) * 1e3,
        int(chip.mxu_size.require(needed)),
    )


def round_up(size: float, multiple: int) -> int:
    """The next multiple."""
    return math.ceil(size / multiple) * multiple


def padded_bytes(shape: Sequence[int], item_bytes: float) -> float:
    """Bytes in HBM of an array whose last two axes are padded to (32 bytes, 128) tiles."""
    *outer, rows, lanes = (1, *shape) if len(shape) == 1 else shape
    tiled = round_up(rows, round(32 / item_bytes) if rows > 1 else 1) * round_up(lanes, 128)
    return float(math.prod(outer) * tiled * item_bytes)


def read_rows(path: Path) -> tuple[list[Row], Counter[str]]:
    """The rows of a timings file, which may be compressed, and what is wrong with the others.

    Raises:
        SystemExit: The file is no list of rows.
    """
    content = path.read_bytes()
    try:
        listed = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} is not JSON ({error}); expected a list of timings.") from error
    if not isinstance(listed, list):
        raise SystemExit(f"{path} holds no list of timings; expected [{{...}}, ...].")
    rows: list[Row] = []
    wrong: Counter[str] = Counter()
    for fields in listed:
        try:
            rows.append(as_row(fields))
        except KeyError as error:
            wrong[f"no {error.args[0]}"] += 1
        except (AttributeError, TypeError, ValueError):
            wrong["not as the others are written"] += 1
    return rows, wrong


def as_row(fields: Mapping[str, Any]) -> Row:
    """A row of the file's schema of measured kernel timings.

    Raises:
        KeyError: Something is missing that no row can do without.
        ValueError: It took no time.
    """
    groups = (fields.get("group_sizes") or {}).get("values")
    measured_us = float(fields["measured_us"])
    if not measured_us > 0:
        raise ValueError(measured_us)
    return Row(
        id=fields["id"],
        case_id=fields.get("case_id") or fields["id"],
        device=fields["device"],
        op=fields["op"],
        impl=fields["impl"],
        dims=fields["dims"],
        shapes=fields.get("shapes") or {},
        dtypes=fields.get("dtypes") or {},
        config=fields.get("config") or {},
        static_args=fields.get("static_args") or {},
        mask_kind=fields.get("mask_kind"),
        group_sizes=tuple(groups) if groups else None,
        measured_us=measured_us,
        timing_method=fields.get("timing_method") or "unknown",
        source_date=fields.get("source_date") or "",
    )
