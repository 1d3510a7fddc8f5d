"""Every small change to a file that a test of its room ought to notice."""

import ast
import copy
import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

OTHER_OPERATOR: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
OTHER_NAME = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum",
    "ceil": "floor", "floor": "ceil", "clip_by_global_norm": "clip",
}  # fmt: skip
MOVED_BY = 1.1  # a number that a test leaves this much room does not stand under test
# Numbers of a data file: after "=", and not inside a text.
TOML_NUMBER = re.compile(r"(?<![\w.\"-])(\d[\d_]*(?:\.\d+)?(?:e-?\d+)?)(?![\w.\"])")


@dataclass(frozen=True)
class Change:
    """One changed stretch of a file.

    Attributes:
        file: Relative to the repository.
        line: Where it begins, from 1.
        start: Its first character in the file's text.
        before: What stands there.
        after: What stands there afterwards.
        at_import: Whether it runs when the module is imported, and so in every test.
    """

    file: Path
    line: int
    start: int
    before: str
    after: str
    at_import: bool = False

    @property
    def id(self) -> str:
        """The same in every run, until the file changes before it."""
        return hashlib.sha256(repr((str(self.file), self.start, self.before, self.after)).encode()
                              ).hexdigest()[:12]  # fmt: skip

    def apply(self, text: str) -> str:
        """The file with this change."""
        return text[: self.start] + self.after + text[self.start + len(self.before) :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def changes_of(root: Path, file: Path) -> list[Change]:
    """All changes of a Python or TOML file."""
    text = (root / file).read_text("utf-8")
    found = _in_toml(file, text) if file.suffix == ".toml" else _in_python(file, text)
    lines = text.splitlines()
    return list(
        {
            one.id: one
            for one in found
            if one.before != one.after and not _is_equivalent(one, lines[one.line - 1])
        }.values()
    )


def _is_equivalent(change: Change, line: str) -> bool:
    """Whether the program is known to do the same with a change."""
    return any(
        (str(change.file), change.before, change.after)
        == (one["file"], one["before"], one["after"])
        and one.get("line", "") in line
        for one in _equivalent()
    )


@cache
def _equivalent() -> list[dict[str, str]]:
    return tomllib.loads((Path(__file__).parent / "equivalent.toml").read_text())["same"]


def _in_toml(file: Path, text: str) -> Iterator[Change]:
    place = 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        assigned = re.match(r"[^#\[\"]*?=", line)
        # The name of a source or a note may hold numbers; they come after the value.
        end = min((line.find(mark) for mark in (" source =", " note =", '"') if mark in line),
                  default=len(line))  # fmt: skip
        if assigned:
            for found in TOML_NUMBER.finditer(line, assigned.end(), end):
                after = moved(found[1])
                yield Change(file, number, place + found.start(), found[1], after, at_import=True)
        place += len(line)


def moved(number: str) -> str:
    """A number a tenth larger; a small integer, one larger."""
    plain = number.replace("_", "")
    if re.fullmatch(r"\d+", plain):
        return str(max(int(plain) + 1, round(int(plain) * MOVED_BY)))
    return f"{float(plain) * MOVED_BY or 0.1:.6g}"


def _in_python(file: Path, text: str) -> Iterator[Change]:
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        """Characters before a position, whose column counts bytes."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node, in_function in _visited(tree, False):
        for changed in _changed(node):
            start = place(node.lineno, node.col_offset)
            end = place(node.end_lineno or 0, node.end_col_offset or 0)
            after = ast.unparse(changed)
            if not isinstance(changed, ast.Constant | ast.Name | ast.Attribute):
                after = f"({after})"
            yield Change(file, node.lineno, start, text[start:end], after, not in_function)


def _visited(node: ast.AST, in_function: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Every expression that computes something; annotations, texts and errors do not.

    Nor do `strict` of a zip, which is an error, and `repr` of a field.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        inside = in_function or (name == "body" and isinstance(node, ast.FunctionDef | ast.Lambda))
        for child in value if isinstance(value, list) else (value,):
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Raise):
                continue
            if isinstance(child, ast.keyword) and child.arg in ("strict", "repr"):
                continue
            if isinstance(child, ast.expr):
                yield child, inside
            yield from _visited(child, inside)


def _changed(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(type(node.value)(float(moved(repr(abs(node.value))))))
        case ast.BinOp():
            if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
                return
            if type(node.op) in OTHER_OPERATOR:
                yield _with(node, op=OTHER_OPERATOR[type(node.op)]())
            if isinstance(node.op, ast.Add | ast.Sub):  # a term dropped
                yield node.left
        case ast.Compare() if type(node.ops[0]) in OTHER_OPERATOR:
            yield _with(node, ops=[OTHER_OPERATOR[type(node.ops[0])](), *node.ops[1:]])
        case ast.BoolOp():
            yield _with(node, op=OTHER_OPERATOR[type(node.op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp():
            yield _with(node, body=node.orelse, orelse=node.body)
        case ast.Name(id=name) if name in OTHER_NAME:
            yield ast.Name(OTHER_NAME[name])
        case ast.Attribute(attr=name) if name in OTHER_NAME:
            yield _with(node, attr=OTHER_NAME[name])
        case _:
            return


def _with(node: ast.expr, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
