"""`tpukit data`: make tokens of text, and look at what a data set holds."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TextKey = Annotated[
    str, typer.Option(help="Field with the text, or with token numbers, where records have fields.")
]


@app.command("prepare")
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help=".txt, .jsonl, ArrayRecord or a Hugging Face data set on disk; gs:// too."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to make.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="'bytes', or the path of a tokenizer.json.")
    ] = None,
    end: Annotated[
        str | None, typer.Option(help="The token that ends a document, such as '</s>'.")
    ] = None,
    text_key: TextKey = "text",
    shard_tokens: Annotated[int, typer.Option(help="Tokens in a file at most.", min=1)] = 1 << 28,
    force: Annotated[bool, typer.Option(help="Replace prepared data that are there.")] = False,
    json: Json = False,
) -> None:
    """Make tokens of text, once: a folder that training maps into memory."""
    from ..training.data.prepare import Progress, prepare_tokens
    from .output import show

    with _progress(f"tokenizing {source}") as update:

        def report(now: Progress) -> None:
            update(now.read_bytes, now.total_bytes, f"{now.tokens:,} tokens")

        prepared = prepare_tokens(
            source,
            output,
            tokenizer=tokenizer,
            end=end,
            text_key=text_key,
            shard_tokens=shard_tokens,
            force=force,
            progress=report,
        )
    show(prepared, json=json)


@app.command("inspect")
def inspect(
    source: Annotated[str, typer.Argument(help="Any data that `tpukit train` takes.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="'bytes' or a tokenizer.json: to read text, or to show tokens as text."),
    ] = None,
    text_key: TextKey = "text",
    dtype: Annotated[str | None, typer.Option(help="Of .bin files: uint16, uint32, …")] = None,
    top: Annotated[int, typer.Option(help="Most frequent tokens to list.", min=1)] = 20,
    html: Annotated[Path | None, typer.Option(help="Write one page with pictures here.")] = None,
    json: Json = False,
) -> None:
    """Count the tokens of a data set: how many, which, how long documents are."""
    from ..training.data.inspection import inspect_data
    from ..training.data.inspection_page import write_inspection
    from .output import show

    with _progress(f"reading {source}") as update:
        found = inspect_data(
            source,
            tokenizer=tokenizer,
            text_key=text_key,
            dtype=dtype,
            top=top,
            progress=lambda done, total: update(done, total, f"{done:,} tokens"),
        )
    if html is not None:
        write_inspection(found, html)
    show(found, json=json)


@contextmanager
def _progress(what: str) -> Generator[Callable[[int, int, str], None]]:
    """A bar on standard error where that is a terminal; else one line at the start."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{what} ...", highlight=False, soft_wrap=True)
        yield lambda done, total, detail: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[detail]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, detail="")
        yield lambda done, total, detail: bar.update(
            task, completed=done, total=total, detail=detail
        )
