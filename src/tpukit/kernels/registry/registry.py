"""Ops by name: the built-in ones, found by their folders, and those that users register."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

from ...errors import TPUKernelError, did_you_mean
from ...plain_data import JsonObject
from ...shown import Shown
from .op import Op

_registered: dict[str, Op] = {}
_lock = Lock()


def builtin_ops() -> tuple[str, ...]:
    """Return the names of tpukit's ops with a TPU kernel: every folder of `ops`."""
    return tuple(
        sorted(path.parent.name for path in (Path(__file__).parents[1] / "ops").glob("*/api.py"))
    )


def list_tpu_ops() -> tuple[str, ...]:
    """Return the names of all ops, the built-in ones first."""
    return (*builtin_ops(), *sorted(_registered))


def get_tpu_op(name: str) -> Op:
    """Return the op of that name.

    Raises:
        TPUKernelError: There is none; the message names the nearest.
    """
    if name in _registered:
        return _registered[name]
    if name in builtin_ops():
        return import_module(f"tpukit.kernels.ops.{name}.api").OP
    raise TPUKernelError(
        f"There is no op {name!r}; there are {', '.join(list_tpu_ops())}."
        + did_you_mean(name, list_tpu_ops())
    )


def add_op(op: Op, *, replace: bool = False) -> None:
    """Register an op under its name.

    Raises:
        TPUKernelError: The name is taken, or is not an identifier.
    """
    if op.name in builtin_ops():
        raise TPUKernelError(
            f"{op.name!r} is a built-in op and cannot be replaced; give another name=."
        )
    if not op.name.isidentifier():
        raise TPUKernelError(f"{op.name!r} is not an identifier; give the op a name=.")
    with _lock:
        existing = _registered.get(op.name)
        if existing is not None and not replace:
            raise TPUKernelError(
                f"The op {op.name!r} is already registered, as {_origin(existing)}; give another "
                "name=, replace=True, or unregister_tpu_op it first."
            )
        _registered[op.name] = op


def unregister_tpu_op(name: str) -> Op:
    """Remove a registered op and return it; calls of the function itself still work.

    Raises:
        TPUKernelError: No op of that name was registered, or it is built in.
    """
    with _lock:
        if name in _registered:
            return _registered.pop(name)
    if name in builtin_ops():
        raise TPUKernelError(f"{name!r} is a built-in op; only registered ops can be removed.")
    known = ", ".join(sorted(_registered)) or "none"
    raise TPUKernelError(
        f"No op {name!r} is registered; registered ops: {known}." + did_you_mean(name, _registered)
    )


def _origin(op: Op) -> str:
    function = op.function
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', op.name)}"


@dataclass(frozen=True)
class OpListing(Shown):
    """All ops, as a table and as data."""

    ops: tuple[Op, ...]

    @classmethod
    def from_registry(cls) -> "OpListing":
        """List the built-in and the registered ops."""
        return cls(tuple(get_tpu_op(name) for name in list_tpu_ops()))

    def to_dict(self) -> JsonObject:
        """Return implementations and cases by op."""
        return {
            op.name: {
                "implementations": list(op.implementations),
                "cases": [case.to_dict() for case in op.cases],
            }
            for op in self.ops
        }

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("op", "as", show_edge=False)
        # Not cut off, so that a name can be copied into --case.
        table.add_column("cases", overflow="fold")
        for op in self.ops:
            cases = "\n".join(case.name for case in op.cases)
            table.add_row(op.name, "\n".join(op.implementations), cases)
        return table
