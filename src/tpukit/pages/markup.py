"""Markup that is safe against injection: every string is escaped unless it is `Markup`."""

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

# Elements without content: of HTML, where an end tag is an error, and of SVG.
_EMPTY = frozenset(
    ("input", "link", "meta", "wbr", "circle", "line", "path", "polygon", "polyline", "rect")
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
# The page's policy refuses inline handlers and styles, so a page must not rely on them.
_REFUSED_ATTRIBUTE = re.compile(r"on.*|style|src|srcdoc", re.IGNORECASE)
_SAFE_LINKS = ("#", "https://", "data:,")
# Control characters, halves of surrogate pairs (in file names that are not UTF-8), and marks that
# reverse the reading order, with which one name can look like another.
_UNSHOWABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]"
)


@dataclass(frozen=True, slots=True)
class Markup:
    """A piece of finished markup; any plain string is text.

    It is no `str`, so that type checkers tell the two apart and string methods cannot turn one into
    the other. Make it with `tag` and `join`; only `pages` calls the class itself.
    """

    html: str


Child: TypeAlias = "str | Markup | Iterable[Child]"
Attribute: TypeAlias = "str | float | None"


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return one element.

    Args:
        name: Name of the element.
        children: Markup, texts, which are escaped, or iterables of them.
        attributes: `class_` is class and `data_x` is data-x; None and False are left out.

    Raises:
        ValueError: The element could run or load something, or its name is not valid.
    """
    if not _NAME.fullmatch(name) or name.lower() in ("script", "style"):
        raise ValueError(f"<{name}> is no element of a page; the frame alone writes scripts.")
    written = "".join(
        _attribute(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY and not children:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(*children).html}</{name}>")


def join(*children: Child) -> Markup:
    """Return markup and texts one after another."""
    return Markup("".join(_written(child) for child in children))


def escape(text: str) -> str:
    """Return text escaped for HTML."""
    return html.escape(_UNSHOWABLE.sub("\ufffd", text))


def slug(text: str) -> str:
    """Return a name that is safe as a class or an anchor."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _written(child: Child) -> str:
    if isinstance(child, Markup):
        return child.html
    if isinstance(child, str):
        return escape(child)
    return "".join(_written(part) for part in child)


def _attribute(name: str, value: str | float) -> str:
    if not _NAME.fullmatch(name) or _REFUSED_ATTRIBUTE.fullmatch(name):
        raise ValueError(f"The attribute {name!r} is not allowed in a page.")
    if name == "href" and not str(value).startswith(_SAFE_LINKS):
        raise ValueError(f"A link to {value!r} is refused; it must start with {_SAFE_LINKS}.")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
