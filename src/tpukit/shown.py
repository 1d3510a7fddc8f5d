"""How results are displayed: short in a traceback, full in a terminal, styled in a notebook.

A result defines `__rich__`, which commands print. `Shown` derives the rest from it: `str(result)`
is the terminal text, `_repr_html_` the notebook's, and `repr(result)` one short line. `Facts` makes
`to_dict`, which `--json` prints, from the names of the result's fields.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import Enum
from functools import cache
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from .terminal import open_console, width_for

if TYPE_CHECKING:
    from rich.console import RenderableType

Renderable: TypeAlias = "RenderableType"
"""What `__rich__` returns; rich itself is loaded when a result is shown."""
LONGEST_REPR = 240
LONGEST_VALUE = 48
NOTEBOOK_WIDTH = 110
_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace\">{code}</pre>"
)


class Facts:
    """Base of a dataclass that is plain data: `to_dict` returns its fields in order.

    A class whose JSON differs from its fields lists the names in `_facts`, in the order of the
    JSON: fields, properties or class attributes. `key=path` is a key in the JSON and the attribute
    it is read from, with dots for attributes of attributes. `*` is every field, and `**path` adds
    the keys of that attribute. Values are converted by `plain_value`.

    Example:
        >>> @dataclasses.dataclass
        ... class Disk(Facts):
        ...     name: str
        ...     used: int
        ...     size: int
        ...     origin = "measured"
        ...     _facts = "name share=used_share origin"
        ...     used_share = property(lambda self: self.used / self.size)
        >>> Disk("a", 1, 4).to_dict()
        {'name': 'a', 'share': 0.25, 'origin': 'measured'}
    """

    __slots__ = ()
    _facts: ClassVar[str | Sequence[str | tuple[str, str]]] = "*"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        found: dict[str, Any] = {}
        for key, read in _readers(type(self)):
            value = plain_value(read(self))
            found |= value if key.startswith("**") else {key: value}
        return found


@cache
def _readers(kind: type[Facts]) -> Sequence[tuple[str, Callable[[Facts], Any]]]:
    """Return each key in the JSON of a class, and what reads its value from an object."""
    listed = kind._facts  # pyright: ignore[reportPrivateUsage]  of this module
    paths: dict[str, str] = {}
    for word in listed.split() if isinstance(listed, str) else listed:
        if word == "*":
            fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
            paths |= {field.name: field.name for field in fields}
            continue
        key, _, path = word.partition("=") if isinstance(word, str) else (word[0], "", word[1])
        paths[key] = path or key.lstrip("*")
    return [(key, attrgetter(path)) for key, path in paths.items()]


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it; a type that JSON has no word for is returned unchanged."""
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | Set):
        return [plain_value(entry) for entry in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain_value(getattr(value, name)) for name in names}
    return value


class Shown(Facts):
    """Base of every result with `__rich__`; a class may override each form.

    A subclass without `__rich__` only gets the short `repr`.
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
    """Return the text that a command would print for a result, without colours."""
    width = width_for(open_console(), result)
    console = open_console(file=StringIO(), color_system=None, width=width)
    with console.capture() as captured:
        console.print(result, crop=False)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def rendered_html(result: object) -> str:
    """Return a result as HTML for a notebook."""
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
    """Return a class's name with its non-default fields, on one line.

    Fields that contain results or several values are shown by kind and number.
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
    """Whether a value has a short text of its own, like a slice or a figure."""
    return isinstance(held, Shown) and type(held).__str__ is not Shown.__str__


def _is_large(held: object) -> bool:
    is_result = isinstance(held, Shown) or dataclasses.is_dataclass(held)
    return is_result or hasattr(type(held), "model_fields")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


class MappedResult(Shown, Mapping[str, Any]):
    """A result that also reads like a dictionary: `diagnosis["summary"]`."""

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())
