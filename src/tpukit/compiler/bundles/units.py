"""The core's unit for each instruction, and the compiler's own estimate of its duration."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Literal

from ...errors import XLACompilationError

Unit = Literal["MXU", "XLU", "EUP", "VPOP", "VLOAD", "VSTORE", "VALU", "SALU", "NONE"]
UNITS: tuple[Unit, ...] = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VSTORE", "SALU")

# The first that matches decides.
_UNIT_OF: tuple[tuple[Unit, re.Pattern[str]], ...] = (
    ("NONE", re.compile(r"inlined_call|compiler-|reloc|sphi|vphi|int_to_ptr|vdelay|vtrace")),
    ("VPOP", re.compile(r"vpop|spop")),
    ("MXU", re.compile(r"vmat|vdwg")),
    ("EUP", re.compile(r"v(?:pow|exp|rcp|rsqrt|log|tanh|erf|sigm|sinq|cosq)[\w]*\.")),
    ("XLU", re.compile(r"v\w[\w.]*\.xlu\d|vpush$")),
    ("VLOAD", re.compile(r"vld|vsync|vwait|sfence")),
    ("VSTORE", re.compile(r"vst(?!v)|vpush\.ccrf")),
    ("SALU", re.compile(r"[sp]|dma")),
    ("VALU", re.compile(r"v")),
)
_PACKED_ROWS = 16  # of bfloat16 numbers in a register of 8 x 128 words
_ENGINE = re.compile(r"(?:mxu|xlu)\d")
_RESULT_BUFFER = re.compile(r"mrb\[(\d+)\]")
_MATRIX_FORMAT = re.compile(r"vmatmul\.(?:mubr\.)?(?:msk\.)?([a-z]+\d+\w*)")
_WEIGHT_FORMAT = re.compile(r"vmatpush\d?\.(?:msk\.)?(bf16|bf8|f8\w*|s\d|u\d)")


@dataclass(frozen=True)
class OpcodeReading:
    """The parsed parts of an opcode.

    Attributes:
        engine: "mxu0", "xlu1" …; "" when the unit has no numbered engines.
        kind: How the scoreboard handles it.
        buffer: The first result buffer entry that a matmul writes or a pop reads; None for
            results from a queue.
        number_format: Number format of a matmul's operands.
        opens: Whether it is the first instruction of a transposition.
    """

    unit: Unit
    engine: str
    kind: Literal[
        "product", "weights", "result", "transposed", "transpose", "lanes", "permute", "special",
        "to_scalar", "plain", "quick",
    ]  # fmt: skip
    buffer: int | None = None
    number_format: str = ""
    opens: bool = False


@lru_cache(maxsize=65536)
def read_opcode(opcode: str) -> OpcodeReading:
    """Classify an opcode as the compiler writes it."""
    matching: list[Unit] = [unit for unit, pattern in _UNIT_OF if pattern.match(opcode)]
    unit: Unit = matching[0] if matching else "NONE"
    engine = _ENGINE.search(opcode)
    name = engine[0] if engine else ""
    entry = _RESULT_BUFFER.search(opcode)
    buffer = int(entry[1]) if entry else None
    if opcode.startswith("vmatmul"):
        found = _MATRIX_FORMAT.match(opcode)
        return OpcodeReading(unit, name, "product", buffer, found[1] if found else "")
    if opcode.startswith("vmatpush"):
        found = _WEIGHT_FORMAT.match(opcode)
        how = "transposed" if ".xpose" in opcode else "plain" if found else "wide"
        return OpcodeReading(unit, name, "weights", number_format=how)
    if unit == "VPOP":
        if ".mr" in opcode:
            return OpcodeReading(unit, name, "result", buffer)
        return OpcodeReading(unit, name, "transposed" if ".trf" in opcode else "quick")
    if unit == "XLU":
        if opcode == "vpush":
            return OpcodeReading(unit, name, "to_scalar")
        if opcode.startswith("vxpose"):
            return OpcodeReading(unit, name, "transpose", opens=".start" in opcode)
        if opcode.startswith("vset"):
            return OpcodeReading(unit, name, "quick")
        return OpcodeReading(unit, name, "lanes" if ".xlane" in opcode else "permute")
    if unit == "EUP":
        return OpcodeReading(unit, name, "special")
    return OpcodeReading(unit, name, "plain" if unit == "VALU" else "quick")


@dataclass(frozen=True)
class Core:
    """One core of a generation, as `data/units.toml` documents it."""

    branch_delay_slots: int
    delay_slots_vary: bool
    slots: Mapping[str, int]
    matrix_spacing: Mapping[str, int]
    push_spacing: Mapping[str, int]
    weights_beside_products: bool
    matrix_result: int
    integer_matrix_result: int
    lane_result: int
    permute_result: int
    transpose_result: int
    lane_spacing: int
    special_result: int
    to_scalar_result: int

    def flops_per_cycle(self, mxu_size: float) -> float:
        """The bfloat16 matmul rate of all matrix units, by the compiler's own timing."""
        rows = _PACKED_ROWS / self.matrix_spacing["default"]
        return 2 * rows * mxu_size**2 * self.slots["MXU"]

    def engine(self, reading: OpcodeReading) -> str:
        """What it takes for that long."""
        beside = reading.kind == "weights" and self.weights_beside_products
        return f"{reading.engine} weights" if beside else reading.engine

    def spacing(self, reading: OpcodeReading) -> int:
        """Cycles for which its engine is busy."""
        if reading.kind == "product":
            names = [name for name in self.matrix_spacing if reading.number_format.startswith(name)]
            return self.matrix_spacing[max(names, key=len, default="default")]
        if reading.kind == "weights":
            return self.push_spacing[reading.number_format]
        if reading.kind in ("lanes", "permute", "transpose"):
            return self.lane_spacing
        return 1

    def result_cycles(self, reading: OpcodeReading) -> int:
        """Cycles until its result can be used."""
        if reading.kind == "product":
            integer = reading.number_format[:1] in ("s", "u")
            return self.integer_matrix_result if integer else self.matrix_result
        return {
            "lanes": self.lane_result,
            "permute": self.permute_result,
            "transpose": self.transpose_result,
            "special": self.special_result,
            "to_scalar": self.to_scalar_result,
            "plain": 2,
        }.get(reading.kind, 1)


def core_of(chip_name: str) -> Core:
    """Return the core of a generation.

    Raises:
        XLACompilationError: There is no timing data for its bundles.
    """
    cores = _cores()
    if chip_name not in cores:
        raise XLACompilationError(
            f"kernels cannot be timed for {chip_name}: the latencies of its core are not known; "
            f"they are for {', '.join(cores)}."
        )
    return cores[chip_name]


@cache
def _cores() -> dict[str, Core]:
    text = (files("tpukit.compiler.bundles") / "data" / "units.toml").read_text()
    return {name: Core(**values) for name, values in tomllib.loads(text).items()}
