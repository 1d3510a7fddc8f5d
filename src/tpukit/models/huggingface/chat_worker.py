"""The child that renders a chat template: jinja2's sandbox, with little memory."""

import json
import resource
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ...runtime.child import serve_request

MEMORY_BYTES = 2 * 2**30  # of addresses, most of which are libraries
LONGEST_TEXT = 64 * 2**20


class GenerationBlock(Extension):
    """`{% generation %}`, with which templates mark what the model says: its body, as it is."""

    tags: set[str] = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Drop the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class OwnNamespace(Namespace):
    """A namespace whose attributes are a template's own, and none of Python's."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def render(request: Mapping[str, Any]) -> dict[str, list[str]]:
    """Render a template once for each set of names it may read."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    names: dict[str, Any] = environment.globals
    names |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "namespace": OwnNamespace,
        "dict": _dict,
    }
    try:
        template = environment.from_string(request["source"])
        texts = [template.render(**names) for names in request["names"]]
    except MemoryError:
        raise TemplateError("it needs more memory than a template may have") from None
    made = sum(map(len, texts))
    if made > LONGEST_TEXT:
        raise TemplateError(f"it makes {made} characters, and {LONGEST_TEXT} are the most")
    return {"texts": texts}


def _dict(*pairs: Any, **more: Any) -> dict[Any, Any]:
    # A function: the class itself would bring its attributes along.
    return dict(*pairs, **more)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own, which escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


if __name__ == "__main__":
    serve_request(render)
