"""What to do about what bounds a program: sentences with the figure behind each."""

from collections.abc import Iterator
from dataclasses import dataclass

from ...hardware.figure import flops_text, seconds_text
from .analysis import BottleneckAnalysis, OpShare
from .findings import ProfileFinding
from .judging import COMMUNICATION, COMPUTE, INPUT, MEMORY, OVERHEAD

# From these shares of the time on, something is worth a word.
WORTH = {INPUT: 0.10, COMMUNICATION: 0.10, MEMORY: 0.35, OVERHEAD: 0.15, COMPUTE: 0.50}
UNFUSED, COPIES = 0.05, 0.03
_WAYS = {
    "all-reduce": "accumulate gradients over micro-batches, or scatter them (FSDP)",
    "all-gather": "gather larger pieces less often, or keep the weights whole on each device",
    "reduce-scatter": "accumulate gradients over micro-batches",
    "all-to-all": "route tokens inside a host first, or place the experts anew",
    "collective-permute": "give the ring larger blocks",
}


@dataclass(frozen=True)
class _Advice:
    weight: float
    words: str


def recommend(analysis: BottleneckAnalysis) -> list[str]:
    """Recommendations for an analysis, the costliest first."""
    advice = [*_by_share(analysis), *_by_finding(analysis)]
    return [one.words for one in sorted(advice, key=lambda one: -one.weight)]


def _by_share(analysis: BottleneckAnalysis) -> Iterator[_Advice]:
    for kind, least in WORTH.items():
        share = analysis.shares[kind]
        if share >= least:
            cost = f"{share:.0%} of {seconds_text(analysis.duration_s)} ({analysis.origin})"
            yield _Advice(share, _SENTENCES[kind](analysis, cost))


def _of_input(analysis: BottleneckAnalysis, cost: str) -> str:
    waits = analysis.findings.waits
    where = f", most of it in {waits[0].where}" if waits and waits[0].where else ""
    return (
        f"Devices wait for the host {cost}{where}: prepare batches in other threads or processes "
        "while the step runs (open_data does), and copy the next batch before it is needed."
    )


def _of_communication(analysis: BottleneckAnalysis, cost: str) -> str:
    heaviest = _heaviest(analysis, COMMUNICATION)
    named, way = "", "raise the batch per device, or search options that overlap it (flags tune)"
    if heaviest is not None:
        named = f", most of it in {heaviest.name} ({heaviest.where}, {_seconds(heaviest)})"
        known = f"{heaviest.opcode} {heaviest.name}"
        way = next((words for kind, words in _WAYS.items() if kind in known), way)
    return (
        f"Devices wait for each other {cost}{named}: {way}, or try another mesh "
        "(tpukit check --mesh)."
    )


def _of_memory(analysis: BottleneckAnalysis, cost: str) -> str:
    heaviest = _heaviest(analysis, MEMORY)
    named = ""
    if heaviest is not None:
        named = f", most of it in {heaviest.name} ({heaviest.where}, {_seconds(heaviest)})"
    return (
        f"The device's memory bounds {cost}{named}: keep activations in bfloat16, fuse what reads "
        "the same arrays, use kernels for attention, norms and cross-entropy, and raise the batch "
        "so that weights are read less often."
    )


def _of_overhead(analysis: BottleneckAnalysis, cost: str) -> str:
    runs = sum(op.times for op in analysis.ops)
    length = sum(op.seconds for op in analysis.ops) / runs if runs else 0.0
    small = f"; the {runs:,} runs of its heaviest ops last {seconds_text(length)} on average"
    return (
        f"Starting programs and ops takes {cost}{small if runs else ''}: call one jitted function "
        "a step, let one scan hold all layers, and raise the batch."
    )


def _of_compute(analysis: BottleneckAnalysis, cost: str) -> str:
    heaviest = _heaviest(analysis, COMPUTE)
    named = ""
    if heaviest is not None:
        rate = (
            (heaviest.flops or 0.0) * heaviest.times / heaviest.seconds if heaviest.seconds else 0
        )
        speed = f", {flops_text(rate)}/s on one device" if rate else ""
        named = f", most of it in {heaviest.name} ({heaviest.where}, {_seconds(heaviest)}{speed})"
    return (
        f"Arithmetic bounds {cost}{named}: that is what the device is for. Narrower formats "
        "(bfloat16, int8 products), less recomputing or more devices take less time."
    )


_SENTENCES = {
    INPUT: _of_input,
    COMMUNICATION: _of_communication,
    MEMORY: _of_memory,
    OVERHEAD: _of_overhead,
    COMPUTE: _of_compute,
}


def _by_finding(analysis: BottleneckAnalysis) -> Iterator[_Advice]:
    whole = analysis.duration_s * analysis.devices
    unfused = sum(one.seconds for one in analysis.findings.unfused)
    if unfused > UNFUSED * whole:
        share = unfused / whole
        yield _Advice(
            share,
            f"{len(analysis.findings.unfused)} ops run unfused for {share:.0%} of the time "
            f"({analysis.origin}), first {_named(analysis.findings.unfused[0])}: keep elementwise "
            "work and changes of layout in one jitted function beside what they feed.",
        )
    # What the host spends on copies delays one device after another, so one window counts. A call
    # that copies a result waits for it first: as long as the device is busy, that costs nothing.
    copies = sum(one.seconds for one in analysis.findings.transfers)
    share = min(copies / analysis.duration_s, analysis.shares[INPUT])
    if share > COPIES:
        yield _Advice(
            share,
            f"Copies between host and device take {seconds_text(copies)} ({analysis.origin}), "
            f"first {_named(analysis.findings.transfers[0])}: keep arrays on the device, read "
            "metrics a step late, and donate what is not needed any more.",
        )
    if analysis.compile_s > 0:
        yield _Advice(
            0.0,
            f"{seconds_text(analysis.compile_s)} of compiling lie in the profile and are not "
            "counted: call the function once before the profiled block, and keep shapes the same.",
        )


def _heaviest(analysis: BottleneckAnalysis, kind: str) -> OpShare | None:
    return next((op for op in analysis.ops if op.kind == kind), None)


def _seconds(op: OpShare) -> str:
    return f"{seconds_text(op.seconds)} in {op.times:,} run{'s' * (op.times != 1)}"


def _named(finding: ProfileFinding) -> str:
    return f"{finding} ({seconds_text(finding.seconds)} in {finding.times:,})"
