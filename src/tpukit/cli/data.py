"""`tpukit data`: tokenize text, and inspect data sets."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.ranges import COUNT
from .job_options import Json
from .values import output_file, output_folder, within

if TYPE_CHECKING:
    from ..runtime.progress import Progress

app = typer.Typer(no_args_is_help=True)

TextKey = Annotated[
    str, typer.Option(help="Field of a record that contains the text or the token ids.")
]


@app.command("prepare")
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help=".txt, .jsonl, ArrayRecord or a Hugging Face data set on disk or in gs://."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder for the prepared data.", callback=output_folder
        ),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="'bytes', or the path of a tokenizer.json file.")
    ] = None,
    end: Annotated[
        str | None, typer.Option(help="The token that ends a document, such as '</s>'.")
    ] = None,
    text_key: TextKey = "text",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Records contain chat messages; train only on the answers, "
            "formatted by the chat template.",
        ),
    ] = False,
    shard_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens per file.", callback=within(COUNT))
    ] = 1 << 28,
    force: Annotated[bool, typer.Option(help="Replace existing prepared data.")] = False,
    json: Json = False,
) -> None:
    """Tokenize text once, into a folder that training maps into memory."""
    from ..training.data.prepare import prepare_tokens
    from .output import show

    with _bar(f"tokenizing {source}") as progress:
        prepared = prepare_tokens(
            source,
            output,
            tokenizer=tokenizer,
            end=end,
            text_key=text_key,
            shard_tokens=shard_tokens,
            force=force,
            chat=chat,
            progress=progress,
        )
    show(prepared, json=json)


@app.command("inspect")
def inspect(
    source: Annotated[str, typer.Argument(help="Any data that `tpukit train` takes.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="'bytes' or a tokenizer.json file, to read text or to show tokens as text."
        ),
    ] = None,
    text_key: TextKey = "text",
    dtype: Annotated[
        str | None, typer.Option(help="Integer type of .bin files: uint16, uint32, …")
    ] = None,
    top: Annotated[
        int, typer.Option(help="Number of frequent tokens to list.", callback=within(COUNT))
    ] = 20,
    html: Annotated[
        Path | None,
        typer.Option(help="File for an HTML page with charts.", callback=output_file),
    ] = None,
    json: Json = False,
) -> None:
    """Count the tokens of a data set: how many, which, how long documents are."""
    from ..training.data.inspection import inspect_data, write_inspection
    from .output import show

    with _bar(f"reading {source}") as progress:
        found = inspect_data(
            source,
            tokenizer=tokenizer,
            text_key=text_key,
            dtype=dtype,
            top=top,
            progress=progress,
        )
    if html is not None:
        write_inspection(found, html)
    show(found, json=json)


@contextmanager
def _bar(what: str) -> "Generator[Progress]":
    """Return a progress bar on a terminal; elsewhere print one line at the start."""
    from rich.progress import BarColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from ..runtime.progress import Counted, silent
    from ..terminal import open_console, text_column

    console = open_console(stderr=True)
    if not console.is_terminal:
        console.print(f"{what} ...", highlight=False, soft_wrap=True)
        yield silent
        return
    columns = (text_column("{task.description}"), BarColumn(), text_column("{task.fields[detail]}"))
    with Bars(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        task = bars.add_task(what, total=None, detail="")

        def draw(line: str) -> None:
            if isinstance(line, Counted):
                bars.update(task, completed=line.done, total=line.total)
            bars.update(task, detail=line)

        yield draw
