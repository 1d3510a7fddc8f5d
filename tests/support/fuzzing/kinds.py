"""A kind of input: a sample of it, how it is damaged, and who reads it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .mutations import damaged_bytes, damaged_json, damaged_lines, damaged_tensors, damaged_yaml

BY_ENDING = {
    ".yaml": damaged_yaml,
    ".json": damaged_json,
    ".jsonl": damaged_lines,
    ".safetensors": damaged_tensors,
}
KINDS: dict[str, "Kind"] = {}


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        write: Writes a whole sample into a folder.
        readers: Each reads the files in the current folder; they take turns.
        only: Files that are damaged, as a pattern; all by default.
        known: Damage that was once not refused in one sentence, by file: these come first.
    """

    name: str
    write: Callable[[Path], None]
    readers: list[Callable[[], object]]
    only: str = "*"
    known: list[tuple[str, bytes]] = field(default_factory=list)

    def damage(self, sample: Path, work: Path, rng: random.Random, seed: int) -> list[str]:
        """Damage one or two files of the sample, and return their names."""
        if seed < len(self.known):
            name, content = self.known[seed]
            (work / name).write_bytes(content)
            return [name]
        files = sorted(path for path in sample.rglob(self.only) if path.is_file())
        chosen = rng.sample(files, min(len(files), rng.choice([1, 1, 1, 2])))
        for path in chosen:
            change = BY_ENDING.get(path.suffix, damaged_bytes)
            target = work / path.relative_to(sample)
            target.unlink()  # a reader may still have it mapped
            target.write_bytes(change(path.read_bytes(), rng))
        return [str(path.relative_to(sample)) for path in chosen]

    def read(self, seed: int) -> None:
        """Have one of the readers read what is in the current folder."""
        self.readers[seed % len(self.readers)]()


def kind(name: str, *readers, only="*", known=()):
    """Return a decorator that registers the function which writes a kind's sample."""

    def register(write):
        KINDS[name] = Kind(name, write, list(readers), only, list(known))
        return write

    return register


def command(*words):
    """Return a reader that runs a command, as typed."""

    def run():
        from typer.testing import CliRunner

        from tpukit.cli.app import app

        found = CliRunner().invoke(app, list(words))
        if found.exception is not None:
            raise found.exception

    return run


def bomb(levels: int) -> bytes:
    """Return YAML of few lines whose aliases stand for 9**levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]")
    return "\n".join(lines).encode()


def merge_bomb(levels: int) -> bytes:
    """Return the same with merged mappings."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}")
    return "\n".join(lines).encode()


MANY_KEYS = b"".join(b"key%d: 1\n" % number for number in range(200_000))
YAML_ATTACKS = [
    *(bomb(26), merge_bomb(26), b"a: &a {b: *a}", b"a: &a [*a]", b"- " * 5000, b"[" * 5000),
    *(b"{a: " * 5000, MANY_KEYS, MANY_KEYS[:900_000], b"#" * 3_000_000, b"a: !!bool x"),
    *(b"a: !!timestamp x", b"a: !!int ''", b"a: 2001-99-99", b'a: "\\ud800"', b"a: !!binary \xff"),
    *(b"a: " + b"9" * 5000, b"a: " + b":".join([b"59"] * 3000), b"? [a]\n: b", b"a\n---\nb"),
]
JSON_ATTACKS = [
    *(b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b'"\\ud800"', b"\xff", b"", b"null"),
    *(b"[" + b"[]," * 3_000_000 + b"1]", b"[" * 500 + b"]" * 500),
]
