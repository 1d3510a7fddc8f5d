"""Check the values of a model's description: whole numbers, numbers, truth values, texts, tables.

Descriptions come from job files, config.json files and calls, and a dataclass takes anything.
"""

import dataclasses
import math
import types
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

from ...errors import TPUModelError

MOST_SIZE = 2**31 - 1
"""XLA counts the elements along one dimension in 32 bits."""
MOST_LAYERS = 1024
"""Published models have 126 at most; finding repeated layers takes time by the square."""
_WORDS: dict[type[Any], str] = {
    int: f"a whole number, at most {MOST_SIZE:,}",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Mapping: "a table of settings",
    tuple: "a list",
}
_ANY_SPELLING = ("dtype", "param_dtype")  # jax's and numpy's own objects have a text, too


def check_types(kind: type[Any], values: Mapping[str, Any], *, where: str = "") -> None:
    """Refuse a value that is of another type than its field, or larger than anything real.

    Args:
        kind: The dataclass.
        values: By field.
        where: What stands before a field's name in the message, such as "latent.".

    Raises:
        TPUModelError: A value does not fit.
    """
    for name, (expected, optional) in _simple_fields(kind).items():
        if name not in values or (optional and values[name] is None):
            continue
        if not _fits(values[name], expected):
            raise TPUModelError(
                f"{where}{name}={values[name]!r:.60}; expected {_WORDS[expected]}"
                + (", or nothing." if optional else ".")
            )


@cache
def _simple_fields(kind: type[Any]) -> dict[str, tuple[type[Any], bool]]:
    """The fields of one simple type, and whether they may be None."""
    found: dict[str, tuple[type[Any], bool]] = {}
    for field in dataclasses.fields(kind):
        parts = _alternatives(field.type)
        kinds = {_plain_type(part) for part in parts if part is not type(None)}
        if len(kinds) == 1 and (only := kinds.pop()) in _WORDS and field.name not in _ANY_SPELLING:
            found[field.name] = only, type(None) in parts
    return found


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _plain_type(annotation: Any) -> Any:
    origin = get_origin(annotation)
    return str if origin is Literal else origin or annotation


def _fits(value: Any, expected: type[Any]) -> bool:
    if isinstance(value, bool):  # which is an int for Python
        return expected is bool
    if expected is int:
        return isinstance(value, Integral) and abs(int(value)) <= MOST_SIZE
    if expected is float:
        return isinstance(value, Real) and math.isfinite(value)
    if expected is tuple:
        return isinstance(value, list | tuple | Mapping)
    return isinstance(value, expected)
