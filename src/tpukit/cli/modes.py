"""Commands that answer several questions: what only one of them needs is refused by the others.

An option that is accepted and left aside makes its user believe that it counted.
"""

from collections.abc import Collection

import typer

from ..errors import ConfigError


def refuse(called: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse options that were typed.

    Args:
        called: The command as it was called.
        names: Of the command's parameters.
        why: What is said behind the option, and the way out.

    Raises:
        ConfigError: One of them was typed.
    """
    for param in called.command.params:
        source = called.get_parameter_source(param.name or "")
        if param.name in names and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"{max(param.opts, key=len)} {why}")


def refuse_all_but(called: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse every option that was typed and is none of these; see `refuse`."""
    others = [one.name for one in called.command.params if one.name and one.name not in names]
    refuse(called, others, why)
