"""Check the types of configuration values, which come from job files, config.json and calls."""

import dataclasses
import math
import types
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin

from ...errors import TPUModelError

MOST_SIZE = 2**31 - 1
"""XLA counts the elements of one dimension in 32 bits."""
MOST_LAYERS = 1024
"""Published models have at most 126 layers; finding repeated layers takes quadratic time."""
_WORDS: dict[type[Any], str] = {
    int: f"a whole number, at most {MOST_SIZE:,}",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Mapping: "a table of settings",
    tuple: "a list",
}
_ANY_SPELLING = ("dtype", "param_dtype")  # may be objects of jax or numpy


def check_types(kind: type[Any], values: Mapping[str, Any], *, where: str = "") -> None:
    """Check that values have the types of their fields and plausible sizes.

    Args:
        kind: The dataclass.
        values: Values by field name.
        where: Prefix of a field's name in messages, such as "latent.".

    Raises:
        TPUModelError: A value has another type or is too large.
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
    """Return the fields of simple types, and whether each may be None."""
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
