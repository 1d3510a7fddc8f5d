"""Read a kernel's final VLIW bundles, as libtpu writes them to `*-final_bundles.txt`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ...errors import XLACompilationError

_PREAMBLE_END = "= control target key end"
_COMMENT_MARK = re.compile(r"/\*|\*/")
_BUNDLE = re.compile(
    r"^[ \t]*(0x[0-9a-f]+|0)[ \t]+(LH|LB|LE|PB|PF|CT)?[ \t]*:[ \t]*([> \t]*)\{", re.MULTILINE
)
_INSTRUCTION = re.compile(
    r"(?:%(\w+)\s*=\s*)?([a-z_][\w.-]*(?:\[\d+\][\w.]*)?(?:<[^>]*>)?)\s*(.*)", re.DOTALL
)
_PREDICATE = re.compile(r"\(\s*(!?)%(p\w+)\s*(?:,\s*%(\w+)\s*)?\)\s*,?\s*")
_NEVER = re.compile(r"\(\s*0\s*\)\s*,\s*")
_DIVISION = re.compile(r"\s*\bk(Div|Rem)$")
# Quotients and remainders come out of a queue that is no register; named as one, of which there
# are 32, they are followed like any other value.
_DIVISION_TARGET, _DIVISION_VALUE = re.compile(r"^(\d+)$"), re.compile(r"%(\d+)\b")
_NOTES = re.compile(r"\[(?:thread|resolvable):[^\]]*\]\s*")
_NAME = re.compile(r"%(\w+)")
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
_CORE_ID = "core id"
NEVER = "0"


@dataclass(frozen=True)
class SlotInstruction:
    """One slot of a bundle.

    Attributes:
        target: The name it defines, e.g. `s12_s3` for a scalar in register s3; "" for none.
        opcode: Opcode with the compiler's suffixes, e.g. `vmatmul.bf16.gmra.mxu0`.
        text: The operands, without predicate and comments.
        predicate: The name of the predicate it depends on; "" for none, `NEVER` for a constant
            false one.
        negated: Whether it runs when the predicate is false.
        otherwise: The name whose value the target takes when it does not run; "" for none.
        reads_core_id: Whether it loads the number of the core it runs on.
    """

    target: str
    opcode: str
    text: str
    predicate: str = ""
    negated: bool = False
    otherwise: str = ""
    reads_core_id: bool = False

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The operands, split at commas outside brackets."""
        return tuple(_cut(self.text))

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Every name whose value the instruction needs."""
        names = _NAME.findall(self.text)
        return (
            *names,
            *(name for name in (self.predicate, self.otherwise) if name not in ("", NEVER)),
        )


@dataclass(frozen=True)
class InstructionBundle:
    """The instructions that the core issues in one cycle.

    Attributes:
        label: LH, LB, LE, PB, PF or CT for a branch target; "" elsewhere.
        depth: Number of enclosing loops.
        regions: Numbers of the regions that start here; branches name one of them.
    """

    label: str
    depth: int
    instructions: tuple[SlotInstruction, ...]
    regions: tuple[int, ...] = ()


@dataclass(frozen=True)
class InstructionListing:
    """A kernel's whole program."""

    bundles: tuple[InstructionBundle, ...] = field(repr=False)

    @cached_property
    def region_starts(self) -> dict[int, int]:
        """Address of the first bundle of each region."""
        starts: dict[int, int] = {}
        for address, bundle in enumerate(self.bundles):
            for region in bundle.regions:
                starts.setdefault(region, address)
        return starts

    @cached_property
    def uses_core_id(self) -> bool:
        """Whether the program reads its core's number; then two cores share the work."""
        return any(
            instruction.reads_core_id
            for bundle in self.bundles
            for instruction in bundle.instructions
        )


def parse_listing(text: str) -> InstructionListing:
    """Read the text of a `*-final_bundles.txt`.

    Raises:
        XLACompilationError: The text is truncated or not a bundle listing.
    """
    _, found, body = text.partition(_PREAMBLE_END)
    if not found:
        raise _unreadable("its preamble is missing")
    plain = _without_comments(body)
    heads = list(_BUNDLE.finditer(plain))
    if not heads:
        raise _unreadable("it holds no bundle")
    bundles: list[InstructionBundle] = []
    for number, head in enumerate(heads):
        if int(head[1], 16) != number:
            raise _unreadable(f"bundle {number:#x} is missing")
        end = heads[number + 1].start() if number + 1 < len(heads) else len(plain)
        inside, closed, after = plain[head.end() : end].rpartition("}")
        if not closed:
            raise _unreadable(f"bundle {number:#x} has no end")
        slots = (slot.strip() for slot in inside.split(" ;; "))
        bundles.append(
            InstructionBundle(
                label=head[2] or "",
                depth=head[3].count(">"),
                instructions=tuple(_instruction(slot) for slot in slots if slot),
                regions=tuple(int(region) for region in _STARTS.findall(after)),
            )
        )
    return InstructionListing(tuple(bundles))


def _instruction(slot: str) -> SlotInstruction:
    match = _INSTRUCTION.match(slot)
    if match is None:
        raise _unreadable(f"{slot[:60]!r} is no instruction")
    target, opcode, text = match.groups()
    reads_core_id = _CORE_ID in text
    text = _NOTES.sub("", text.replace(_CORE_ID, "")).strip()
    predicate, negated, otherwise = "", False, ""
    division = _DIVISION.search(text)
    if division is not None:
        opcode, text = f"{opcode}.{division[1].lower()}", text[: division.start()]
    if opcode.startswith(("sdivrem", "spop.drf")):
        target = _DIVISION_TARGET.sub(r"s\1_s99", target or "")
        text = _DIVISION_VALUE.sub(r"%s\1_s99", text)
    guard, never = _PREDICATE.search(text), _NEVER.match(text)
    if never is not None:
        predicate, text = NEVER, text[never.end() :]
    elif guard is not None:
        negated, predicate, otherwise = bool(guard[1]), guard[2], guard[3] or ""
        text = (text[: guard.start()] + text[guard.end() :]).strip()
    return SlotInstruction(target or "", opcode, text, predicate, negated, otherwise, reads_core_id)


def _without_comments(text: str) -> str:
    """Drop comments, which may nest, except the words that carry information.

    A comment behind a bundle names the regions that start there. One on a load marks the load of
    the core's number, and one on a division names which of its results is meant.
    """
    kept: list[str] = []
    depth, position = 0, 0
    for mark in _COMMENT_MARK.finditer(text):
        if mark[0] == "/*":
            if depth == 0:
                kept.append(text[position : mark.start()])
                position = mark.end()
            depth += 1
        elif depth:
            depth -= 1
            if depth == 0:
                kept.append(_worth_keeping(text[position : mark.start()].strip()))
                position = mark.end()
    if depth:
        raise _unreadable("a comment has no end")
    kept.append(text[position:])
    return "".join(kept)


def _worth_keeping(comment: str) -> str:
    if comment in (_CORE_ID, "kDiv", "kRem"):
        return f" {comment}"
    if comment.startswith(("Start region", "Start/End empty region", "End region")):
        return f" {comment.replace('{', ' ').replace('}', ' ')} "
    return ""


def _cut(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for index, char in enumerate(text):
        if char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    if text[start:].strip():
        yield text[start:].strip()


def _unreadable(what: str) -> XLACompilationError:
    return XLACompilationError(
        f"the compiler's listing of a kernel cannot be read: {what}. Compile it again; if that "
        "does not help, this libtpu writes listings in another way."
    )
