"""Seeded damage of files: bytes flipped and cut, numbers made extreme, types swapped, nesting."""

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

import yaml

DEEP = 3000
NUMBERS = [
    *(b"0", b"-1", b"1", b"2147483648", b"9223372036854775807", b"18446744073709551616"),
    *(b"1e308", b"1e999", b"-1e999", b"1e-320", b"0.5", b"nan", b"NaN", b"Infinity", b".inf"),
    *(b"9" * 30, b"9" * 400, b"0x1F", b"1_0", b"007", b"12:30:45", b"true", b"null"),
]
PIECES = [
    *NUMBERS,
    *(b"", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b'"\\ud800"', b"\\ud800", b'"', b"'", b"\\"),
    *(b"{", b"}", b"[", b"]", b"(", b")", b",", b":", b": ", b"- ", b"\n", b"\r", b"\t", b"#"),
    *(b"&a", b"*a", b"<<: *a", b"!!binary x", b"!!bool x", b"!!timestamp x", b"!!int ''"),
    *(b"---\n", b"%YAML 1.1\n", b"? ", b"|", b">", b"{}", b"[]", b"\xe2\x80\xa8", b"\x1b[31m"),
    *(b"[" * DEEP, b'{"a":' * DEEP, b"- " * 500, b"(" * DEEP, b"x" * 5000, b"../", b"/dev/zero"),
    *("é😀".encode(), b"=", b"==", b"%s", b"{0}", b"[red]", b"[/]", b"$HOME", b"--"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**40, 2**63 - 1, -(2**63), 2**64, 10**400),
    *(0.0, -0.5, 0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "0", "-1", "nan", "1e999", "\ud800", "\0", "é😀", "a\nb", "[red]x[/]", "x" * 5000),
    *("../../etc/passwd", "/dev/zero", "[", "(", "*", "%s", "{}", "2001-01-01", "fsdp", "tiny"),
    *([], {}, [None], [[]], [0], [-1], [1.5], ["x"], {"": None}, {"x": {}}, [1, 2, 3] * 400),
]
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return the content with one to three changes that know nothing of its format."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        content = rng.choice(_CHANGES)(content, rng)
    return content


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    """Return a JSON text with values swapped, or damaged as bytes."""
    if rng.random() < 0.3:
        return damaged_bytes(content, rng)
    return json.dumps(damaged_tree(json.loads(content), rng)).encode()


def damaged_lines(content: bytes, rng: random.Random) -> bytes:
    """Return JSON lines of which one, or several, are damaged."""
    if rng.random() < 0.2:
        return damaged_bytes(content, rng)
    lines = content.splitlines()
    for number in rng.sample(range(len(lines)), min(len(lines), rng.choice([1, 1, 4]))):
        lines[number] = damaged_json(lines[number], rng)
    return b"\n".join(lines) + rng.choice([b"\n", b""])


def damaged_yaml(content: bytes, rng: random.Random) -> bytes:
    """Return a YAML text with values swapped, or damaged as bytes."""
    if rng.random() < 0.4:
        return damaged_bytes(content, rng)
    documents = list(yaml.safe_load_all(content))
    number = rng.randrange(len(documents))
    documents[number] = damaged_tree(documents[number], rng)
    if rng.random() < 0.3:  # JSON is YAML
        return json.dumps(documents[number]).encode()
    try:
        text = yaml.safe_dump_all(documents, sort_keys=False)
    except RecursionError:
        text = json.dumps(documents[number])
    return text.encode(errors="surrogatepass")


def damaged_tensors(content: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file whose header has values swapped, or damaged as bytes."""
    if rng.random() < 0.3:
        return damaged_bytes(content, rng)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if rng.random() < 0.3 and "__metadata__" in header:
        texts = header["__metadata__"]
        key = rng.choice(list(texts))
        texts[key] = damaged_json(_as_json(texts[key]), rng).decode(errors="replace")
    else:
        header = damaged_tree(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def damaged_tree(tree: Any, rng: random.Random) -> Any:
    """Return plain data with one to three parts replaced, removed, repeated, renamed or nested."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 2, 3])):
        places = _places(tree)
        if not places:
            return copy.deepcopy(rng.choice(VALUES))
        inside, key = rng.choice(places)
        change = rng.choice(["replace"] * 5 + ["remove", "nest", "repeat", "rename", "swap"])
        if change == "replace":
            inside[key] = copy.deepcopy(rng.choice(VALUES))
        elif change == "remove":
            del inside[key]
        elif change == "nest":
            inside[key] = _nested(inside[key], rng.choice([1, 2, 80, 300]), rng)
        elif change == "swap":
            other, at = rng.choice(places)
            if at in other if isinstance(other, dict) else at < len(other):
                inside[key] = copy.deepcopy(other[at])
        elif isinstance(inside, list):
            inside[key:key] = [inside[key]] * rng.choice([1, 10, 1000])
        elif change == "rename":
            inside[f"{key}" + rng.choice(["x", "", " ", "\n"])] = inside.pop(key)
        else:
            name = rng.choice(["", "x", "__class__", "self", "name"])
            inside[name] = copy.deepcopy(inside[key])
    return tree


def _as_json(text: str) -> bytes:
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text).encode()
    return text.encode()


def _nested(value: Any, levels: int, rng: random.Random) -> Any:
    as_list = rng.random() < 0.5
    for _ in range(levels):
        value = [value] if as_list else {"a": value}
    return value


def _places(tree: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    if depth > 12:
        return []
    if isinstance(tree, dict):
        keys = list(tree)
    elif isinstance(tree, list):
        keys = list(range(min(len(tree), 40)))
    else:
        return []
    found = [(tree, key) for key in keys]
    return found + [place for key in keys for place in _places(tree[key], depth + 1)]


def _span(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.choice([1, 1, 2, 4, 8, 16, 64, 256]))


def _flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _drop(content: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng)
    return content[:start] + content[end:]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng)
    return content[:end] + content[start:end] * rng.choice([1, 2, 100]) + content[end:]


def _insert(content: bytes, rng: random.Random) -> bytes:
    start, end = _span(content, rng)
    return content[:start] + rng.choice(PIECES) + content[rng.choice([start, end]) :]


def _number(content: bytes, rng: random.Random) -> bytes:
    found = list(_NUMBER.finditer(content[:100_000]))
    if not found:
        return _insert(content, rng)
    match = rng.choice(found)
    return content[: match.start()] + rng.choice(NUMBERS) + content[match.end() :]


def _line(content: bytes, rng: random.Random) -> bytes:
    """Repeat, drop or move a line: a key that is there twice, an end that comes first."""
    lines = content.split(b"\n")
    line = lines.pop(rng.randrange(len(lines)))
    for _ in range(rng.choice([0, 1, 2, 2, 50])):
        lines.insert(rng.randrange(len(lines) + 1), line)
    return b"\n".join(lines)


_CHANGES: list[Callable[[bytes, random.Random], bytes]] = [
    *(_flip, _cut, _drop, _repeat, _insert, _insert, _number, _number, _number, _line, _line)
]
