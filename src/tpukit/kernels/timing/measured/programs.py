"""The program that a measured row timed, as far as its source can be had here."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ....errors import TPUError, TPUKernelError
from ....hardware import get_chip
from ....hardware.target import target_chip
from ...registry.op import PALLAS_TPU, Direction, KernelCase, find_implementation
from ...registry.registry import builtin_ops, get_tpu_op
from ..bench import kind_of
from .arguments import MeasuredProgram, group_sizes_of, shape_of
from .rows import MeasuredRow
from .tokamax_programs import TOKAMAX_OPS, UNDETERMINED, tokamax_program

BACKWARD = "_backward"


def program_of(row: MeasuredRow) -> MeasuredProgram:
    """Write the program of a row anew, and see that jax can trace it.

    Raises:
        TPUKernelError: There is none here, or the row does not say enough; the message is why.
        SliceError: There is no such generation.
        MissingExtraError: tokamax, whose program it is, is not installed.
    """
    chip = get_chip(row.device)
    if row.num_devices > 1:
        raise TPUKernelError(f"it ran on {row.num_devices} devices; only one is followed")
    if row.on_host_clock:
        raise TPUKernelError(
            f"its time may count the host's dispatch (timed by {row.timing_method!r})"
        )
    try:
        program = _write(row)
        with target_chip(chip.name):
            jax.eval_shape(program.function, *program.arguments)
    except TPUError:
        raise
    except Exception as error:  # anyone's function may raise anything here
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TPUKernelError(f"it cannot be traced: {said}") from error
    return program


def _write(row: MeasuredRow) -> MeasuredProgram:
    own = row.op.removesuffix(BACKWARD)
    if (row.op, row.impl) in TOKAMAX_OPS:
        return tokamax_program(row)
    if row.impl == "xla" and row.op in _PLAIN:
        return _PLAIN[row.op](row)
    if own in builtin_ops() and row.impl in get_tpu_op(own).implementations:
        return _own_program(row, own)
    raise TPUKernelError(UNDETERMINED.get((row.op, row.impl), "its source is not here"))


def _matmul(row: MeasuredRow) -> MeasuredProgram:
    """One product of the two arrays that a row names, whatever it calls them."""
    names = [name for name in row.shapes if name != "out"][:2]
    out = row.dtypes.get("out")

    def matmul(a: Any, b: Any) -> Any:
        return jnp.dot(a, b, preferred_element_type=jnp.dtype(out) if out else None)

    return MeasuredProgram(matmul, [shape_of(row, name) for name in names])


def _hbm_copy(row: MeasuredRow) -> MeasuredProgram:
    """A copy of so many bytes; their type decides nothing, and sources do not name it."""
    elements, odd = divmod(math.prod(next(iter(row.shapes.values()), ())), 4)
    if odd:
        raise TPUKernelError("its bytes are no whole number of 32-bit words")

    def hbm_copy(x: Any) -> Any:
        return jnp.copy(x)

    return MeasuredProgram(hbm_copy, [jax.ShapeDtypeStruct((elements,), jnp.float32)])


_PLAIN: dict[str, Callable[[MeasuredRow], MeasuredProgram]] = {
    "matmul": _matmul,
    "hbm_copy": _hbm_copy,
}


def _own_program(row: MeasuredRow, name: str) -> MeasuredProgram:
    """An op of tpukit: `static_args` are its options, `config` the blocks that differ."""
    op = get_tpu_op(name)
    shapes = tuple(shape_of(row, argument) for argument in row.shapes)
    case = KernelCase(
        row.id, shapes, {key: value for key, value in row.static_args.items() if value is not None}
    )
    direction: Direction = "backward" if row.op.endswith(BACKWARD) else "forward"
    find_implementation(op.name, op.implementations, row.impl)
    blocks = None
    if row.config:
        default: Any = op.default_blocks(case, row.chip)
        try:
            blocks = replace(default, **row.config)
        except TypeError as error:
            raise TPUKernelError(
                f"its config has sizes that {op.name} does not have; it has "
                f"{', '.join(default.to_dict())}"
            ) from error
    arguments: list[Any] = list(shapes)
    if "group_sizes" in row.shapes:
        place = list(row.shapes).index("group_sizes")
        arguments[place] = group_sizes_of(row, shapes[place])
    function = op.bind(case, implementation=row.impl, blocks=blocks, direction=direction)
    return MeasuredProgram(
        function, arguments, kind_of(op, direction) if row.impl == PALLAS_TPU else None
    )
