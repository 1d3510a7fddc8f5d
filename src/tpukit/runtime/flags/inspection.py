"""Check flags one by one, explain them, and try them with the real compiler."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import FlagError, XLACompilationError
from ...hardware import Slice, get_chip, list_slices
from ...plain_data import JsonObject
from ...shown import Renderable, Shown
from ..child import ChildError, offline_environment, run_child
from .flag import (
    VARIABLES,
    BundleFlag,
    Exclusion,
    Flag,
    Parser,
    load_bundles,
    published_descriptions,
)
from .reading import PARSER_ORDERS, PROBE
from .registry import FlagRegistry
from .setting import as_compiler_options, check_flags
from .syntax import format_flags, parse_flags

_ONE_DASH = re.compile(r"(?:^|\s)-(\w+)")


@dataclass(frozen=True, slots=True)
class FlagVerdict:
    """The verdict on one flag: its variable, or what is wrong with it."""

    name: str
    value: str
    variable: str | None
    problem: str | None = None


@dataclass(frozen=True)
class FlagReport(Shown):
    """Verdicts on a set of flags.

    Attributes:
        verdicts: One for each flag.
        conflict: Why flags that are valid one by one exclude each other; else empty.
        known_to: The versions of the parsers that checked them.
        compiled_for: The slice of a successful trial compile, if one was requested.
    """

    verdicts: tuple[FlagVerdict, ...]
    conflict: str | None
    known_to: str
    compiled_for: str | None = None
    _facts = "ok flags=verdicts conflict known_to compiled_for"

    @property
    def ok(self) -> bool:
        """Whether a job would start with these flags."""
        return self.conflict is None and all(verdict.problem is None for verdict in self.verdicts)

    @property
    def values(self) -> dict[str, str]:
        """The valid flags, by name."""
        return {verdict.name: verdict.value for verdict in self.verdicts if verdict.problem is None}

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.text import Text

        lines: list[Text] = []
        for verdict in self.verdicts:
            if verdict.problem is None:
                setting = f"--{verdict.name}={verdict.value}"
                lines.append(Text.assemble(("ok   ", "green"), f"{setting}  in {verdict.variable}"))
            else:
                lines.append(Text.assemble(("bad  ", "bold red"), verdict.problem))
        if self.conflict is not None:
            lines.append(Text.assemble(("bad  ", "bold red"), self.conflict))
        bad = sum(verdict.problem is not None for verdict in self.verdicts)
        count = f"{len(self.verdicts)} flag{'' if len(self.verdicts) == 1 else 's'}"
        lines.append(Text(f"{count}, {bad} wrong; checked against {self.known_to}", "dim"))
        if self.compiled_for is not None:
            lines.append(Text(f"compiled with them for {self.compiled_for}", "green"))
        return Group(*lines)


def inspect_flags(text: str, *, registry: FlagRegistry | None = None) -> FlagReport:
    """Check each flag of a string, whichever variable it belongs to.

    Raises:
        FlagError: The string cannot be parsed.
        MissingExtraError: It contains a TPU flag, but libtpu is not installed.
    """
    registry = FlagRegistry.installed() if registry is None else registry
    return _report(_judge(parse_flags(text), None, registry), registry)


def inspect_environment(
    environment: Mapping[str, str], *, registry: FlagRegistry | None = None
) -> FlagReport:
    """Check XLA_FLAGS and LIBTPU_INIT_ARGS, each by the rules of its own parser.

    Raises:
        MissingExtraError: One contains a TPU flag, but libtpu is not installed.
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
    """Return spellings that only XLA's parser refuses; libtpu accepts one dash or two."""
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


NO_DESCRIPTION = "no description published"


@dataclass(frozen=True)
class FlagExplanation(Shown):
    """A flag with its published description and the bundles that use it."""

    flag: Flag
    known_to: str
    used_by: tuple[BundleFlag, ...]
    excluded: tuple[Exclusion, ...]

    @property
    def description(self) -> str:
        """The description by jaxlib, else by the guide, else by a bundle, else ""."""
        if self.flag.description:
            return self.flag.description
        if self.flag.name in published_descriptions():
            return published_descriptions()[self.flag.name]
        return self.used_by[0].reason if self.used_by else NO_DESCRIPTION

    def to_dict(self) -> JsonObject:
        """Every field as plain data."""
        return {
            **self.flag.to_dict(),
            "known_to": self.known_to,
            "description": self.description,
            "used_by": [
                {
                    "value": used.value,
                    "level": used.level,
                    "group": used.group,
                    "generations": _names(used.generations),
                    "reason": used.reason,
                    "source": used.source,
                }
                for used in self.used_by
            ],
            "excluded": [
                {
                    "generations": _names(left_out.generations),
                    "reason": left_out.reason,
                    "source": left_out.source,
                }
                for left_out in self.excluded
            ],
        }

    def __rich__(self) -> Renderable:
        from rich.table import Table

        flag = self.flag
        table = Table(title=flag.name, title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        table.add_row("takes", flag.expects)
        default = flag.default if flag.default is not None else f"unknown: {flag.default_reason}"
        table.add_row("default", default or '""')
        table.add_row("goes to", flag.variable)
        one_compile = "yes" if flag.compile_option else "no, only for the whole process"
        table.add_row("for one compile", one_compile)
        table.add_row("does", self.description)
        table.add_row("known to", self.known_to)
        for used in self.used_by:
            where = ", ".join(_names(used.generations) or ["every generation"])
            table.add_row(
                f"level {used.level}", f"{used.value} on {where} ({used.group}); {used.source}"
            )
        for left_out in self.excluded:
            where = ", ".join(_names(left_out.generations) or ["every generation"])
            table.add_row("left out", f"on {where}: {left_out.reason}")
        return table


def explain_flag(name: str, *, registry: FlagRegistry | None = None) -> FlagExplanation:
    """Explain a flag of the installed libtpu or jaxlib.

    Raises:
        FlagError: There is no such flag; the message has the nearest names.
        MissingExtraError: It is a TPU flag, but libtpu is not installed.
    """
    registry = FlagRegistry.installed() if registry is None else registry
    flag = registry.find(name)
    versions = {"libtpu": registry.libtpu_version, "xla": registry.jaxlib_version}
    packages = {"libtpu": "libtpu", "xla": "jaxlib"}
    bundles = load_bundles()
    return FlagExplanation(
        flag=flag,
        known_to=" and ".join(f"{packages[p]} {versions[p]}" for p in flag.parsers),
        used_by=tuple(used for used in bundles.flags if used.name == flag.name),
        excluded=tuple(out for out in bundles.excluded if out.name == flag.name),
    )


def _names(generations: frozenset[str] | None) -> list[str] | None:
    return None if generations is None else sorted(generations)


TIMEOUT_S = 300.0
FEWEST_DEVICES = 4  # so that there is something to gather from


def trial_compile(
    flags: Mapping[str, object],
    generation: str,
    *,
    registry: FlagRegistry | None = None,
) -> Slice:
    """Compile a small sharded training step with `flags`, set as a job would set them.

    Flags are passed in the environment of a child and, where possible, also as compiler options,
    because libtpu checks the two in different places.

    Returns:
        The slice it was compiled for.

    Raises:
        FlagError: A name or value is wrong.
        XLACompilationError: The compiler, or its start-up, refuses the flags.
        MissingExtraError: libtpu is not installed.
    """
    registry = FlagRegistry.installed() if registry is None else registry
    checked = check_flags(flags, registry=registry)
    target = smallest_slice(generation)
    options = {name: text for name, (flag, text) in checked.items() if flag.compile_option}
    trials = [
        {"label": "the environment", "compiler_options": {}},
        {
            "label": "compiler options",
            "compiler_options": as_compiler_options(options, registry=registry),
        },
    ]
    for trial in trials:
        trial |= _topology(target)
    variables = {
        variable: format_flags(
            {name: text for name, (flag, text) in checked.items() if flag.variable == variable}
        )
        for variable in VARIABLES.values()
    }
    try:
        reply = run_child(
            PROBE,
            {"question": "compile", "trials": trials},
            timeout_s=TIMEOUT_S,
            environment=offline_environment({k: v for k, v in variables.items() if v}),
        )
    except ChildError as error:
        raise XLACompilationError(
            f"The TPU compiler crashed with these flags for {target}: {error}"
        ) from error
    for how, complaint in reply["refused"].items():
        raise XLACompilationError(
            f"The TPU compiler refuses these flags, given through {how}, for {target}: "
            f"{complaint.splitlines()[0]}"
        )
    return target


def smallest_slice(generation: str) -> Slice:
    """Return the smallest slice of a generation with enough devices to communicate."""
    name = get_chip(generation).name
    return next(target for target in list_slices(name) if target.devices >= FEWEST_DEVICES)


def _topology(target: Slice) -> JsonObject:
    return {"topology": target.libtpu_topology, "topology_options": target.libtpu_options}
