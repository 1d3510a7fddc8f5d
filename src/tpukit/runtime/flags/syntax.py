"""Parse, check and write the text of XLA_FLAGS and LIBTPU_INIT_ARGS.

The two parsers differ, as probing both has shown. libtpu splits at spaces, has no quotes, and
accepts `-x`, `--nox` and `--x value`. XLA requires `--x=value`, accepts quotes after the `=`, and
reads the variable as a file name if it does not start with a dash. Both ignore a stray word
silently.
"""

import re
from collections.abc import Container, Mapping

from ...errors import FlagError

_FLAG = re.compile(r"--?(?P<name>\w+)(?P<assignment>=(?P<value>.*))?", re.DOTALL | re.ASCII)
_SPACES = " \t\n\r\v\f"  # what the C parsers split at; a no-break space is part of a word


def parse_flags(text: str) -> dict[str, str | bool]:
    """Parse a flag string.

    Args:
        text: Such as `--xla_tpu_rwb_fusion=false --xla_dump_to='my folder'`.

    Returns:
        Values by name, in order; True for a flag written without a value.

    Raises:
        FlagError: A word is not a flag, a quote is not closed, or one flag has two values.
    """
    settings: dict[str, str | bool] = {}
    for token in _tokens(text):
        found = _FLAG.fullmatch(token)
        if found is None:
            raise FlagError(
                f"{token!r} is not a flag: XLA and libtpu stop at such a word or skip it "
                "silently; write each one as --name=value."
            )
        name, value = found["name"], _unquote(found["value"])
        if settings.setdefault(name, value) != value:
            raise FlagError(
                f"--{name} is given twice, as {settings[name]!r} and as {value!r}; keep one."
            )
    return settings


def format_flags(values: Mapping[str, str]) -> str:
    """Write flags as both parsers read them; `parse_flags` is the reverse."""
    return " ".join(f"--{name}={_quote(value)}" for name, value in values.items())


def merge_flags(existing: str, values: Mapping[str, str], *, without: Container[str] = ()) -> str:
    """Return `existing` with `values` set; other words stay as they are.

    Flags named in `without` are removed. The existing text may have any form, so nothing is
    refused.
    """
    kept: list[str] = []
    drop_value = False
    for token in _tokens(existing, strict=False):
        found = _FLAG.fullmatch(token)
        if found is None and drop_value:
            drop_value = False
            continue
        drop_value = False
        if found is not None:
            names = (found["name"], found["name"].removeprefix("no"))
            if any(name in values or name in without for name in names):
                # `--name value` is one setting for libtpu: its value goes with it.
                drop_value = found["assignment"] is None
                continue
        kept.append(token)
    added = format_flags(values)
    if not added:
        return " ".join(kept)
    behind = " ".join([*kept, added])
    # A quote that was never closed would end at one of ours: such words go behind.
    is_open = _tokens(behind, strict=False)[: len(kept)] != kept
    return " ".join([added, *kept]) if is_open else behind


def read_values(text: str) -> dict[str, str]:
    """Return the values of a flag string by name, as far as it can be parsed."""
    values: dict[str, str] = {}
    for token in _tokens(text, strict=False):
        if found := _FLAG.fullmatch(token):
            value = _unquote(found["value"])
            values[found["name"]] = value if isinstance(value, str) else "true"
    return values


def _tokens(text: str, *, strict: bool = True) -> list[str]:
    """Split at spaces, but not inside quotes that open right after the first `=` of a word."""
    tokens: list[str] = []
    at = 0
    while at < len(text):
        if text[at] in _SPACES:
            at += 1
            continue
        start = at
        while at < len(text) and text[at] not in _SPACES:
            if text[at] in "'\"" and at > start and text.find("=", start, at) == at - 1:
                close = text.find(text[at], at + 1)
                if close >= 0:
                    at = close
                elif strict:
                    raise FlagError(
                        f"a quote is not closed in {text[start:]!r}; close it, or leave it out."
                    )
            at += 1
        tokens.append(text[start:at])
    return tokens


def _unquote(value: str | None) -> str | bool:
    if value is None:
        return True
    quoted = len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]
    return value[1:-1] if quoted else value


def _quote(value: str) -> str:
    return f"'{value}'" if any(space in value for space in _SPACES) else value
