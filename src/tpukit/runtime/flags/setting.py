"""Set flags: each is checked against the installed parsers, then all go to the right variable."""

import os
from collections.abc import Iterable, Mapping, MutableMapping

from ...errors import FlagError
from ..environment import jax_state
from . import reading
from .flag import VARIABLES, Flag
from .published import exclusive_flags
from .record import AppliedFlag, FlagRecord
from .registry import FlagRegistry
from .syntax import merge_flags, read_values

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
    """Set XLA and libtpu flags, each in the variable its parser reads.

    TPU flags go to LIBTPU_INIT_ARGS and the rest to XLA_FLAGS; a flag in the wrong one, or one
    that is not known, ends the process at start-up. Nothing is set unless everything is right.

    Args:
        flags: Values by name; the dashes may be left out.
        environment: Where to set them; `os.environ` by default.
        registry: The flags to check against; those installed here by default.

    Returns:
        What went where, and whether it can still take effect.

    Raises:
        FlagError: A name or value is wrong; the message names every one of them.
        MissingExtraError: A TPU flag was asked for and libtpu is not installed.
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
    """Each flag with its value as the parser wants it written, by bare name.

    Raises:
        FlagError: Something is wrong; one message names all of it.
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
    """Refuse flags that do not go together, whether asked for now or set before."""
    for pair in exclusive_flags():
        if all(values.get(name) in SWITCHED_ON for name in pair.flags):
            raise FlagError(
                f"{' and '.join(pair.flags)} exclude each other: {pair.reason}; turn one off."
            )


def _positive_form(name: str, value: object, registry: FlagRegistry) -> tuple[str, object]:
    """As libtpu does, read `--noflag` as `--flag=false`."""
    positive = registry.get(name.removeprefix("no"))
    if name in registry or positive is None or positive.type != "bool":
        return name, value
    return (positive.name, not value) if isinstance(value, bool) else (name, value)


def _parser_complaints(checked: Mapping[str, tuple[Flag, str]]) -> Iterable[str]:
    """For flags whose values have a shape of their own, only their parser can tell."""
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
    """Both variables with the flags in the one they belong to, and taken out of the other."""
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
    """What was already there and will end the process at start-up."""
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
    """DebugOptions refuses the text "true" where it wants a bool, so values keep their type."""
    if flag.type == "bool":
        return text == "true"
    if "int" in flag.type:
        return int(text)
    return float(text) if flag.type == "float" else text
