"""The frame of every page: head, policy, menu, theme; and the headers of served pages."""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from ..plain_data import JsonMapping
from .markup import Markup, tag
from .parts import PageSection

_KIT = "tpukit.pages"
_ALWAYS = (
    "default-src 'none'",
    "base-uri 'none'",
    "form-action 'none'",
    "img-src data:",  # the empty icon, so that a browser does not request one
    "require-trusted-types-for 'script'",  # a script cannot turn text into markup either
    "trusted-types 'none'",
)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page in one file, which works without a server or network, in light and dark.

    Attributes:
        title: Title of the browser tab.
        headline: The top of the page, above the sections.
        sections: The sections, each with an entry in the menu.
        footer: Text at the bottom.
        style: CSS of this kind of page, after that of every page.
        script: JavaScript of this kind of page, after that of every page. A page must be readable
            without it.
        data: Data for `script`, in the element `page-data`.
    """

    title: str
    headline: Markup
    sections: Sequence[PageSection]
    footer: str
    style: str = ""
    script: str = ""
    data: JsonMapping | None = None

    def render(self) -> str:
        """Return the page as HTML."""
        styles = [text for text in (asset(_KIT, "pages.css"), self.style) if text]
        scripts = [text for text in (asset(_KIT, "pages.js"), self.script) if text]
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
            tag("main", self.headline, [section.markup for section in self.sections], id="content"),
            tag("footer", self.footer),
            _inert(self.data) if self.data is not None else "",
            [_verbatim("script", script) for script in scripts],
        )
        return f"<!doctype html>\n{tag('html', head, body, lang='en').html}\n"

    def _menu(self) -> Markup:
        return tag(
            "nav",
            tag("a", "Skip to content", href="#content", class_="skip"),
            [tag("a", section.title, href=f"#{section.anchor}") for section in self.sections],
            tag("button", "Theme: auto", type="button", id="theme", class_="script-only"),
            aria_label="Sections",
        )


@cache
def asset(package: str, name: str) -> str:
    """Return a style or script from the `assets` folder of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def _verbatim(name: str, content: str) -> Markup:
    """Return a style or script without escaping, because browsers unescape neither."""
    if "</" in content or "<!--" in content:
        raise ValueError(f"a {name} contains '</' or '<!--', which could end its element early.")
    return Markup(f"<{name}>{content}</{name}>")


def _inert(data: JsonMapping) -> Markup:
    """Return data as JSON that is not executed and whose text cannot close its element."""
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="page-data">{text}</script>')


def content_security_policy(*, styles: Iterable[str], scripts: Iterable[str]) -> str:
    """Return a policy that allows only these inline styles and scripts, and no request."""
    return "; ".join((*_ALWAYS, _only("style-src", styles), _only("script-src", scripts)))


def _only(directive: str, contents: Iterable[str]) -> str:
    return " ".join((directive, *(f"'{_digest(content)}'" for content in contents)))


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


_ALWAYS_SENT = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_APPLICATION = (
    "default-src 'none'",
    "base-uri 'none'",
    "connect-src 'self'",
    "form-action 'self'",
    "frame-ancestors 'none'",
    "frame-src 'self'",
    "img-src 'self' data:",
    "script-src 'self'",
    "style-src 'self'",
    "require-trusted-types-for 'script'",  # a script cannot turn text into markup either
    "trusted-types 'none'",
)
# A page in one file contains the rest of its policy. In a sandbox its scripts have no origin, so
# that they could read nothing even if the page contained an attack.
_FRAMED = ("sandbox allow-scripts allow-downloads", "frame-ancestors 'self'")
_POLICY = "content-security-policy"

APPLICATION_HEADERS = MappingProxyType({**_ALWAYS_SENT, _POLICY: "; ".join(_APPLICATION)})
"""Headers of an application with its own files: pages, scripts, styles, data."""
FRAMED_HEADERS = MappingProxyType({**_ALWAYS_SENT, _POLICY: "; ".join(_FRAMED)})
"""Headers of a `Page` that the application shows in a frame."""
