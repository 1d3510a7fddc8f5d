"""Somebody's own function as a command's target: its arguments are typed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..compiler import CompileRequest
    from ..runtime.progress import Progress


def lower_function(
    target: str,
    asked: dict[str, Any],
    arg: list[str],
    donate: list[int] | None,
    *,
    progress: "Progress",
) -> "CompileRequest":
    """Lower a function for the slice that was typed.

    Raises:
        ConfigError: Something was typed that only a job has, or no slice.
    """
    from ..compiler.program.entry import load_function, parse_argument
    from ..compiler.program.request import make_request
    from ..errors import ConfigError
    from ..runtime.environment import configure_tpu_environment

    only_for_jobs = [name for name in asked if name not in ("on", "options")]
    if only_for_jobs or "on" not in asked:
        wrong = f"takes no {', '.join(only_for_jobs)}" if only_for_jobs else "needs --on"
        raise ConfigError(f"a function {wrong}; write --on SLICE and its arguments as --arg.")
    configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
    return make_request(
        load_function(target),
        asked["on"],
        *[parse_argument(text) for text in arg],
        donate_argnums=donate or (),
        options=asked.get("options"),
        progress=progress,
    )
