"""Functions and example arguments named on a command line: `train.py:step`, `bf16[8,128]`."""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import TPUError, TPUModelError, TPUValidationError, did_you_mean
from ...hardware import parse_format
from ...runtime.environment import configure_tpu_environment
from ...runtime.user_code import user_line

_SHAPE = re.compile(r"\s*([a-z][a-z0-9_]*)\s*\[([0-9,\s]*)\]\s*", re.IGNORECASE)
_LARGEST_DIMENSION = 2**40


def parse_argument(text: str) -> Any:
    """Return the `jax.ShapeDtypeStruct` that e.g. "bf16[8,128]" or "float32[]" describes."""
    import jax

    match = _SHAPE.fullmatch(text)
    if match is None:
        raise TPUValidationError(
            f"{text!r} describes no array; write dtype[shape], for example bf16[8,128] or s32[]."
        )
    dtype = parse_format(match[1])
    sizes = [part.strip() for part in match[2].split(",")] if match[2].strip() else []
    if any(not part.isdigit() or int(part) > _LARGEST_DIMENSION for part in sizes):
        raise TPUValidationError(
            f"{text!r} has a dimension that is no reasonable size; "
            "separate whole numbers by single commas."
        )
    return jax.ShapeDtypeStruct(tuple(int(part) for part in sizes), dtype.name)


def load_function(reference: str) -> Callable[..., Any]:
    """Import the function that "package.module:name" or "path/to/file.py:name" names."""
    found = load_object(reference)
    if not callable(found):
        where, _, name = reference.rpartition(":")
        raise TPUValidationError(f"{name!r} is not a function in {where}.")
    return found


def load_object(reference: str) -> Any:
    """Import what "package.module:name" or "path/to/file.py:name" names, from any folder.

    Raises:
        TPUValidationError: There is no such file, module or name.
        TPUModelError: The module raised something of its own.
    """
    where, colon, name = reference.rpartition(":")
    if not (colon and where and name):
        raise TPUValidationError(
            f"{reference!r} names no function; write module:function or path/to/file.py:function."
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
    """Whether it makes something when called: a function or a class, and no model itself."""
    return inspect.isroutine(found) or isinstance(found, type | partial)


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments without which a function cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of something built in
        return []
    return [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]


def built(reference: str) -> Any:
    """Import what a reference names; what takes no arguments is called, and what it returns taken.

    So one name serves wherever a model or a function is asked for: `file.py:build` that returns a
    function, a module or a `Workload`, or `file.py:step` that is the function itself.
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
                f"there is no module {name!r} here; run from the folder that holds it, "
                "or name the file: path/to/file.py:function."
            ) from None
        raise TPUValidationError(
            f"{name} imports {error.name!r}, which is not installed."
        ) from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TPUValidationError(
            f"there is no file {str(path)!r}; check the path before the colon."
            + did_you_mean(path.name, [one.name for one in path.parent.glob("*.py")])
        )
    return _run_file(path, path.resolve(), path.stat().st_mtime_ns)


@cache
def _run_file(path: Path, file: Path, changed_ns: int) -> ModuleType:
    """The module of a file as it is now, run once however often a command asks for it."""
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
    """Tell what somebody's own code raised, and where, as a user's error.

    Raises:
        TPUModelError: With the line of their code; tpukit's own errors pass.
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
            f"{name} raised {said}{where}; tpukit --debug … shows the whole way there."
        ) from error
