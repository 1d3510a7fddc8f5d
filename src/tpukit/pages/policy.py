"""The one content-security policy: a page runs what the frame wrote into it and loads nothing."""

import base64
import hashlib
from collections.abc import Iterable

_ALWAYS = (
    "default-src 'none'",
    "base-uri 'none'",
    "form-action 'none'",
    "img-src data:",  # the empty icon, without which a browser asks a server for one
    "require-trusted-types-for 'script'",  # a script cannot turn text into markup either
    "trusted-types 'none'",
)


def content_security_policy(*, styles: Iterable[str], scripts: Iterable[str]) -> str:
    """Allow exactly these inline styles and scripts, by their digests, and no request at all."""
    return "; ".join((*_ALWAYS, _only("style-src", styles), _only("script-src", scripts)))


def _only(directive: str, contents: Iterable[str]) -> str:
    return " ".join((directive, *(f"'{_digest(content)}'" for content in contents)))


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
