"""`tpukit dashboard`: runs, chips, pods, plans and checks in a browser, on this machine."""

from typing import Annotated

import typer

from ..plain_data import JsonMapping
from ..runtime.ranges import Range
from .values import within

Folders = Annotated[
    list[str] | None,
    typer.Argument(
        help="Folder or gs://… address with runs, plans and checks. [default: the current folder]"
    ),
]
Port = Annotated[
    int,
    typer.Option(help="Port to listen on; 0 chooses a free one.", callback=within(Range(0, 65535))),
]
Host = Annotated[str, typer.Option(help="Address to listen on; any but 127.0.0.1 needs a token.")]
TokenText = Annotated[
    str | None,
    typer.Option(
        help="Token that viewers must enter, at least 16 characters.",
        envvar="TPUKIT_DASHBOARD_TOKEN",
    ),
]
NoToken = Annotated[
    bool,
    typer.Option("--no-token", help="Require no token, even on a machine with several users."),
]
Live = Annotated[
    list[str] | None, typer.Option("--live", help="host:port of a monitor to watch; repeatable.")
]
Open = Annotated[bool, typer.Option("--open", help="Open a browser.")]


def dashboard(
    folders: Folders = None,
    port: Port = 8780,
    host: Host = "127.0.0.1",
    token: TokenText = None,
    no_token: NoToken = False,
    live: Live = None,
    open_browser: Open = False,
) -> None:
    """Show runs, chips, pods, plans and checks in a browser until Ctrl-C; works offline."""
    from ..observe.dashboard.serving import serve
    from ..records.mirror import readable

    serve(
        [readable(folder) for folder in folders or ["."]],
        host=host,
        port=port,
        token=token,
        no_token=no_token,
        open_browser=open_browser,
        fleet=_fleet,
        live=live or (),
        progress=typer.echo,
    )


def _fleet() -> JsonMapping:
    """Return pods as last seen, and their costs; no provider is called."""
    from ..pods.cost import CostReport
    from ..pods.listing import PodListing
    from ..pods.store import Store

    store = Store()
    try:
        listing = PodListing.last_seen(store)
        return {**listing.to_dict(), "costs": CostReport.of(store).to_dict()}
    finally:
        store.close()
