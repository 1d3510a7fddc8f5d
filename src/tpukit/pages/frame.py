"""The frame of every page: head, policy, menu, theme; one file that needs nothing else."""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from .markup import Markup, tag
from .parts import PageSection

_KIT = "tpukit.pages"
_ALWAYS = (
    "default-src 'none'",
    "base-uri 'none'",
    "form-action 'none'",
    "img-src data:",  # the empty icon, without which a browser asks a server for one
    "require-trusted-types-for 'script'",  # a script cannot turn text into markup either
    "trusted-types 'none'",
)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of one file, which works from a disk, without a network, in light and dark.

    Attributes:
        title: What the browser's tab shows.
        headline: What comes first, above the sections.
        sections: The rest, each with an entry in the menu.
        footer: Who made the page.
        style: Rules of this kind of page, after those of every page.
        script: Of this kind of page, after that of every page. A page must be readable without.
        data: What `script` reads, from the element `page-data`.
    """

    title: str
    headline: Markup
    sections: Sequence[PageSection]
    footer: str
    style: str = ""
    script: str = ""
    data: Mapping[str, Any] | None = None

    def render(self) -> str:
        """The page as text."""
        styles = [one for one in (asset(_KIT, "pages.css"), self.style) if one]
        scripts = [one for one in (asset(_KIT, "pages.js"), self.script) if one]
        policy = content_security_policy(styles=styles, scripts=scripts)
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("link", rel="icon", href="data:,"),
            tag("title", self.title),
            [_verbatim("style", style) for style in styles],
        )
        body = tag(
            "body",
            self._menu(),
            tag("main", self.headline, [one.markup for one in self.sections], id="content"),
            tag("footer", self.footer),
            _inert(self.data) if self.data is not None else "",
            [_verbatim("script", script) for script in scripts],
        )
        return f"<!doctype html>\n{tag('html', head, body, lang='en').html}\n"

    def _menu(self) -> Markup:
        return tag(
            "nav",
            tag("a", "Skip to content", href="#content", class_="skip"),
            [tag("a", one.title, href=f"#{one.anchor}") for one in self.sections],
            tag("button", "Theme: auto", type="button", id="theme", class_="script-only"),
            aria_label="Sections",
        )


@cache
def asset(package: str, name: str) -> str:
    """Read a style or a script from the `assets` of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def _verbatim(name: str, content: str) -> Markup:
    """A style or script as it stands, since a browser unescapes neither."""
    if "</" in content or "<!--" in content:
        raise ValueError(f"a {name} holds '</' or '<!--', which could end its element early.")
    return Markup(f"<{name}>{content}</{name}>")


def _inert(data: Mapping[str, Any]) -> Markup:
    """JSON that no script engine runs and no text in it can end."""
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="page-data">{text}</script>')


def content_security_policy(*, styles: Iterable[str], scripts: Iterable[str]) -> str:
    """Allow exactly these inline styles and scripts, by their digests, and no request at all."""
    return "; ".join((*_ALWAYS, _only("style-src", styles), _only("script-src", scripts)))


def _only(directive: str, contents: Iterable[str]) -> str:
    return " ".join((directive, *(f"'{_digest(content)}'" for content in contents)))


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
