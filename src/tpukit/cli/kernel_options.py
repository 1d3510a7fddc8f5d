"""What kernel commands share: options, cases from text, and progress."""

import json as json_module
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..kernels.registry.op import KernelCase, Op
    from ..runtime.progress import Progress

On = Annotated[str | None, typer.Option(help="Chip generations, such as v6e or v5e,v5p,v6e,7x.")]
CaseNames = Annotated[
    list[str] | None, typer.Option(help="Name of a case of the op; repeatable. [default: all]")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        help="Array argument of your own case, such as bf16[1,8,4096,128]; repeatable, in order."
    ),
]
OptionTexts = Annotated[
    list[str] | None,
    typer.Option(help="Keyword argument of your own case, such as causal=true; repeatable."),
]
ValueTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--value",
        help="Values of the integer array at an index: 2=100,28,0, or 2=even for "
        "groups of equal size over the first array's rows; repeatable.",
    ),
]
Implementation = Annotated[
    list[str] | None,
    typer.Option(help="Implementation: pallas_tpu or reference; repeatable. [default: both]"),
]
Backward = Annotated[
    bool, typer.Option("--backward", help="Time the gradient, including the forward pass.")
]


def start() -> None:
    """Configure this process to compile for TPUs without searching for one."""
    from ..runtime.environment import configure_tpu_environment

    configure_tpu_environment()


def find_op(name: str) -> "Op":
    """Return the op of that name, or of `file.py:name` or `module:name`.

    Raises:
        TPUKernelError: There is no op of that name.
        TPUValidationError: The file has no such name, or it is not an op.
    """
    from ..compiler.program.entry import load_function
    from ..errors import TPUValidationError
    from ..kernels.registry.registry import get_tpu_op
    from ..kernels.registry.user_kernel import TpuKernel

    if ":" not in name:
        return get_tpu_op(name)
    found = load_function(name)
    if isinstance(found, TpuKernel):
        return found.op
    raise TPUValidationError(f"{name} is a function and no op; decorate it with @tpu_kernel.")


def chosen_chips(text: str) -> list[str]:
    """Return the names of the generations in `--on`.

    Raises:
        SliceError: A name is unknown; the message has the nearest one.
        TPUValidationError: No generation is named.
    """
    from ..errors import TPUValidationError
    from ..hardware import get_chip

    names = [get_chip(part.strip()).name for part in text.split(",") if part.strip()]
    if not names:
        raise TPUValidationError(f"--on {text!r} names no generation; write e.g. --on v5e,v6e.")
    return list(dict.fromkeys(names))


def choose_cases(
    op: "Op",
    names: Sequence[str] | None,
    shapes: Sequence[str] | None,
    options: Sequence[str] | None,
) -> "list[KernelCase]":
    """Return the op's cases of these names, or one made from shapes and options; by default all.

    Raises:
        TPUValidationError: A shape or option is not valid for the op, or both ways are used.
        TPUKernelError: The op has no such case.
    """
    from ..compiler.program.entry import parse_argument
    from ..errors import TPUValidationError
    from ..kernels.registry.op import KernelCase, shape_text

    if shapes and names:
        raise TPUValidationError("--case and --shape both say what to time; give one of them.")
    if options and not shapes:
        raise TPUValidationError("--option belongs to a case of your own; give its --shape too.")
    if shapes:
        arrays = tuple(parse_argument(text) for text in shapes)
        keywords = dict(_keyword(text) for text in options or ())
        label = " ".join(map(shape_text, arrays))
        own = KernelCase(label, arrays, keywords)
        _check_case(op, own)
        return [own]
    if not names and not op.cases:
        raise TPUValidationError(f"{op.name} has no cases; give --shape for each of its arrays.")
    return [op.case(name) for name in names] if names else list(op.cases)


def _check_case(op: "Op", case: "KernelCase") -> None:
    """Refuse shapes that the op does not take before any compile, and show valid ones.

    Raises:
        TPUValidationError: The op refuses the shapes; the message has its reason.
    """
    import jax

    from ..errors import TPUValidationError
    from ..kernels.registry.op import REFERENCE, shape_text

    try:
        jax.eval_shape(op.bind(case, implementation=REFERENCE), *case.arguments)
    except Exception as error:  # anyone's function may raise anything here
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        example = ""
        if op.cases:
            arrays = [f"--shape {shape_text(array)}" for array in op.cases[0].arguments]
            options = [f"--option {name}={value}" for name, value in op.cases[0].options.items()]
            example = f"; its case {op.cases[0].name} is {' '.join([*arrays, *options])}"
        raise TPUValidationError(
            f"{op.name} cannot take {case.name}: {reason}{example}."
        ) from error


def _keyword(text: str) -> tuple[str, Any]:
    """Return name and value of `causal=true`; a value that is not JSON is a string."""
    from ..errors import TPUValidationError

    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise TPUValidationError(f"{text!r} is no option; write name=value, e.g. causal=true.")
    try:
        return name.strip(), json_module.loads(value)
    except json_module.JSONDecodeError:
        return name.strip(), value.strip()


def read_values(
    texts: Sequence[str] | None, cases: "Sequence[KernelCase]" = ()
) -> "Callable[[KernelCase], dict[int, Any]] | None":
    """Return the values of `--value`, for any case.

    Raises:
        TPUValidationError: A value is not valid, or a case has no such array.
    """
    import numpy as np

    from ..errors import TPUValidationError

    parsed: dict[int, list[int] | None] = {}
    for text in texts or ():
        number, _, value = text.partition("=")
        parts = [part.strip() for part in value.split(",")]
        whole = all(part.lstrip("-").isdigit() for part in parts)
        if not number.strip().isdigit() or not (whole or value.strip() == "even"):
            raise TPUValidationError(
                f"{text!r} gives no values; write number=value, e.g. 2=100,28,0 or 2=even."
            )
        parsed[int(number)] = [int(part) for part in parts] if whole else None
    if not parsed:
        return None

    def values(case: "KernelCase") -> dict[int, Any]:
        found: dict[int, Any] = {}
        for number, numbers in parsed.items():
            if number >= len(case.arguments):
                raise TPUValidationError(
                    f"--value {number}: {case.name} has arrays 0 to {len(case.arguments) - 1}."
                )
            array = case.arguments[number]
            groups, rows = array.size, case.arguments[0].shape[0]
            filled = numbers or [rows // groups + (i < rows % groups) for i in range(groups)]
            if len(filled) != groups:
                raise TPUValidationError(
                    f"--value {number} has {len(filled)} numbers; that array of {case.name} has "
                    f"{groups}."
                )
            found[number] = np.asarray(filled, array.dtype).reshape(array.shape)
        return found

    for case in cases:
        values(case)
    return values


@contextmanager
def counted(total: int | None) -> "Generator[Progress]":
    """Return a function that prints the current compile and its number to standard error."""
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    from ..runtime.progress import Counted
    from ..terminal import open_console, text_column

    console = open_console(stderr=True)
    if not console.is_terminal:
        lines = 0

        def line(text: str) -> None:
            nonlocal lines
            lines += 1
            of = text.total if isinstance(text, Counted) else total
            sys.stderr.write(f"[{lines}{f'/{of}' if of else ''}] {text}\n")
            sys.stderr.flush()

        yield line
        return
    columns = (text_column("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as drawn:
        task = drawn.add_task("starting", total=total)

        def bar(text: str) -> None:
            of = text.total if isinstance(text, Counted) else total
            drawn.update(task, advance=1, total=of, description=text)

        yield bar
