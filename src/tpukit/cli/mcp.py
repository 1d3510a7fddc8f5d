"""`tpukit mcp`: an MCP server for coding agents."""

from pathlib import Path
from typing import Annotated

import typer

from .values import output_folder

AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", help="Allow models named module:function; importing them runs their code."
    ),
]
Write = Annotated[
    Path | None,
    typer.Option(
        "--write",
        help="Folder in which clients may write job files. [default: none]",
        callback=output_folder,
    ),
]


def mcp(allow_code: AllowCode = False, write: Write = None) -> None:
    """Serve plan, check, kernels, slices and flags to coding agents on standard input and output.

    An agent's configuration has the command: {"command": "tpukit", "args": ["mcp"]}.
    """
    from ..mcp.access import Access
    from ..mcp.server import make_server

    if write is not None:
        write.mkdir(parents=True, exist_ok=True)
    make_server(Access(code=allow_code, folder=write)).run()
