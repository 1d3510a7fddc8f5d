"""Data given by name: a path, an .npz file, a folder of images, or `file.py:function`."""

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...compiler.program.entry import errors_of, load_object
from ...errors import ConfigError, TPUValidationError
from .remote import remote_url
from .tables import ArrayTable, ImageTable, is_image_folder

_FUNCTION = re.compile(r"(?:.*\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
OFFERED = ("batch_size", "seed", "process_index", "process_count")


def is_data_function(source: object) -> bool:
    """Return whether the source is `file.py:function` or `module:function`."""
    return isinstance(source, str) and bool(_FUNCTION.fullmatch(source))


def batch_size_parameter(source: object) -> inspect.Parameter | None:
    """Return the parameter `batch_size` of a data function; None if it takes none."""
    if not isinstance(source, str) or not is_data_function(source):
        return None
    function = load_object(source)
    return _parameters(function).get("batch_size") if callable(function) else None


def named_data(source: Any, **offered: Any) -> Any:
    """Return the data of a name: a table, an array, an iterable, or the unchanged path.

    Args:
        source: The name; anything else is returned unchanged.
        **offered: Arguments for a function that takes some of `OFFERED`.

    Raises:
        TPUValidationError: The file, folder or function has no data.
        ConfigError: The function needs other arguments.
    """
    if not isinstance(source, str | Path):
        return source
    if isinstance(source, str) and is_data_function(source):
        return _from_function(source, offered)
    if remote_url(source) is not None:
        return source
    path = Path(source).expanduser()
    if str(path).endswith(".npz") and os.path.isfile(path):
        return ArrayTable.from_npz(path)
    return ImageTable(path) if is_image_folder(path) else source


class NamedBatches:
    """Batches of a user's function; its errors name the user's line."""

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        self.name, self._function = name, function

    def __call__(self) -> Iterator[Any]:
        """Call the function, and return an iterator of batches."""
        with errors_of(self.name):
            batches = iter(self._function())
        return batches if hasattr(batches, "get_state") else self._drawn(batches)

    def _drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with errors_of(self.name):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


def _from_function(name: str, offered: Mapping[str, Any]) -> Any:
    value = load_object(name)
    if not callable(value):
        return _as_data(name, value, None)
    parameters = _parameters(value)
    given = {key: value for key, value in offered.items() if key in parameters}
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and given.get(key) is None
    ]
    if missing:
        raise ConfigError(
            f"'{name}' needs the arguments {', '.join(missing)}; a function that makes batches "
            f"may take {', '.join(OFFERED)} (batch_size: --batch-size)."
        )
    function = partial(value, **{key: arg for key, arg in given.items() if arg is not None})
    with errors_of(name):
        made = function()
    return _as_data(name, made, function)


def _as_data(name: str, made: Any, function: Callable[[], Any] | None) -> Any:
    if isinstance(made, Mapping):
        return ArrayTable(made, name)  # pyright: ignore[reportUnknownArgumentType]  anything
    if isinstance(made, str | Path):
        return named_data(made)
    if hasattr(made, "__array__"):
        return np.asarray(made)
    try:
        is_iterator = iter(made) is made
    except TypeError:
        raise TPUValidationError(
            f"'{name}' returned {type(made).__name__}; expected batches (a generator or another "
            "iterable), a mapping of arrays with one row per example, or a path."
        ) from None
    return NamedBatches(name, function) if is_iterator and function is not None else made


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # a built-in function
        return {}
