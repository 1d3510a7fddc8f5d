"""What a report holds, as plain data: the one input of every file, page and comparison.

`build_report` fills it from a check; `read_report` reads it back from JSON. Every part may be
missing. A part that is missing for a reason says so in the `no_…` key beside it.
"""

from typing import Any, Literal

from typing_extensions import TypedDict  # typing's own cannot be checked before Python 3.12

SCHEMA = "tpukit.report/1"
"""Raise the number when a key changes its meaning; a new key is no such change."""


class FigureData(TypedDict, total=False):
    """A number with its provenance, as `hardware.Figure.to_dict` gives it."""

    value: float | None
    unit: str
    origin: str
    source: str
    date: str
    reason: str


class ChipData(TypedDict):
    """The roofs of one device."""

    name: str
    peak_bf16_tflops: FigureData
    hbm_gbps: FigureData


class CollectiveData(TypedDict):
    """Collectives of one kind among equally many devices that move equally much.

    Attributes:
        kind: "all-gather", "all-reduce", …
        group_size: Devices that take part together.
        bytes: Size of the whole array on one device, for one of them.
        times: How many run in a step, loops counted.
        seconds: Of all of them together, hidden or not.
        exposed_s: Of that, what the core waits for.
        op_name: Where in the user's program the largest comes from.
    """

    kind: str
    group_size: int
    bytes: int
    times: int
    seconds: float
    exposed_s: float
    op_name: str


class Report(TypedDict, total=False):
    """A check as plain data.

    Attributes:
        schema: `SCHEMA`.
        verdict: What the compiler said of the memory.
        program: Name of the function or model.
        job: What was asked for; None for a bare function.
        slice: `Slice.to_dict()`.
        chip: The roofs of one device.
        memory: `MemoryReport.to_dict()`.
        live_memory: (seconds, bytes of HBM) over one step, a loop's body once.
        prediction: `StepPrediction.to_dict()`, or None with `no_prediction`.
        spans: `Span.to_dict()` of all that runs in a step, a loop's body once.
        collectives: Where the communication is.
        compile: How it was made: compile_s, stage, from_cache, flops_per_device, code_bytes.
        versions: Of jax, jaxlib and libtpu.
        options: Compiler options that were set.
        fixes: `Fix.to_dict()` each, the best first; None when none were looked for.
        next: The command to run next.
    """

    schema: str
    verdict: Literal["fits", "does not fit"]
    program: str
    job: dict[str, Any] | None
    slice: dict[str, Any]
    chip: ChipData
    memory: dict[str, Any] | None
    live_memory: list[list[float]]
    prediction: dict[str, Any] | None
    no_prediction: str
    spans: list[dict[str, Any]]
    collectives: list[CollectiveData]
    compile: dict[str, Any]
    versions: dict[str, str]
    options: dict[str, Any]
    fixes: list[dict[str, Any]] | None
    next: str
