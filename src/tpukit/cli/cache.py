"""`tpukit cache`: show or clear the cache of compiled programs."""

import typer

from .job_options import Json

app = typer.Typer(no_args_is_help=True)


@app.command("show")
def show_cache(json: Json = False) -> None:
    """Show how many compiles are kept, how large they are and where."""
    from ..compiler.cache import CompileCache
    from .output import show

    show(CompileCache.default().summary(), json=json)


@app.command("clear")
def clear_cache(json: Json = False) -> None:
    """Delete every compile that is kept; the next check compiles again."""
    from ..compiler.cache import CompileCache
    from .output import show

    cache = CompileCache.default()
    cache.clear()
    show(cache.summary(), json=json)
