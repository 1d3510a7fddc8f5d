"""Debugging mode of jax: NaN and Inf checks, no jit, a log of compiles."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

DEBUG_SETTINGS = {
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_log_compiles": True,
}


@dataclass(frozen=True)
class DebugMode:
    """Debugging mode is on; `restore()`, or the end of a `with` block, turns it off."""

    before: dict[str, Any]
    here: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)

    def restore(self) -> None:
        """Restore jax's earlier settings."""
        import jax

        self.here.close()
        for name, value in self.before.items():
            jax.config.update(name, value)

    def __enter__(self) -> "DebugMode":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()


def enable_debugging_mode() -> DebugMode:
    """Make jax check every value for NaN and Inf, run without jit and log each compile."""
    import jax

    before = {name: getattr(jax.config, name) for name in DEBUG_SETTINGS}
    for name, value in DEBUG_SETTINGS.items():
        jax.config.update(name, value)
    # jax turns the checks off and on again inside some operations, which leaves them off in this
    # thread unless they were turned on in this thread.
    here = ExitStack()
    here.enter_context(jax.debug_nans(True))
    here.enter_context(jax.debug_infs(True))
    return DebugMode(before, here)
