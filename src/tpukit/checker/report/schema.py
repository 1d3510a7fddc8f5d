"""`Report`: a check as plain data, and how it is read back from a file.

Files, pages and comparisons all take a report. `build_report` makes one from a check, and
`read_report` reads one from JSON. Any part may be missing; a `no_…` key then has the reason.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Literal, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # typing's own cannot be checked before Python 3.12

from ...compiler.timeline import TrackSpan
from ...errors import TPUValidationError
from ...job.hidden import hide_in_object
from ...plain_data import JsonMapping, JsonObject, damaged_as, read_json

SCHEMA = "tpukit.report/1"
"""Raise the number when a key changes its meaning; a new key is no such change."""
reads_report = damaged_as(TPUValidationError, "the report is damaged ({}); run the check again.")
_MAKE_ONE = "make one with `tpukit check … --json > report.json`."


class FigureData(TypedDict, total=False):
    """A number with its origin, as `hardware.Figure.to_dict` returns it."""

    value: float | None
    unit: str
    origin: str
    source: str
    date: str
    reason: str


class ChipData(TypedDict):
    """Peak compute and memory bandwidth of one device."""

    name: str
    peak_bf16_tflops: FigureData
    hbm_gbps: FigureData


class CollectiveData(TypedDict):
    """Collectives with the same kind, group size and array size.

    Attributes:
        kind: "all-gather", "all-reduce", …
        group_size: Devices per group.
        bytes: Size of the array on one device, per collective.
        times: Collectives per step, with loop iterations counted.
        seconds: Transfer time of all of them, hidden or not.
        exposed_s: Part of that time during which the core waits.
        op_name: Op name of the largest in the user's program.
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
        verdict: Whether the program fits.
        program: Name of the function or model.
        job: The job; None for a bare function.
        slice: `Slice.to_dict()`.
        chip: Peaks of one device.
        memory: `MemoryReport.to_dict()`.
        host_memory: `HostMemory.to_dict()`; None for a bare function.
        live_memory: (seconds, bytes of HBM) over one step, with loop bodies once.
        prediction: `StepPrediction.to_dict()`, or None with `no_prediction`.
        spans: `TrackSpan.to_dict()` of everything that runs in a step, with loop bodies once.
        collectives: The collectives of a step.
        compile: Facts on the compile: compile_s, stage, from_cache, flops_per_device, code_bytes.
        operations: Number of fusions, kernels, loops and copies, with loop bodies once.
        versions: Versions of jax, jaxlib and libtpu.
        options: Compiler options that were set.
        capture: Command, programs and findings of a captured program; see `capture_facts`.
        fixes: `Fix.to_dict()` of each, the best first; None if none were searched.
        next: The command to run next.
    """

    schema: str
    verdict: Literal["fits", "does not fit"]
    program: str
    job: JsonObject | None
    slice: JsonObject
    chip: ChipData
    memory: JsonObject | None
    host_memory: JsonObject | None
    live_memory: list[list[float]]
    prediction: JsonObject | None
    no_prediction: str
    spans: list[JsonObject]
    collectives: list[CollectiveData]
    compile: JsonObject
    operations: dict[str, int]
    versions: dict[str, str]
    options: JsonObject
    capture: JsonObject
    fixes: list[JsonObject] | None
    next: str


def read_report(path: Path) -> Report:
    """Read the output of `tpukit check --json`.

    Raises:
        TPUValidationError: The file cannot be read, is not a report, or has another version.
    """
    try:
        data = read_json(path, object_hook=hide_in_object)
    except OSError as error:
        raise TPUValidationError(f"{path} cannot be read ({error.strerror}); {_MAKE_ONE}") from None
    except ValueError as error:
        raise TPUValidationError(f"{path} is not JSON ({error}); {_MAKE_ONE}") from None
    return as_report(data, name=str(path))


def as_report(data: object, *, name: str = "the report") -> Report:
    """Return plain data as a `Report` after validation."""
    if not isinstance(data, Mapping) or "schema" not in data:
        raise TPUValidationError(f"{name} is JSON but no report of a check; {_MAKE_ONE}")
    found = cast("JsonMapping", data)
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


def step_title(report: Report) -> str:
    """Return the title of a report's step in a trace."""
    target = (report.get("slice") or {}).get("name", "an unnamed slice")
    return f"{report.get('program', 'program')} on {target}, one device, predicted"


def spans_of(report: Report) -> tuple[TrackSpan, ...]:
    """Return the spans of a report as objects; empty without a prediction."""
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
