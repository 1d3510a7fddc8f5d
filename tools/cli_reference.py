"""Write docs/cli.md: every command with its options, examples and exit codes, from the commands."""

from pathlib import Path
from typing import Any

import typer

from tpukit.cli.app import app
from tpukit.cli.examples import EXAMPLES

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# Command line

Written by `make docs` from the commands themselves (`tools/cli_reference.py`); a test compares.

The same words mean the same everywhere: `--on` is a slice (or generations, where several are asked
about), `--json` prints the answer as JSON on standard output, `-o` is where something is written,
`--set key=value` any key of the job. Progress goes to standard error, so an answer can be piped. A
model is named in one way: a preset (`llama3.1-8b`), a `job.yaml`, a folder with a `config.json`, or
`file.py:build`, which returns a `Workload` or a model.

Words: a figure's **origin** says who is responsible for it: `measured` (it ran), `compiler` (the
TPU compiler's own report), `model` (our arithmetic or simulation), `datasheet`, `third-party`,
`user`. **vq** is vector quantization: weights as numbers of entries in a codebook, 2 to 4 bits each
([quantization](quantization.md)). **HBM** is a chip's memory, **ICI** the links between chips of a
slice, **DCN** the network between slices, **MFU** the share of the chips' peak that a model's own
FLOPs take.

## Options of every command

{options}

Completion for your shell: `tpukit --install-completion`.

## Exit codes

| code | meaning |
|---|---|
{codes}

"""
EXIT_CODES = {
    "0": "done; of `check`: it fits; of `plan`: found",
    "1": "something is wrong and was found (`doctor`, `pods preflight`, `pods lint`), a target was "
    "missed (`quantize`), or an error that no command foresees; `--debug` shows its traceback",
    "2": "what was asked is wrong: an option, a file, a job, a flag that would stop a job",
    "3": "`check`, `compile`, `flags tune`: does not fit; `plan`: nothing meets the limits; "
    "`train`, `launch`: diverged",
    "4": "`check`, `compile`, `flags tune`, `kernel bench`: could not tell; "
    "`train`, `launch`: out of memory",
    "5": "`check --baseline`: worse than the earlier report; `launch`, `pods up`: no capacity",
    "6": "`launch`: given up after too many attempts",
    "130, 143": "Ctrl-C, SIGTERM; within 2 s, and nothing is left half written",
    "200, 201, 205": "`train`: hung; another process was lost; the storage failed for too long. "
    "A supervisor starts all three again",
}


def render() -> str:
    """The whole page."""
    top: Any = typer.main.get_command(app)
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    parts = [HEAD.replace("{options}", _options(top)).replace("{codes}", codes)]
    for name, one in sorted(_commands(top, ())):
        parts.append(_command(name, one))
    return "\n".join(parts).rstrip() + "\n"


def _commands(one: Any, words: tuple[str, ...]) -> list[tuple[str, Any]]:
    inner = getattr(one, "commands", None)
    if inner is None:
        return [(" ".join(words), one)]
    return [found for name, below in inner.items() for found in _commands(below, (*words, name))]


def _command(name: str, one: Any) -> str:
    said = " ".join((one.help or "").split("\f")[0].split())
    arguments = [_argument(param) for param in one.params if not _is_option(param)]
    lines = [f"## tpukit {name}", "", said, ""]
    lines += ["```", f"tpukit {name} {' '.join([*arguments, '[OPTIONS]'])}".strip(), "```", ""]
    if EXAMPLES.get(name):
        lines += ["Examples:", "", "```", *EXAMPLES[name], "```", ""]
    told = [
        f"| `{_argument(param)}` | {_cell(param.help)} |"
        for param in one.params
        if not _is_option(param)
    ]
    rows = _options(one)
    if told:
        lines += ["| argument | meaning |", "|---|---|", *told, ""]
    return "\n".join([*lines, rows, ""])


def _options(one: Any) -> str:
    rows = ["| option | meaning |", "|---|---|"]
    for param in one.params:
        if not _is_option(param) or param.hidden:
            continue
        spelled = ", ".join(f"`{word}`" for word in (*param.opts, *param.secondary_opts))
        default = param.default
        shown = default not in (None, False, "", [], ()) and not callable(default)
        usual = f" Default: `{default}`." if shown else ""
        rows.append(f"| {spelled} | {_cell(param.help)}{usual} |")
    return "\n".join(rows)


def _is_option(param: Any) -> bool:
    return any(word.startswith("-") for word in param.opts)


def _argument(param: Any) -> str:
    name = (param.metavar or param.name).strip("{}[]").upper()
    many = f"{name}..." if param.nargs == -1 else name
    return many if param.required else f"[{many}]"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
