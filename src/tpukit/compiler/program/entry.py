"""Functions and example arguments given on a command line: `train.py:step`, `bf16[8,128]`."""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import MeshError, TPUError, TPUModelError, TPUValidationError, did_you_mean
from ...hardware import Slice, parse_format
from ...hardware.mesh_sizes import fill_mesh
from ...runtime.environment import configure_tpu_environment
from ...runtime.user_code import user_line
from .request import as_abstract_mesh

_SHAPE = re.compile(r"\s*([a-z][a-z0-9_]*)\s*\[([0-9,\s]*)\]\s*", re.IGNORECASE)
_LARGEST_DIMENSION = 2**40


def parse_argument(text: str) -> Any:
    """Return the `jax.ShapeDtypeStruct` for a text such as "bf16[8,128]" or "float32[]"."""
    import jax

    match = _SHAPE.fullmatch(text)
    if match is None:
        raise TPUValidationError(
            f"{text!r} is not an array; write dtype[shape], for example bf16[8,128] or s32[]."
        )
    dtype = parse_format(match[1])
    sizes = [part.strip() for part in match[2].split(",")] if match[2].strip() else []
    if any(not part.isdigit() or int(part) > _LARGEST_DIMENSION for part in sizes):
        raise TPUValidationError(
            f"{text!r} has a dimension of invalid size; separate whole numbers by single commas."
        )
    return jax.ShapeDtypeStruct(tuple(int(part) for part in sizes), dtype.name)


def load_function(reference: str) -> Callable[..., Any]:
    """Import the function given as "package.module:name" or "path/to/file.py:name"."""
    found = load_object(reference)
    if not callable(found):
        where, _, name = reference.rpartition(":")
        raise TPUValidationError(f"{name!r} is not a function in {where}.")
    return found


def load_object(reference: str) -> Any:
    """Import the object given as "package.module:name" or "path/to/file.py:name".

    Raises:
        TPUValidationError: There is no such file, module or name.
        TPUModelError: The module raised an exception.
    """
    where, colon, name = reference.rpartition(":")
    if not (colon and where and name):
        raise TPUValidationError(
            f"{reference!r} is not a function; write module:function or path/to/file.py:function."
        )
    # Somebody's module may open jax's devices when it is imported, and libtpu, where there is no
    # TPU, says so in blocks of its own.
    configure_tpu_environment()
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    found = getattr(module, name, None)
    if found is None:
        own = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        nearest = did_you_mean(name, own) or f" It has {', '.join(own[:8]) or 'no functions'}."
        raise TPUValidationError(f"{name!r} does not exist in {where}.{nearest}")
    return found


def is_builder(found: object) -> bool:
    """Whether an object is a function or class that builds a model, not a model itself."""
    return inspect.isroutine(found) or isinstance(found, type | partial)


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's required arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of something built in
        return []
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def built(reference: str) -> Any:
    """Import a reference, and call it if it takes no arguments.

    So one reference serves wherever a model or a function is expected: `file.py:build` returns a
    function, a module or a `Workload`, and `file.py:step` is the function itself.
    """
    found = load_object(reference)
    if not is_builder(found) or needed_arguments(found):
        return found
    with errors_of(reference):
        made = found()
    is_array = hasattr(made, "dtype") or made is None  # a function without arguments, not a builder
    return found if is_array else made


def _load_module(name: str) -> ModuleType:
    # `python -m` puts the working folder on the path; the installed command does not.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with errors_of(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise TPUValidationError(
                f"there is no module {name!r} here; run from the folder that contains it, "
                "or name the file: path/to/file.py:function."
            ) from None
        raise TPUValidationError(
            f"{name} imports {error.name!r}, which is not installed."
        ) from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TPUValidationError(
            f"there is no file {str(path)!r}; check the path before the colon."
            + did_you_mean(path.name, [argument.name for argument in path.parent.glob("*.py")])
        )
    return _run_file(path, path.resolve(), path.stat().st_mtime_ns)


@cache
def _run_file(path: Path, file: Path, changed_ns: int) -> ModuleType:
    """Return the module of a file, run once per command."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TPUValidationError(f"{str(path)!r} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    beside = str(file.parent)
    if beside not in sys.path:  # as `python file.py` has it: a file may import its neighbours
        sys.path.insert(0, beside)
    sys.modules.setdefault(path.stem, module)  # dataclasses look there for annotations
    with errors_of(str(path)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def errors_of(name: str) -> Generator[None]:
    """Turn exceptions of the user's own code into an error with its line.

    Raises:
        TPUModelError: The code raised an exception; tpukit's own errors pass unchanged.
    """
    try:
        yield
    except (TPUError, ModuleNotFoundError):
        raise
    except Exception as error:  # anyone's code may raise anything here
        said = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
        line = "" if isinstance(error, SyntaxError) else user_line(error)
        where = f" ({line})" if line else ""
        raise TPUModelError(
            f"{name} raised {said}{where}; tpukit --debug … shows the whole traceback."
        ) from error


EXAMPLE = "bf16[8192@fsdp,4096]"
_SHARDED_SHAPE = re.compile(r"(.*)\[(.*)\]\s*", re.DOTALL)
_DIMENSION = re.compile(r"\s*([^@()]*?)\s*(?:@\s*(?:([^@(),\s]+)|\(([^@()]*)\))\s*)?")
_COMMA = re.compile(r",(?![^(]*\))")  # between dimensions, not between axes of one of them


@dataclass(frozen=True)
class _Described:
    """A parsed array: its shape, and the mesh axes that shard each dimension."""

    text: str
    plain: str
    axes: tuple[tuple[str, ...], ...]


def sharded_arguments(
    texts: Sequence[str], target: Slice, mesh: Mapping[str, int] | None = None
) -> list[Any]:
    """Return a `jax.ShapeDtypeStruct` per text, sharded over the devices of a slice.

    Args:
        texts: "bf16[8192@fsdp,4096]" shards the first dimension along fsdp. If no text names an
            axis and no mesh is given, arguments have no sharding.
        target: The slice.
        mesh: Size of each axis; by default the only named axis has all devices.

    Raises:
        TPUValidationError: A text is not an array, or an axis does not divide its dimension.
        MeshError: The mesh does not fit the slice, or lacks an axis.
    """
    described = [_describe(text) for text in texts]
    arrays = [parse_argument(argument.plain) for argument in described]
    named = list(
        dict.fromkeys(axis for argument in described for dim in argument.axes for axis in dim)
    )
    if mesh is None and not named:
        return arrays
    if mesh is None and len(named) > 1:
        raise MeshError(
            f"--arg names the mesh axes {', '.join(named)}, but not their sizes; write "
            f"--mesh {','.join(f'{axis}=…' for axis in named)} for the {target.devices} devices "
            f"of {target}."
        )
    sizes = fill_mesh(mesh or {named[0]: -1}, target)
    for axis in named:
        if axis not in sizes:
            raise MeshError(
                f"--arg names the mesh axis {axis!r}, but the mesh has {', '.join(sizes)}."
                + did_you_mean(axis, sizes)
            )
    return [
        _laid_out(argument, array, sizes, target)
        for argument, array in zip(described, arrays, strict=True)
    ]


def _describe(text: str) -> _Described:
    found = _SHARDED_SHAPE.fullmatch(text)
    if found is None:
        return _Described(text, text, ())  # parse_argument says what is wrong
    sizes: list[str] = []
    axes: list[tuple[str, ...]] = []
    for part in _COMMA.split(found[2]):
        dimension = _DIMENSION.fullmatch(part)
        listed = "" if dimension is None else dimension[2] or dimension[3] or ""
        if dimension is None or ("@" in part and not (dimension[1] and listed.strip())):
            raise TPUValidationError(
                f"{text!r} has a dimension {part.strip()!r} that cannot be parsed; write its size, "
                f"and the mesh axes that split it behind @: {EXAMPLE}."
            )
        sizes.append(dimension[1])
        axes.append(tuple(name.strip() for name in listed.split(",") if name.strip()))
    named = [axis for dim in axes for axis in dim]
    if len(set(named)) < len(named):
        raise TPUValidationError(
            f"{text!r} splits two dimensions along one mesh axis; name each axis once."
        )
    return _Described(text, f"{found[1]}[{','.join(sizes)}]", tuple(axes))


def _laid_out(argument: _Described, array: Any, sizes: Mapping[str, int], target: Slice) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    for size, axes in zip(array.shape, argument.axes, strict=False):
        ways = prod(sizes[axis] for axis in axes)
        if size % ways:
            raise TPUValidationError(
                f"{argument.text!r} splits a dimension of {size} into {ways} parts, which leaves a "
                f"rest; make it a multiple of {ways}, or name other axes."
            )
    spec = (
        PartitionSpec(*(axes or None for axes in argument.axes)) if array.shape else PartitionSpec()
    )
    sharding = NamedSharding(as_abstract_mesh(sizes, target), spec)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
