"""`tpukit mcp`: an MCP server for coding agents."""

from pathlib import Path
from typing import Annotated

import typer

from .values import output_folder

AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Import models named module:function, which runs them.")
]
Write = Annotated[
    Path | None,
    typer.Option(
        "--write", help="Let clients write job files here; else nothing.", callback=output_folder
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
