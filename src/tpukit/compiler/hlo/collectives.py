"""Collectives of a program: their kind, their groups of devices, and their bytes."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from .module import Computation, HloModule, Instruction
from .shape import reads_program

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
MOST_DEVICES = 1 << 20  # the largest slice has 9,216 chips
_RAGGED = "ragged-"
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:,? ?device_ids=\[?[^\]]*\]?)? ?\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'(\w+)'=(\d+)")
_USED_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]*\}(?:,\s*\{[\d,]*\})*)\}")


@dataclass(frozen=True)
class Collective:
    """One collective, as the network sees it.

    Attributes:
        kind: One of `KINDS`; an all-reduce whose result is sliced at once is a reduce-scatter.
        groups: Devices of each group; source and target for a permute.
        bytes: Size of the whole (gathered, reduced or exchanged) array on one device.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    bytes: int
    name: str

    @property
    def group_size(self) -> int:
        """Devices per group."""
        return len(self.groups[0]) if self.groups else 1


@reads_program
def find_collective(
    instruction: Instruction, parent: Computation, module: HloModule
) -> Collective | None:
    """Return the collective that an instruction performs or starts, also inside its callees."""
    kind = kind_of(instruction.opcode)
    if kind is not None:
        return _describe(instruction, kind, parent, module, scattered=False)
    if not instruction.called:
        return None
    for computation in module.called_by(instruction):
        for inner in computation:
            kind = kind_of(inner.opcode)
            if kind is None:
                deeper = find_collective(inner, computation, module) if inner.called else None
                if deeper is not None:
                    return deeper
                continue
            # The TPU compiler fuses an all-reduce with the slice of its result that is kept.
            scattered = kind == "all-reduce" and computation.name.startswith("all-reduce-scatter")
            return _describe(inner, kind, computation, module, scattered=scattered)
    return None


@reads_program
def count_collectives(module: HloModule) -> dict[str, int]:
    """Count the collectives by kind; a loop's body counts once.

    Between slices the compiler turns a collective into send and recv over the data-centre network,
    which count as "dcn-send".
    """
    counts: Counter[str] = Counter()

    def visit(computation: Computation) -> None:
        for instruction in computation:
            if instruction.opcode in ("while", "conditional", "call"):
                for called in module.called_by(instruction):
                    visit(called)
            elif instruction.opcode == "send" and "megascale" in instruction.attributes:
                counts["dcn-send"] += 1
            elif not instruction.opcode.endswith(("-done", "-update")):
                found = find_collective(instruction, computation, module)
                if found is not None:
                    counts[found.kind] += 1

    visit(module.entry)
    return dict(counts)


def kind_of(opcode: str) -> str | None:
    """Return the kind of collective that an opcode is or starts, or None."""
    plain = opcode.removesuffix("-start").removeprefix(_RAGGED)
    return plain if plain in KINDS else None


def _describe(
    instruction: Instruction,
    kind: str,
    parent: Computation,
    module: HloModule,
    *,
    scattered: bool,
) -> Collective:
    groups = parse_groups(instruction.attributes, module.num_partitions)
    shapes = [shape for shape in instruction.shapes if shape.elements > 1] or instruction.shapes
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        # The start carries its operand and its result: the larger one is the whole array.
        size = max(shape.bytes for shape in shapes)
    elif instruction.opcode.startswith(_RAGGED):
        # How much is exchanged, only the run knows. One side holds a device's own rows; the other
        # has room for everybody's.
        own = parent.by_name[instruction.operands[0]].shapes[0]
        size = min(own.bytes, shapes[0].bytes)
    else:
        size = sum(shape.bytes for shape in shapes)
    if kind == "reduce-scatter":
        size *= len(groups[0]) if groups else 1
    kind = "reduce-scatter" if scattered else kind
    return Collective(kind, groups, size, instruction.name)


@lru_cache(maxsize=4096)
@reads_program
def parse_groups(attributes: str, num_partitions: int) -> tuple[tuple[int, ...], ...]:
    """Parse groups of devices in any notation; without groups, all devices form one."""
    if found := _IOTA.search(attributes):
        shape = _numbers(found[1])
        source = _numbers(found[2])
        order = _numbers(found[3]) if found[3] else list(range(len(source)))
        ids = np.arange(_checked(source)).reshape(source).transpose(order).reshape(shape[0], -1)
        return _as_tuples(ids)
    if found := _MESH.search(attributes):
        return _mesh_groups(found[1], found[2])
    if found := _LISTED.search(attributes):
        return tuple(
            tuple(_numbers(group)) for group in re.findall(r"\{([\d,]*)\}", found[1]) if group
        )
    return (tuple(range(_checked([num_partitions]))),)


def _mesh_groups(mesh: str, used: str) -> tuple[tuple[int, ...], ...]:
    """Parse groups along named mesh axes; `'a':(2)4` is a part of size 4 after one of size 2."""
    names: list[str] = []
    sizes: list[int] = []
    parts = {name: (before, size) for name, before, size in _USED_AXIS.findall(used)}
    chosen: list[int] = []
    for name, text in _MESH_AXIS.findall(mesh):
        size = int(text)
        before, part = parts.get(name, ("", ""))
        pieces = [size]
        if part:
            outer = int(before)
            pieces = [outer, int(part), size // (outer * int(part))]
        if name in parts:
            chosen.append(len(sizes) + (1 if part else 0))
        names.append(name)
        sizes.extend(pieces)
    rest = [axis for axis in range(len(sizes)) if axis not in chosen]
    ids = np.arange(_checked(sizes)).reshape(sizes).transpose([*rest, *chosen])
    return _as_tuples(ids.reshape(-1, prod(sizes[axis] for axis in chosen)))


def _checked(sizes: list[int]) -> int:
    """Return the number of devices that a program is for."""
    if (devices := prod(sizes)) > MOST_DEVICES:
        raise ValueError(f"it is for {devices} devices, and at most {MOST_DEVICES:,} are read")
    return devices


def _as_tuples(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(member) for member in group) for group in ids)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
