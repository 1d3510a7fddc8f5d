"""The child process that renders a chat template in jinja2's sandbox with limited memory."""

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

MEMORY_BYTES = 2 * 2**30  # of address space, most of which libraries use
LONGEST_TEXT = 64 * 2**20


class GenerationBlock(Extension):
    """The tag `{% generation %}`, which marks the model's answers; its body is kept unchanged."""

    tags: set[str] = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body without the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class OwnNamespace(Namespace):
    """A namespace that a template can fill, except for names that start with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def render(request: Mapping[str, Any]) -> dict[str, list[str]]:
    """Render a template once per set of variables."""
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
        raise TemplateError(f"it needs more than {MEMORY_BYTES} bytes of memory") from None
    made = sum(map(len, texts))
    if made > LONGEST_TEXT:
        raise TemplateError(f"its text has {made} characters, but {LONGEST_TEXT} is the limit")
    return {"texts": texts}


def _dict(*pairs: Any, **more: Any) -> dict[Any, Any]:
    # A function, because the class itself would expose its attributes.
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
    # jinja2's own filter would escape for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


if __name__ == "__main__":
    serve_request(render)
