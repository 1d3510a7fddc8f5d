"""What a hook is, and hooks by name."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ...errors import ConfigError, did_you_mean


class RunEnd(Protocol):
    """How a run ended, as plain data."""

    def to_dict(self) -> dict[str, Any]:
        """Losses, times and where they came from."""
        ...


class TrainingHook(Protocol):
    """Observer of a run; called on process 0 only, between steps, so it must not wait."""

    def on_start(self, run_dir: Path, identity: Mapping[str, Any]) -> None:
        """The run is about to take its first step; `identity` says which, and how it learns."""
        ...

    def on_record(self, record: Mapping[str, Any]) -> None:
        """A record was written to metrics.jsonl; `record["step"]` is its step."""
        ...

    def on_end(self, result: "RunEnd | None") -> None:
        """The run has ended; None when by an error."""
        ...


def make_hooks(wanted: Iterable[str | TrainingHook]) -> list[TrainingHook]:
    """The hooks that are wanted, those called by their names made.

    Raises:
        ConfigError: There is none of that name.
    """
    from .profile import ProfileHook
    from .tensorboard import TensorBoardHook
    from .wandb import WandbHook

    known = {"tensorboard": TensorBoardHook, "wandb": WandbHook, "profile": ProfileHook}
    hooks: list[TrainingHook] = []
    for name in wanted:
        if not isinstance(name, str):
            hooks.append(name)
            continue
        if name not in known:
            raise ConfigError(
                f"no hook is called '{name}'; there are {', '.join(known)}."
                + did_you_mean(name, known)
            )
        hooks.append(known[name]())
    return hooks
