"""`tpukit kernel`: list ops, time them for chips nobody has here, and choose their blocks."""

from typing import Annotated, Any

import typer

from .kernel_options import (
    Backward,
    CaseNames,
    Implementation,
    Json,
    NoCache,
    On,
    OptionTexts,
    Shapes,
    choose_cases,
    chosen_chips,
    counted,
    start,
)

app = typer.Typer(no_args_is_help=True)
OpName = Annotated[str, typer.Argument(help="An op, as `tpukit kernel list` names it.")]


@app.command("list")
def list_ops(json: Json = False) -> None:
    """List the ops with their cases and implementations."""
    start()
    from ..kernels.registry import get_tpu_op, list_tpu_ops
    from .kernel_options import OpListing
    from .output import show

    show(OpListing(tuple(get_tpu_op(name) for name in list_tpu_ops())), json=json)


@app.command()
def bench(
    op: OpName,
    on: On,
    case: CaseNames = None,
    shape: Shapes = None,
    option: OptionTexts = None,
    implementation: Implementation = None,
    backward: Backward = False,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Estimate an op's time on generations you do not have: cycles, bound, error, against XLA."""
    start()
    from ..kernels.registry import get_tpu_op
    from ..kernels.timing import bench_op, default_implementations
    from .output import show

    found = get_tpu_op(op)
    chips = chosen_chips(on)
    cases = choose_cases(found, case, shape, option)
    wanted = implementation or default_implementations(found)
    with counted(len(chips) * len(cases) * len(wanted)) as tell:
        result: Any = bench_op(
            found,
            chips,
            cases=cases,
            direction="backward" if backward else "forward",
            implementations=wanted,
            tell=tell,
            use_cache=not no_cache,
        )
    show(result, json=json)
    if all(row.time_s is None for row in result.rows):
        raise typer.Exit(4)
