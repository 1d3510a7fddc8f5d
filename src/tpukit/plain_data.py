"""Read untrusted JSON and YAML, within limits on size, depth and numbers.

Every limit is far above the needs of honest files, and low enough that a hostile file costs at most
a few seconds and a few hundred megabytes. A file beyond a limit is refused like any damaged file:
by a ValueError with one clause, which the caller completes with the file's name and a fix.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, cast

from .errors import TPUError

if TYPE_CHECKING:
    import yaml

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object: plain data by name."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""A JSON object that is only read."""
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
DAMAGE = (LookupError, ValueError, ArithmeticError, TypeError, AttributeError, RecursionError)
"""What Python raises where plain data are not of the expected form."""

MOST_BYTES = 64 << 20
"""JSON: the largest published index of weights has 15 MB."""
MOST_YAML_BYTES = 1 << 20
MOST_VALUES = 2_000_000
"""JSON: a value takes at most about 100 bytes of memory besides its text."""
MOST_YAML_VALUES = 10_000
"""YAML, with aliases replaced by copies: its reader takes 100 microseconds per value."""
MOST_DEPTH = 64
"""Levels of lists and objects. Python's own limit is 1,000 calls, several of them per level."""
MOST_INTEGER = 2**63 - 1

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_LONG_NUMBER = re.compile("[0-9]{19}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(
    text: str | bytes,
    *,
    most_bytes: int = MOST_BYTES,
    is_record: bool = False,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Return the value of a JSON text.

    Args:
        text: UTF-8 where it is bytes.
        most_bytes: The longest text that is read.
        is_record: Whether it is a line of a user's data, which may nest as deeply as Python
            allows, and contain any integer and halves of surrogate pairs.
        object_hook: Called with each object; its result is the value instead.

    Raises:
        ValueError: The text is not JSON, not Unicode, or beyond a limit.
    """
    if len(text) > most_bytes:
        raise ValueError(f"it has {len(text):,} bytes, but at most {most_bytes:,} are read")
    if not isinstance(text, str):
        text = text.decode("utf-8-sig")
    # Every value but the first follows one of these; text in quotes may hold them too.
    if _count_marks(text) > MOST_VALUES and _count_marks(_STRING.sub("", text)) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    long = not is_record and _LONG_NUMBER.search(text) is not None
    try:
        value = json.loads(text, parse_int=_integer if long else None, object_hook=object_hook)
    except RecursionError:
        raise _too_deep() from None
    if is_record:
        return value
    if (text.count("[") + text.count("{")) > MOST_DEPTH:
        _check_depth(value)
    if _SURROGATE.search(text):
        _check_characters(json.dumps(value, ensure_ascii=False))
    return value


def read_json(
    path: str | os.PathLike[str],
    *,
    most_bytes: int = MOST_BYTES,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
) -> Any:
    """Return the value of a JSON file.

    Raises:
        OSError: It cannot be read.
        ValueError: The file is not JSON, or beyond a limit.
    """
    content = read_limited(path, most_bytes)
    return parse_json(content, most_bytes=most_bytes, object_hook=object_hook)


def read_limited(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is larger than `most_bytes`.
    """
    with open(path, "rb") as file:
        content = file.read(most_bytes + 1)
        size = os.fstat(file.fileno()).st_size
    if len(content) > most_bytes:
        raise ValueError(
            f"it has {max(size, len(content)):,} bytes, but at most {most_bytes:,} are read"
        )
    return content


def parse_yaml(
    text: str,
    *,
    resolvers: Any = None,
    on_node: "Callable[[yaml.Node], None] | None" = None,
) -> list[Any]:
    """Return the value of every document of a YAML text; standard tags only.

    Args:
        text: One document, or several with "---" between them.
        resolvers: Which plain words are numbers, booleans …; by default those of YAML 1.1.
        on_node: Called with the root of each document before its value is made.

    Raises:
        ValueError: The text is not YAML, or beyond a limit; the message has the line if known.
    """
    import yaml

    if len(text) > MOST_YAML_BYTES:
        raise ValueError(
            f"it has {len(text):,} characters, but at most {MOST_YAML_BYTES:,} are read"
        )

    class Loader(_LimitedLoader, yaml.SafeLoader):
        pass

    if resolvers is not None:
        Loader.yaml_implicit_resolvers = resolvers
    values: list[Any] = []
    try:
        loader = Loader(text)
        while loader.check_node():
            node = loader.get_node()
            assert node is not None
            _check_expanded(node)
            if on_node is not None:
                on_node(node)
            values.append(loader.construct_document(node))  # pyright: ignore[reportUnknownMemberType]
    except yaml.YAMLError as error:
        raise ValueError(_what_and_where(error)) from None
    except RecursionError:
        raise _too_deep() from None
    return values


class _LimitedLoader:
    """Stops pyyaml at too many or too deeply nested values, and locates invalid ones."""

    nodes = 0
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        self.depth += 1
        _check_counts(self.nodes, self.depth)
        node = cast("Any", super()).compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        from yaml.constructor import ConstructorError

        why = "the value does not fit its type"
        try:
            value = cast("Any", super()).construct_object(node, deep)
            if not isinstance(value, int) or abs(value) <= MOST_INTEGER:
                return value
            why = "the whole number is past 64 bits"
        # pyyaml's own, for '!!bool x', '!!timestamp x', 2001-99-99 and the like.
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
            pass
        raise ConstructorError(None, None, why, node.start_mark) from None


def damaged_as(
    kind: type[TPUError], sentence: str
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Return a decorator for a reader whose input may contradict itself anywhere.

    Args:
        kind: The error that a user sees.
        sentence: Its message, with `{}` for the problem.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(function)
        def reading(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except TPUError:
                raise
            except DAMAGE as error:
                what = f"{type(error).__name__}: {' '.join(str(error).split()):.80}"
                raise kind(sentence.format(what)) from error

        return reading

    return decorate


def _check_counts(values: int, depth: int) -> None:
    if values > MOST_YAML_VALUES:
        raise ValueError(f"it has more than {MOST_YAML_VALUES:,} values, aliases counted as copies")
    if depth > MOST_DEPTH:
        raise _too_deep()


def _check_expanded(root: "yaml.Node") -> None:
    """Refuse aliases that expand too far, because readers walk through every copy."""
    values, waiting = 0, [(root, 1)]
    while waiting:
        node, depth = waiting.pop()
        values += 1
        _check_counts(values, depth)
        if isinstance(node.value, str):
            _check_characters(node.value)
            continue
        for entry in node.value:
            waiting += [(part, depth + 1) for part in (entry if type(entry) is tuple else (entry,))]


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair, which is not a character") from None


def _what_and_where(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}, {problem}"


def _count_marks(text: str) -> int:
    return sum(map(text.count, ",[{"))


def _integer(digits: str) -> int | float:
    """Return a float beyond 64 bits, as other JSON readers do; real files have such numbers."""
    value = int(digits) if len(digits) <= 20 else MOST_INTEGER + 1
    return value if abs(value) <= MOST_INTEGER else float(digits)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH):
        below = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for one in below for part in one if isinstance(part, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MOST_DEPTH} levels deep")
