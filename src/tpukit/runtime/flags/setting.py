"""Check flags with the installed parsers, and set them in the right environment variable."""

import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import FlagError
from ...plain_data import JsonObject
from ...shown import Renderable, Shown
from ..environment import jax_state
from . import reading
from .flag import VARIABLES, BundleFlag, Flag, exclusive_flags
from .registry import FlagRegistry
from .syntax import merge_flags, read_values

NOT_PUBLISHED = "unknown"


@dataclass(frozen=True, slots=True)
class AppliedFlag:
    """One flag that was set, with its variable and the value it replaced."""

    name: str
    value: str
    variable: str
    default: str | None
    reason: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class SkippedFlag:
    """One flag that was not set, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class FlagRecord(Shown):
    """The changes made by `set_xla_flags` or `enable_xla_optimizations`.

    Attributes:
        applied: The flags that were set, in order.
        variables: The environment variables after the change.
        takes_effect: False when jax has already started its backends: the flags are in the
            environment, but only a new process will read them.
        skipped: Flags of a bundle that do not apply here.
        notes: Further remarks, one sentence each.
    """

    applied: tuple[AppliedFlag, ...]
    variables: Mapping[str, str]
    takes_effect: bool
    skipped: tuple[SkippedFlag, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.text import Text

        table: list[Text] = [Text("Flags set", "italic")]
        for flag in self.applied:
            default = NOT_PUBLISHED if flag.default is None else flag.default
            table.append(_whole(f"--{flag.name}={flag.value}"))
            table.append(Text(f"    {default} by default, in {flag.variable}", "dim"))
        lines = [Text(f"left out: {flag.name}: {flag.reason}", "dim") for flag in self.skipped]
        notes = [Text(note, "yellow") for note in self.notes]
        return Group(*table, *lines, *notes)


@dataclass(frozen=True)
class FlagListing(Shown):
    """Flags found by a search."""

    flags: tuple[Flag, ...]
    known_to: str
    _facts = "known_to flags"

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.text import Text

        count = f"{len(self.flags)} flag{'' if len(self.flags) == 1 else 's'} of {self.known_to}"
        lines = [Text(count, "italic")]
        for flag in self.flags:
            default = NOT_PUBLISHED if flag.default is None else flag.default or '""'
            lines.append(_whole(flag.name))
            lines.append(Text(f"    {flag.type}, {default} by default, in {flag.variable}", "dim"))
        return Group(*lines)


@dataclass(frozen=True)
class BundleListing(Shown):
    """The flags of a level on a generation with reasons, and those left out."""

    level: int
    generation: str | None
    flags: tuple[BundleFlag, ...]
    skipped: tuple[SkippedFlag, ...]

    def to_dict(self) -> JsonObject:
        """Every field as plain data."""
        return {
            "level": self.level,
            "generation": self.generation,
            "flags": [
                {"name": flag.name, "value": flag.value, "level": flag.level, "group": flag.group,
                 "reason": flag.reason, "source": flag.source}
                for flag in self.flags
            ],
            "skipped": [asdict(flag) for flag in self.skipped],
        }  # fmt: skip

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.padding import Padding
        from rich.text import Text

        where = self.generation or "every generation"
        parts: list[Any] = [
            Text(f"Level {self.level} on {where}: {len(self.flags)} flags", "italic")
        ]
        for flag in self.flags:
            value = str(flag.value).lower() if isinstance(flag.value, bool) else str(flag.value)
            parts.append(_whole(f"--{flag.name}={value}"))
            parts.append(Padding(Text(f"level {flag.level}: {flag.reason}", "dim"), (0, 0, 0, 4)))
        left_out = [Text(f"left out: {flag.name}: {flag.reason}", "dim") for flag in self.skipped]
        return Group(*parts, *left_out)


def _whole(name: str) -> Any:
    """Return a flag on its own line, never wrapped, so that it can be copied."""
    from rich.text import Text

    return Text(name, no_wrap=True, overflow="ignore")


SWITCHED_ON = frozenset({"true", "enabled"})
TOO_LATE = (
    "jax has already started its backends in this process, so these flags take effect only in a "
    "new one; call this before the first use of jax."
)


def set_xla_flags(
    flags: Mapping[str, object],
    *,
    environment: MutableMapping[str, str] | None = None,
    registry: FlagRegistry | None = None,
) -> FlagRecord:
    """Set XLA and libtpu flags, each in the variable that its parser reads.

    TPU flags go to LIBTPU_INIT_ARGS and all others to XLA_FLAGS. A flag in the wrong variable, or
    an unknown one, ends the process at start-up. Nothing is set unless every flag is valid.

    Args:
        flags: Values by name; the dashes may be left out.
        environment: Where to set them; `os.environ` by default.
        registry: The flags to check against; those installed here by default.

    Returns:
        The flags by variable, and whether they can still take effect.

    Raises:
        FlagError: A name or value is wrong; the message names all of them.
        MissingExtraError: There is a TPU flag, but libtpu is not installed.
    """
    target = os.environ if environment is None else environment
    registry = FlagRegistry.installed() if registry is None else registry
    checked = check_flags(flags, registry=registry)
    variables = _merged(target, checked)
    for text in variables.values():
        _refuse_exclusive(read_values(text))
    applied = tuple(
        AppliedFlag(name, value, flag.variable, flag.default)
        for name, (flag, value) in checked.items()
    )
    notes = list(_misplaced({**target, **variables}, registry))
    takes_effect = not (target is os.environ and jax_state() == "initialised")
    if not takes_effect:
        notes.append(TOO_LATE)
    target.update(variables)
    return FlagRecord(applied, variables, takes_effect, notes=tuple(notes))


def as_compiler_options(
    flags: Mapping[str, object], *, registry: FlagRegistry | None = None
) -> dict[str, bool | int | float | str]:
    """Return `flags` as the `compiler_options` of one `jax.jit` or `compile`, checked.

    Raises:
        FlagError: A name or value is wrong, or a flag only exists for the whole process.
    """
    registry = FlagRegistry.installed() if registry is None else registry
    checked = check_flags(flags, registry=registry)
    process_wide = [name for name, (flag, _) in checked.items() if not flag.compile_option]
    if process_wide:
        raise FlagError(
            f"{', '.join(process_wide)} cannot be set for one compile, only for the whole "
            "process; use set_xla_flags."
        )
    return {name: _typed(flag, value) for name, (flag, value) in checked.items()}


def check_flags(
    flags: Mapping[str, object], *, registry: FlagRegistry
) -> dict[str, tuple[Flag, str]]:
    """Return each flag with its value in the parser's spelling, by bare name.

    Raises:
        FlagError: A name or value is wrong; the message names all of them.
    """
    checked: dict[str, tuple[Flag, str]] = {}
    problems: list[str] = []
    for written, value in flags.items():
        name, value = _positive_form(written.lstrip("-"), value, registry)
        try:
            flag = registry.find(name)
            text = flag.render(value)
        except FlagError as error:
            problems.append(str(error))
            continue
        if checked.setdefault(name, (flag, text))[1] != text:
            problems.append(
                f"{name} is asked to be both {checked[name][1]} and {text}; keep one of them."
            )
    if not problems:
        problems = list(_parser_complaints(checked))
    if problems:
        raise FlagError(" ".join(problems))
    _refuse_exclusive({name: text for name, (_, text) in checked.items()})
    return checked


def _refuse_exclusive(values: Mapping[str, str]) -> None:
    """Refuse flags that exclude each other, whether new or already set."""
    for pair in exclusive_flags():
        if all(values.get(name) in SWITCHED_ON for name in pair.flags):
            raise FlagError(
                f"{' and '.join(pair.flags)} exclude each other: {pair.reason}; turn one off."
            )


def _positive_form(name: str, value: object, registry: FlagRegistry) -> tuple[str, object]:
    """Read `--noflag` as `--flag=false`, as libtpu does."""
    positive = registry.get(name.removeprefix("no"))
    if name in registry or positive is None or positive.type != "bool":
        return name, value
    return (positive.name, not value) if isinstance(value, bool) else (name, value)


def _parser_complaints(checked: Mapping[str, tuple[Flag, str]]) -> Iterable[str]:
    """Return the parser's complaints about values with a syntax of their own."""
    special = {name: pair for name, pair in checked.items() if pair[0].type == "other"}
    by_libtpu = [(n, text) for n, (flag, text) in special.items() if flag.parser == "libtpu"]
    by_jaxlib = [f"--{n}={text}" for n, (flag, text) in special.items() if flag.parser == "xla"]
    if by_libtpu:
        for name, said in reading.ask_libtpu(by_libtpu)[0].items():
            for value, hint in said.items():
                yield f"libtpu does not take {value!r} for {name}{': ' + hint if hint else ''}."
    if by_jaxlib:
        for text, said in zip(by_jaxlib, reading.ask_jaxlib(by_jaxlib), strict=True):
            if said:
                yield f"jaxlib does not take {text}; its value has a form of its own."


def _merged(
    environment: Mapping[str, str], checked: Mapping[str, tuple[Flag, str]]
) -> dict[str, str]:
    """Return both variables with each flag in the right one, and removed from the other."""
    variables: dict[str, str] = {}
    for parser, variable in VARIABLES.items():
        before = environment.get(variable, "")
        mine = {name: text for name, (flag, text) in checked.items() if flag.parser == parser}
        foreign = frozenset(checked) - frozenset(mine)
        after = merge_flags(before, mine, without=foreign)
        if mine or after.split() != before.split():
            variables[variable] = after
    return variables


def _misplaced(variables: Mapping[str, str], registry: FlagRegistry) -> Iterable[str]:
    """Return flags already in a variable that will end the process at start-up."""
    for parser, variable in VARIABLES.items():
        for name in read_values(variables.get(variable, "")):
            flag = registry.get(name) or registry.get(name.removeprefix("no"))
            if name in reading.PARSER_ORDERS:
                continue
            if flag is None:
                yield f"{variable} already held {name}. {registry.unknown(name)}"
            elif parser not in flag.parsers:
                yield f"{variable} already held {name}, which belongs in {flag.variable}."


def _typed(flag: Flag, text: str) -> bool | int | float | str:
    """Return values with their types, because DebugOptions refuses the text "true" for a bool."""
    if flag.type == "bool":
        return text == "true"
    if "int" in flag.type:
        return int(text)
    return float(text) if flag.type == "float" else text
