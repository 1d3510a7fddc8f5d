"""The command line as data: every command by its words, found in the application itself."""

import typer

from tpukit.cli.app import app


def every_command():
    """Return each command by the words that call it, such as "data prepare"."""
    found = {}

    def walk(command, words):
        if hasattr(command, "commands"):
            for name, inner in command.commands.items():
                walk(inner, [*words, name])
        else:
            found[" ".join(words)] = command

    walk(typer.main.get_command(app), [])
    return found
