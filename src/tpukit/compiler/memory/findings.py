"""Arguments that cost memory for nothing: not donated, or whole on every device."""

from collections import Counter
from collections.abc import Sequence
from math import prod

from ..hlo.shape import HBM
from ..program.lowered import ProgramFacts
from .assignment import BufferAllocation
from .report import ArgumentFinding

# Below this share of what the arguments take, a finding is noise.
_LARGE_SHARE = 0.01
_LARGE_BYTES = 2**20


def find_waste(
    allocations: Sequence[BufferAllocation], facts: ProgramFacts
) -> tuple[ArgumentFinding, ...]:
    """Donation mistakes and large replicated arguments, the most expensive first."""
    arguments = [
        one
        for one in allocations
        if one.parameter is not None and one.parameter < len(facts.argument_names)
    ]
    arguments = [one for one in arguments if one.color == HBM]
    least = max(_LARGE_BYTES, _LARGE_SHARE * sum(one.size_bytes for one in arguments))
    found = [
        *_not_donated(allocations, arguments, facts, least),
        *_replicated(arguments, facts, least),
    ]
    return tuple(sorted(found, key=lambda one: -one.size_bytes))


def _not_donated(
    allocations: Sequence[BufferAllocation],
    arguments: Sequence[BufferAllocation],
    facts: ProgramFacts,
    least: float,
) -> list[ArgumentFinding]:
    results = Counter(
        str(one.values[-1].shape)
        for one in allocations
        if one.is_live_out and one.parameter is None and not one.is_output_table and one.values
    )
    found: list[ArgumentFinding] = []
    for one in arguments:
        shape = str(one.values[0].shape) if one.values else ""
        number = one.parameter or 0
        if number in facts.donated or one.size_bytes < least or not results[shape]:
            continue
        results[shape] -= 1
        name = facts.argument_names[number]
        found.append(
            ArgumentFinding(
                kind="not donated",
                what=f"{name} {shape}",
                size_bytes=one.size_bytes,
                advice=f"a result has the same shape and could reuse it; donate {name}.",
            )
        )
    return found


def _replicated(
    arguments: Sequence[BufferAllocation], facts: ProgramFacts, least: float
) -> list[ArgumentFinding]:
    devices = prod(size for _, size in facts.mesh_axes)
    found: list[ArgumentFinding] = []
    for one in arguments:
        number = one.parameter or 0
        if devices > 1 and facts.argument_copies[number] == devices and one.size_bytes >= least:
            name = facts.argument_names[number]
            shape = one.values[0].shape if one.values else ""
            found.append(
                ArgumentFinding(
                    kind="replicated",
                    what=f"{name} {shape}",
                    size_bytes=one.size_bytes,
                    advice=f"all {devices} devices hold the whole of it; split it over an axis.",
                )
            )
    return found
