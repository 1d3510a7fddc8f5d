"""What a report holds, as plain data, and how it is read back from a file.

It is the one input of every file, page and comparison. `build_report` fills it from a check;
`read_report` reads it back from JSON. Every part may be missing. A part that is missing for a
reason says so in the `no_…` key beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # typing's own cannot be checked before Python 3.12

from ...compiler.timeline import TrackSpan
from ...errors import TPUValidationError
from ...job.hidden import hide_in_object
from ...plain_data import damaged_as, read_json

SCHEMA = "tpukit.report/1"
"""Raise the number when a key changes its meaning; a new key is no such change."""
reads_report = damaged_as(TPUValidationError, "the report is damaged ({}); run the check again.")
_MAKE_ONE = "make one with `tpukit check … --json > report.json`."


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
        host_memory: `HostMemory.to_dict()`; None for a bare function.
        live_memory: (seconds, bytes of HBM) over one step, a loop's body once.
        prediction: `StepPrediction.to_dict()`, or None with `no_prediction`.
        spans: `TrackSpan.to_dict()` of all that runs in a step, a loop's body once.
        collectives: Where the communication is.
        compile: How it was made: compile_s, stage, from_cache, flops_per_device, code_bytes.
        operations: How many fusions, kernels, loops and copies the program has, a loop's body once.
        versions: Of jax, jaxlib and libtpu.
        options: Compiler options that were set.
        capture: Of a captured program: its command, programs and findings; see `capture_facts`.
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
    host_memory: dict[str, Any] | None
    live_memory: list[list[float]]
    prediction: dict[str, Any] | None
    no_prediction: str
    spans: list[dict[str, Any]]
    collectives: list[CollectiveData]
    compile: dict[str, Any]
    operations: dict[str, int]
    versions: dict[str, str]
    options: dict[str, Any]
    capture: dict[str, Any]
    fixes: list[dict[str, Any]] | None
    next: str


def read_report(path: Path) -> Report:
    """Read what `tpukit check --json` wrote.

    Raises:
        TPUValidationError: The file cannot be read, is no report, or is of another version.
    """
    try:
        data = read_json(path, object_hook=hide_in_object)
    except OSError as error:
        raise TPUValidationError(f"{path} cannot be read ({error.strerror}); {_MAKE_ONE}") from None
    except ValueError as error:
        raise TPUValidationError(f"{path} is not JSON ({error}); {_MAKE_ONE}") from None
    return as_report(data, name=str(path))


def as_report(data: object, *, name: str = "the report") -> Report:
    """Accept plain data as a report, or say why it is none."""
    if not isinstance(data, Mapping) or "schema" not in data:
        raise TPUValidationError(f"{name} is JSON but no report of a check; {_MAKE_ONE}")
    found = cast("Mapping[str, Any]", data)
    if found["schema"] != SCHEMA:
        raise TPUValidationError(
            f"{name} has the format {found['schema']!r} and this tpukit reads {SCHEMA!r}; "
            "run the check again with the version that reads it."
        )
    try:
        TypeAdapter(Report).validate_python(found)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise TPUValidationError(
            f"{name} is damaged: {where} is {problem['input']!r:.60}; {_MAKE_ONE}"
        ) from None
    return cast("Report", dict(found))


@dataclass(frozen=True)
class RecordedStep:
    """A predicted step as a report remembers it: enough for a trace."""

    name: str
    spans: tuple[TrackSpan, ...]

    @classmethod
    def of(cls, report: Report) -> "RecordedStep":
        """The step of a report; without spans where there was no prediction."""
        target = (report.get("slice") or {}).get("name", "an unnamed slice")
        name = f"{report.get('program', 'program')} on {target}, one device, predicted"
        return cls(name, spans_of(report))


def spans_of(report: Report) -> tuple[TrackSpan, ...]:
    """The spans of a report as objects, in their order."""
    known = {entry.name for entry in fields(TrackSpan)}
    try:
        return tuple(
            TrackSpan(**{name: value for name, value in entry.items() if name in known})
            for entry in report.get("spans") or ()
        )
    except (TypeError, AttributeError) as error:
        raise TPUValidationError(
            f"a span of the report lacks what every span has ({error}); run the check again."
        ) from None
