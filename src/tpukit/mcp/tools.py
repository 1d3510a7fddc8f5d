"""The tools: plain functions over the public ones, each returning what `--json` prints."""

from typing import Any

from ..checker.check import check as check_job
from ..errors import TPUKernelError
from ..hardware import Slice, get_chip, public_prices
from ..hardware.listings import GenerationListing
from ..job.job import Job
from ..job.reading import read_job
from ..planner.planning import plan as find_plan
from ..planner.search.candidates import GENERATIONS
from ..planner.sizing.largest_preset import list_slices
from ..runtime.environment import configure_tpu_environment
from ..runtime.flags import FlagRegistry, explain_flag, inspect_flags
from ..runtime.flags.record import FlagListing
from ..runtime.progress import Progress, silent
from .access import Access

BULK = ("spans", "live_memory")
"""Keys of a check that hold every op and every moment: a hundred kilobytes and more."""
MOST_FLAGS = 50


def plan(
    access: Access,
    model: str,
    tokens: str,
    *,
    top: int = 5,
    verify: int = 0,
    progress: Progress = silent,
    **asked: Any,
) -> dict[str, Any]:
    """Return what `tpukit plan --json` prints; `asked` is anything else that `plan` takes."""
    access.check_name(model)
    stated = {name: value for name, value in asked.items() if value is not None}
    stated.setdefault("on", GENERATIONS)
    found = find_plan(model, tokens=tokens, top=top, verify=verify, progress=progress, **stated)
    return found.to_dict()


def check(
    access: Access,
    target: str,
    *,
    on: str | None = None,
    settings: dict[str, Any] | None = None,
    memory_only: bool = False,
    fix: bool = False,
    whole: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return what `tpukit check --json` prints.

    Without `whole` the keys of `BULK` are left out, and named in `left_out`.
    """
    access.check_name(target)
    job = read_job(target, {**(settings or {}), **({} if on is None else {"on": on})})
    access.check_name(str(job.model))  # a job file may name code, too
    configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
    found = check_job(job, memory_only=memory_only, fix=fix, progress=progress).to_dict()
    if whole:
        return found
    kept = {key: value for key, value in found.items() if key not in BULK}
    return {**kept, "left_out": [key for key in BULK if key in found]}


def kernels() -> dict[str, Any]:
    """Return what `tpukit kernel list --json` prints."""
    configure_tpu_environment()
    from ..kernels.registry.listing import OpListing

    return OpListing.of_registry().to_dict()


def kernel(
    op: str,
    on: str,
    *,
    case: str | None = None,
    backward: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Return what `tpukit kernel bench --json` prints, of one case: the first by default."""
    configure_tpu_environment()
    from ..kernels.registry.registry import get_tpu_op
    from ..kernels.timing import bench_op

    found = get_tpu_op(op)
    if case is None and not found.cases:
        raise TPUKernelError(f"{op} has no cases of its own; time it with tpukit kernel bench.")
    return bench_op(
        found,
        [get_chip(part.strip()).name for part in on.split(",")],
        cases=[found.cases[0] if case is None else found.case(case)],
        direction="backward" if backward else "forward",
        progress=progress,
    ).to_dict()


def slices(generation: str | None = None) -> dict[str, Any]:
    """Return what `tpukit slices --json` prints."""
    book = public_prices()
    if generation is None:
        return dict(GenerationListing.of(book).to_dict())
    chip = get_chip(generation)
    return dict((chip if chip.rules is None else list_slices(chip.name, book)).to_dict())


def slice_info(name: str) -> dict[str, Any]:
    """Return what `tpukit slice --json` prints."""
    return dict(Slice.parse(name).to_dict())


def check_flags(flags: str) -> dict[str, Any]:
    """Return what `tpukit flags check --json` prints."""
    return dict(inspect_flags(flags, registry=FlagRegistry.installed()).to_dict())


def flag(name: str) -> dict[str, Any]:
    """Return what `tpukit flags explain --json` prints."""
    found = explain_flag(name.partition("=")[0], registry=FlagRegistry.installed())
    return dict(found.to_dict())


def flags(pattern: str) -> dict[str, Any]:
    """Return what `tpukit flags list --json` prints, of the first that match."""
    registry = FlagRegistry.installed()
    found = registry.search(pattern, parser=None)
    listed = dict(FlagListing(tuple(found[:MOST_FLAGS]), registry.described).to_dict())
    return {**listed, "matching": len(found)}


def write_job(access: Access, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Write a job, such as one of a plan's choices, as a job file; say where and what."""
    path = access.place(name)
    made = Job.from_dict(job)
    made.to_yaml(path)
    return {"path": str(path), "job": made.to_dict(), "next_command": f"tpukit check {path}"}
