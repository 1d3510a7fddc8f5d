"""HTML that cannot be broken out of: every text is escaped unless it is markup already."""

import html
import re
from collections.abc import Iterable

_VOID = ("line", "rect", "circle", "path", "meta", "link", "polyline", "polygon", "input")


class Html(str):
    """A piece of finished markup; any other string is text."""

    __slots__ = ()


def tag(name: str, /, *children: "str | Iterable[str]", **attributes: object) -> Html:
    """One element. Attributes: `class_` is class, `data_x` is data-x, None and False are left out.

    Children are markup (`Html`), texts, which are escaped, or iterables of both.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID and not children:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: "str | Iterable[str]") -> Html:
    """Markup and texts one after another."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(html.escape(child))
        else:
            parts.append(join(*child))
    return Html("".join(parts))


def slug(text: str) -> str:
    """A name that is safe as a class or an anchor."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def coordinate(value: float) -> str:
    """A place in a drawing, short."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
