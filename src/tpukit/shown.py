"""How results show themselves: short in a traceback, whole in a terminal, styled in a notebook.

A result has `__rich__`, which commands print. `Shown` makes the rest of it: `str(result)` is what a
terminal shows, `_repr_html_` what a notebook shows, and `repr(result)` one short line.
"""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from io import StringIO
from typing import Any

from .terminal import open_console, width_for

LONGEST_REPR = 240
LONGEST_VALUE = 48
NOTEBOOK_WIDTH = 110
_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace\">{code}</pre>"
)


class Shown:
    """Base of every result that has `__rich__`; what a class defines itself is kept.

    Without `__rich__`, a class of this base has the short `repr` alone.
    """

    __slots__ = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # or @dataclass would write one of all fields

    def __repr__(self) -> str:
        return short_repr(self)

    def __str__(self) -> str:
        return rendered_text(self) if hasattr(self, "__rich__") else repr(self)

    def _repr_html_(self) -> str | None:
        return rendered_html(self) if hasattr(self, "__rich__") else None


def rendered_text(result: object) -> str:
    """Return what a command would print of a result here, without colours."""
    width = width_for(open_console(), result)
    console = open_console(file=StringIO(), color_system=None, width=width)
    with console.capture() as captured:
        console.print(result, crop=False)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def rendered_html(result: object) -> str:
    """Return a result as a notebook shows it."""
    console = open_console(
        file=StringIO(),
        record=True,
        width=NOTEBOOK_WIDTH,
        color_system="truecolor",
        force_terminal=True,
        force_jupyter=False,
    )
    console.print(result, crop=False)
    return console.export_html(inline_styles=True, code_format=_HTML)


def short_repr(value: object) -> str:
    """Return a class's name with those of its fields that are not at their defaults, on one line.

    Fields that hold results of their own, or several values, are named by kind and number.
    """
    name = type(value).__name__
    parts: list[str] = []
    length = len(name) + 2
    for field, held in _fields(value):
        parts.append(f"{field}={_brief(held)}")
        length += len(parts[-1]) + 2
        if length > LONGEST_REPR:
            parts[-1] = "…"
            break
    return f"{name}({', '.join(parts)})"


def _fields(value: object) -> list[tuple[str, object]]:
    if dataclasses.is_dataclass(value):
        named = [(one.name, one) for one in dataclasses.fields(value) if one.repr]
        held = ((name, getattr(value, name, None), one) for name, one in named)
        return [(name, now) for name, now, one in held if not _is_default(now, one)]
    known: Mapping[str, object] | None = getattr(type(value), "model_fields", None)  # of pydantic
    if known is not None:
        given: Set[str] = getattr(value, "model_fields_set", frozenset[str]())
        return [(name, getattr(value, name)) for name in known if name in given]
    return [(name, held) for name, held in vars(value).items() if not name.startswith("_")]


def _is_default(held: object, field: "dataclasses.Field[Any]") -> bool:
    if held is field.default:
        return True
    if field.default_factory is not dataclasses.MISSING and isinstance(held, Mapping | Sequence):
        return not held
    plain = isinstance(held, bool | int | float | str | tuple)
    return plain and type(held) is type(field.default) and held == field.default


def _brief(held: object) -> str:
    if isinstance(held, str | bytes | Enum):
        return _cut(repr(held.value if isinstance(held, Enum) else held))
    shape, dtype = getattr(held, "shape", None), getattr(held, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}{list(shape)}"
    if isinstance(held, float):
        return f"{held:.6g}"
    if isinstance(held, Mapping):
        # Texts may be secrets, as those of environment variables are.
        numbers = all(isinstance(one, int) for one in held.values())
        return repr(dict(held)) if numbers and len(held) < 6 else f"{{{len(held)}: …}}"
    if isinstance(held, Sequence) and not _has_own_text(held):
        if len(repr(held)) <= LONGEST_VALUE and not any(map(_is_large, held)):
            return repr(held)
        kinds = {type(one).__name__ for one in held}
        return f"[{len(held)} {kinds.pop()}]" if len(kinds) == 1 else f"[{len(held)}]"
    if _has_own_text(held):
        return _cut(str(held))
    return f"{type(held).__name__}(…)" if _is_large(held) else _cut(repr(held))


def _has_own_text(held: object) -> bool:
    """Whether a value has a short text of its own, as a slice or a figure has."""
    return isinstance(held, Shown) and type(held).__str__ is not Shown.__str__


def _is_large(held: object) -> bool:
    is_result = isinstance(held, Shown) or dataclasses.is_dataclass(held)
    return is_result or hasattr(type(held), "model_fields")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
