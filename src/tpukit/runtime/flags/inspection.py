"""Judge a flag string, or what the environment holds, one flag at a time, and say why."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import FlagError
from ...shown import Shown
from .flag import VARIABLES, Parser
from .reading import PARSER_ORDERS
from .registry import FlagRegistry
from .setting import check_flags
from .syntax import parse_flags

_ONE_DASH = re.compile(r"(?:^|\s)-(\w+)")


@dataclass(frozen=True, slots=True)
class FlagVerdict:
    """One flag: where it goes, or what is wrong with it."""

    name: str
    value: str
    variable: str | None
    problem: str | None = None


@dataclass(frozen=True)
class FlagReport(Shown):
    """Verdicts on a set of flags.

    Attributes:
        verdicts: One for each flag.
        conflict: Why flags that are right one by one do not go together, if so.
        known_to: The versions they were checked against.
        compiled_for: The slice a trial compile succeeded for, when one was asked for.
    """

    verdicts: tuple[FlagVerdict, ...]
    conflict: str | None
    known_to: str
    compiled_for: str | None = None

    @property
    def ok(self) -> bool:
        """Whether a job would start with them."""
        return self.conflict is None and all(one.problem is None for one in self.verdicts)

    @property
    def values(self) -> dict[str, str]:
        """The flags that are right, by name."""
        return {one.name: one.value for one in self.verdicts if one.problem is None}

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        return {
            "ok": self.ok,
            "flags": [asdict(one) for one in self.verdicts],
            "conflict": self.conflict,
            "known_to": self.known_to,
            "compiled_for": self.compiled_for,
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        lines: list[Text] = []
        for one in self.verdicts:
            if one.problem is None:
                setting = f"--{one.name}={one.value}"
                lines.append(Text.assemble(("ok   ", "green"), f"{setting}  in {one.variable}"))
            else:
                lines.append(Text.assemble(("bad  ", "bold red"), one.problem))
        if self.conflict is not None:
            lines.append(Text.assemble(("bad  ", "bold red"), self.conflict))
        bad = sum(one.problem is not None for one in self.verdicts)
        count = f"{len(self.verdicts)} flag{'' if len(self.verdicts) == 1 else 's'}"
        lines.append(Text(f"{count}, {bad} wrong; checked against {self.known_to}", "dim"))
        if self.compiled_for is not None:
            lines.append(Text(f"compiled with them for {self.compiled_for}", "green"))
        return Group(*lines)


def inspect_flags(text: str, *, registry: FlagRegistry | None = None) -> FlagReport:
    """Judge each flag of a string, wherever it is going to be set.

    Raises:
        FlagError: The string cannot be taken apart.
        MissingExtraError: It holds a TPU flag and libtpu is not installed.
    """
    registry = FlagRegistry.installed() if registry is None else registry
    return _report(_judge(parse_flags(text), None, registry), registry)


def inspect_environment(
    environment: Mapping[str, str], *, registry: FlagRegistry | None = None
) -> FlagReport:
    """Judge what XLA_FLAGS and LIBTPU_INIT_ARGS hold, each by the rules of its own parser.

    Raises:
        MissingExtraError: One holds a TPU flag and libtpu is not installed.
    """
    registry = FlagRegistry.installed() if registry is None else registry
    verdicts: list[FlagVerdict] = []
    for parser, variable in VARIABLES.items():
        text = environment.get(variable, "")
        problems = list(_spelling_problems(text, parser))
        verdicts += [FlagVerdict(variable, text, variable, problem) for problem in problems]
        if problems:
            continue
        try:
            settings = parse_flags(text)
        except FlagError as error:
            verdicts.append(FlagVerdict(variable, text, variable, f"{variable}: {error}"))
            continue
        verdicts += _judge(settings, parser, registry)
    return _report(verdicts, registry)


def _spelling_problems(text: str, parser: Parser) -> list[str]:
    """What only XLA's parser minds; libtpu takes one dash or two."""
    if parser != "xla" or not text:
        return []
    if not text.startswith("-"):
        return [
            f"XLA_FLAGS starts with {text.split()[:1] or ' '}, not with a dash, so XLA takes it "
            "for the name of a file; start it with --."
        ]
    return [
        f"-{name} has one dash, which XLA refuses; write --{name}."
        for name in _ONE_DASH.findall(text)
    ]


def _judge(
    settings: Mapping[str, str | bool], parser: Parser | None, registry: FlagRegistry
) -> list[FlagVerdict]:
    verdicts: list[FlagVerdict] = []
    for written, value in settings.items():
        if parser == "libtpu" and written in PARSER_ORDERS:
            continue
        shown = value if isinstance(value, str) else str(value).lower()
        try:
            ((name, (flag, text)),) = check_flags({written: value}, registry=registry).items()
        except FlagError as error:
            verdicts.append(FlagVerdict(written, shown, None, str(error)))
            continue
        problem = None
        if parser is not None and parser not in flag.parsers:
            problem = (
                f"{name} is in {VARIABLES[parser]}, whose parser does not know it and ends the "
                f"process; move it to {flag.variable}."
            )
        elif parser == "xla" and name != written:
            problem = f"--{written} is a form only libtpu reads; write --{name}=false."
        variable = flag.variable if parser is None else VARIABLES[parser]
        verdicts.append(FlagVerdict(name, text, variable, problem))
    return verdicts


def _report(verdicts: list[FlagVerdict], registry: FlagRegistry) -> FlagReport:
    report = FlagReport(tuple(verdicts), None, registry.described)
    try:
        check_flags(report.values, registry=registry)
    except FlagError as error:
        return FlagReport(report.verdicts, str(error), registry.described)
    return report
