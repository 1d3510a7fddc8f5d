"""Report the collectives of a step: bytes, time, and how long the core waits for them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...compiler.hlo import Collective, Computation, HloModule, Instruction, find_collective
from ...compiler.timeline import Network, TrackSpan
from ...compiler.timeline.machine import work_of
from .schema import CollectiveData

# A "done" instruction reaches its "start" through these opcodes.
_PASS_ON = ("get-tuple-element", "bitcast", "tuple", "fusion", "opt-barrier")
_NETWORKS = ("ici", "dcn")
_BETWEEN_SLICES = ("send", "recv")
_HOPS = 64


@dataclass(frozen=True)
class _Started:
    """A collective in the program.

    Attributes:
        seconds: Time of the transfer alone; None if only the simulation has it.
        product_s: Time of the matmul that is fused with it.
    """

    collective: Collective
    seconds: float | None
    product_s: float


@dataclass
class _CollectiveRow:
    times: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0
    op_names: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def collective_rows(
    module: HloModule, spans: Sequence[TrackSpan], network: Network
) -> list[CollectiveData]:
    """Return the program's collectives with their times from the simulation.

    Collectives of the same kind, group size and array size share a row; the row with the longest
    wait comes first.
    """
    found, waits = _find(module, network, {span.name for span in spans})
    rows: defaultdict[tuple[str, int, int], _CollectiveRow] = defaultdict(_CollectiveRow)
    for span in spans:
        started = found.get(span.name)
        if started is not None:
            row = _row(rows, started)
            seconds = span.duration_s if started.seconds is None else started.seconds
            row.times += span.times
            row.seconds += seconds * span.times
            row.op_names[span.op_name] += seconds * span.times
            if span.track == "core":  # nothing else runs meanwhile but what is fused with it
                row.exposed_s += max(0.0, span.duration_s - started.product_s) * span.times
        elif span.track == "core" and span.cause in _NETWORKS and span.name in waits:
            _row(rows, found[waits[span.name]]).exposed_s += span.duration_s * span.times
    return [
        {
            "kind": kind,
            "group_size": group_size,
            "bytes": amount,
            "times": row.times,
            "seconds": row.seconds,
            "exposed_s": row.exposed_s,
            "op_name": max(row.op_names, key=lambda name: row.op_names[name], default=""),
        }
        for (kind, group_size, amount), row in sorted(
            rows.items(), key=lambda item: (-item[1].exposed_s, -item[1].seconds, item[0])
        )
    ]


def _row(rows: Mapping[tuple[str, int, int], _CollectiveRow], started: _Started) -> _CollectiveRow:
    one = started.collective
    return rows[one.kind, one.group_size, one.bytes]


def _find(
    module: HloModule, network: Network, simulated: set[str]
) -> tuple[dict[str, _Started], dict[str, str]]:
    """Return collectives by their start instruction, and the start that each "done" waits for."""
    found: dict[str, _Started] = {}
    waits: dict[str, str] = {}
    for computation in module.computations.values():
        for instruction in computation:
            if instruction.name not in simulated or instruction.opcode == "while":
                continue
            if not instruction.opcode.endswith("-done"):
                started = _started(instruction, computation, module, network)
                if started is not None:
                    found[instruction.name] = started
                    continue
            start = _start_of(instruction, computation, found)
            if start is not None:
                waits[instruction.name] = start
    return found, waits


def _started(
    instruction: Instruction, computation: Computation, module: HloModule, network: Network
) -> _Started | None:
    if instruction.opcode in _BETWEEN_SLICES:
        moved = max((shape.bytes for shape in instruction.shapes), default=0)
        slices = tuple(range(len(set(network.slices))))
        name = instruction.name
        return _Started(Collective(f"dcn-{instruction.opcode}", (slices,), moved, name), None, 0.0)
    collective = find_collective(instruction, computation, module)
    if collective is None:
        return None
    products = work_of(instruction, computation, module).products if instruction.called else ()
    return _Started(
        collective, network.transfer(collective).seconds, network.machine.matrix_s(products)
    )


def _start_of(
    done: Instruction, computation: Computation, found: Mapping[str, _Started]
) -> str | None:
    seen: set[str] = set()
    ahead = list(done.operands)
    while ahead and len(seen) < _HOPS:
        name = ahead.pop(0)
        if name in found:
            return name
        instruction = computation.by_name.get(name)
        if name in seen or instruction is None:
            continue
        seen.add(name)
        if instruction.opcode in _PASS_ON or instruction.opcode.endswith("-update"):
            ahead += instruction.operands
    return None
