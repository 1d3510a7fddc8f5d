"""Debugging mode: NaN and Inf checks, no jit, a log of compiles; and the way back."""

from dataclasses import dataclass
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
    """Debugging is on. Call `restore()`, or use it in a `with` block, to turn it off again."""

    before: dict[str, Any]

    def restore(self) -> None:
        """Put jax's settings back to what they were."""
        import jax

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
    # What has run before is called on a fast path that looks at no setting any more.
    jax.clear_caches()
    return DebugMode(before)
