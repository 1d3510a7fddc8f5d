"""The tools of the server: functions that return the most important parts of `--json` output.

Answers are short (`brief.fit`), because a client's model reads all of them. The command with
`--json` prints everything.
"""

from collections.abc import Sequence
from typing import Any

from ..checker.check import check as check_job
from ..errors import TPUKernelError
from ..hardware import PriceBook, Slice, get_chip, public_prices
from ..hardware.tables import GenerationListing
from ..job.job import Job
from ..job.reading import read_job
from ..plain_data import JsonMapping, JsonObject
from ..planner.cost.candidates import GENERATIONS
from ..planner.memory_optimizer import list_slices
from ..planner.planning import plan as find_plan
from ..runtime.environment import configure_tpu_environment
from ..runtime.flags import FlagRegistry, explain_flag, inspect_flags
from ..runtime.flags.setting import FlagListing
from ..runtime.progress import Progress, silent
from .access import Access
from .brief import fit

BULK = ("spans", "live_memory", "slice")
"""Keys of a check that hold every op and every moment, a hundred kilobytes and more, and what the
tool `slice` returns."""
MOST_FLAGS = 50
_OF_A_CHOICE = (
    *("slice", "mesh", "memory_bytes", "memory_origin", "usable_bytes", "step_time_s"),
    *("step_origin", "tokens_per_s_per_chip", "mfu", "days", "usd", "verified", "job"),
)
_OF_ANOTHER = ("slice", "mesh", "days", "usd")
_OF_A_GENERATION = ("name", "chips_per_host", "pod_chips", "torus_dims")
_FIGURES = ("peak_bf16_tflops", "hbm_usable_bytes", "hbm_gbps", "ici_link_gbps")


def plan(
    access: Access,
    model: str,
    tokens: str,
    *,
    top: int = 5,
    verify: int = 0,
    progress: Progress = silent,
    **asked: Any,
) -> JsonObject:
    """Return the main parts of `tpukit plan --json`; `asked` are further arguments of `plan`."""
    access.check_name(model)
    stated = {name: value for name, value in asked.items() if value is not None}
    stated.setdefault("on", GENERATIONS)
    found = find_plan(model, tokens=tokens, top=top, verify=verify, progress=progress, **stated)
    answer = found.to_dict()
    choices = [_some(choice, _OF_A_CHOICE) for choice in answer["choices"]]
    others = {
        name: [_some(choice, _OF_ANOTHER) for choice in answer[name]]
        for name in ("pareto_front", "unpriced")
    }
    rejected = [{**row, "slices": ", ".join(row["slices"][:4])} for row in answer["rejected"]]
    return fit({**answer, "choices": choices, **others, "rejected": rejected})


def check(
    access: Access,
    model: str,
    *,
    on: str | None = None,
    settings: JsonObject | None = None,
    memory_only: bool = False,
    fix: bool = False,
    whole: bool = False,
    progress: Progress = silent,
) -> JsonObject:
    """Return the output of `tpukit check --json`: all of it with `whole`, else its main parts.

    Args:
        access: Permissions of the client.
        model: A preset, a config.json, or the path of a job file.
        on: The slice; it overrides the job's.
        settings: Keys of the job.
        memory_only: Whether to stop after the memory report.
        fix: Whether to prove fixes.
        whole: Whether to return every op and live memory over time too.
        progress: Called with each stage as it is reached.
    """
    access.check_name(model)
    job = read_job(model, {**(settings or {}), **({} if on is None else {"on": on})})
    access.check_name(str(job.model))  # a job file may name code, too
    configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
    found = check_job(job, memory_only=memory_only, fix=fix, progress=progress).to_dict()
    if whole:
        return found
    kept = {key: value for key, value in found.items() if key not in BULK}
    kept["memory"] = {key: value for key, value in found["memory"].items() if key != "curve"}
    return fit(kept)


def kernels() -> JsonObject:
    """Return the output of `tpukit kernel list --json`, with cases by name only."""
    configure_tpu_environment()
    from ..kernels.registry.registry import OpListing

    listed = OpListing.from_registry().to_dict()
    return fit(
        {
            name: {**op, "cases": ", ".join(case["name"] for case in op["cases"])}
            for name, op in listed.items()
        }
    )


def kernel(
    op: str,
    on: str,
    *,
    case: str | None = None,
    backward: bool = False,
    progress: Progress = silent,
) -> JsonObject:
    """Return the output of `tpukit kernel bench --json` for one case, by default the first."""
    configure_tpu_environment()
    from ..kernels.registry.registry import get_tpu_op
    from ..kernels.timing import bench_op

    found = get_tpu_op(op)
    if case is None and not found.cases:
        raise TPUKernelError(f"{op} has no cases of its own; time it with tpukit kernel bench.")
    benched = bench_op(
        found,
        [get_chip(part.strip()).name for part in on.split(",")],
        cases=[found.cases[0] if case is None else found.case(case)],
        direction="backward" if backward else "forward",
        progress=progress,
    )
    return fit(benched.to_dict())


def slices(generation: str | None = None) -> JsonObject:
    """Return the generations with their main figures, or one generation with its slices."""
    book = public_prices()
    if generation is None:
        return fit({"generations": [_generation(row) for row in _generations(book)]})
    chip = get_chip(generation)
    if chip.rules is None:
        return fit(chip.to_dict())
    listed = list_slices(chip.name, book).to_dict()
    rows: list[JsonObject] = listed["slices"]
    return fit(
        {
            "generation": _generation(listed["generation"]),
            "usd_per_hour_origin": rows[0]["usd_per_hour"].get("origin"),
            "slices": [_line(row) for row in rows],
        }
    )


def slice_info(name: str) -> JsonObject:
    """Return the output of `tpukit slice --json`."""
    return fit(Slice.parse(name).to_dict())


def check_flags(flags: str) -> JsonObject:
    """Return the output of `tpukit flags check --json`."""
    return fit(inspect_flags(flags, registry=FlagRegistry.installed()).to_dict())


def flag(name: str) -> JsonObject:
    """Return the output of `tpukit flags explain --json`."""
    found = explain_flag(name.partition("=")[0], registry=FlagRegistry.installed())
    return fit(found.to_dict())


def flags(pattern: str) -> JsonObject:
    """Return the output of `tpukit flags list --json`, for the first matches."""
    registry = FlagRegistry.installed()
    found = registry.search(pattern, parser=None)
    listed = dict(FlagListing(tuple(found[:MOST_FLAGS]), registry.described).to_dict())
    return fit({**listed, "matching": len(found)})


def write_job(access: Access, name: str, job: JsonObject) -> JsonObject:
    """Write a job, such as a choice of a plan, as a job file, and return its path and content."""
    path = access.place(name)
    made = Job.from_dict(job)
    made.to_yaml(path)
    return {"path": str(path), "job": made.to_dict(), "next_command": f"tpukit check {path}"}


def _some(row: JsonMapping, names: Sequence[str]) -> JsonObject:
    return {name: row[name] for name in names if name in row}


def _generations(book: PriceBook) -> list[JsonObject]:
    return GenerationListing.of(book).to_dict()["generations"]


def _generation(row: JsonMapping) -> JsonObject:
    return {**_some(row, _OF_A_GENERATION), **_some(row["figures"], _FIGURES)}


def _line(row: JsonMapping) -> str:
    price = row["usd_per_hour"]["value"]
    paid = "no price" if price is None else f"{price:.2f} USD/h"
    shape = "x".join(map(str, row["topology"]))
    return f"{row['name']}: {row['chips']} chips, {shape}, {row['hosts']} hosts, {paid}"
