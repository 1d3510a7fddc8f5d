"""Ops by name: tpukit's own, found by their folders, and those that users register."""

from importlib import import_module
from pathlib import Path
from threading import Lock

from ...errors import TPUKernelError, did_you_mean
from .op import Op

_registered: dict[str, Op] = {}
_lock = Lock()


def builtin_ops() -> tuple[str, ...]:
    """Names of tpukit's own ops: every folder here that has a `specs.py`."""
    return tuple(
        sorted(path.parent.name for path in (Path(__file__).parents[1] / "ops").glob("*/specs.py"))
    )


def list_tpu_ops() -> tuple[str, ...]:
    """Names of all ops, tpukit's own first."""
    return (*builtin_ops(), *sorted(_registered))


def get_tpu_op(name: str) -> Op:
    """The op of that name.

    Raises:
        TPUKernelError: There is none; the message names the nearest.
    """
    if name in _registered:
        return _registered[name]
    if name in builtin_ops():
        return import_module(f"tpukit.kernels.ops.{name}.specs").OP
    raise TPUKernelError(
        f"There is no op {name!r}; there are {', '.join(list_tpu_ops())}."
        + did_you_mean(name, list_tpu_ops())
    )


def add_op(op: Op, *, replace: bool = False) -> None:
    """Make an op known by its name.

    Raises:
        TPUKernelError: The name is taken, or is none.
    """
    if op.name in builtin_ops():
        raise TPUKernelError(
            f"{op.name!r} is an op of tpukit's own and cannot be replaced; give another name=."
        )
    if not op.name.isidentifier():
        raise TPUKernelError(f"An op is found by its name, and {op.name!r} is none; give name=.")
    with _lock:
        taken = _registered.get(op.name)
        if taken is not None and not replace:
            raise TPUKernelError(
                f"The op {op.name!r} is registered already, as {_origin(taken)}; give another "
                "name=, replace=True, or unregister_tpu_op it first."
            )
        _registered[op.name] = op


def unregister_tpu_op(name: str) -> Op:
    """Forget a registered op and return it; calls through the function itself still work.

    Raises:
        TPUKernelError: No op of that name was registered, or it is tpukit's own.
    """
    with _lock:
        if name in _registered:
            return _registered.pop(name)
    if name in builtin_ops():
        raise TPUKernelError(
            f"{name!r} is an op of tpukit's own and stays; only registered ones can be removed."
        )
    known = ", ".join(sorted(_registered)) or "none"
    raise TPUKernelError(
        f"No op {name!r} is registered; registered are: {known}." + did_you_mean(name, _registered)
    )


def _origin(op: Op) -> str:
    function = op.function
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', op.name)}"
