"""Set the environment variables that suit the machine before jax starts, and report them."""

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ConfigError, did_you_mean
from ..hardware.detect import Accelerators, detect_accelerators
from ..shown import Renderable, Shown
from .versions import is_any_installed

Platform = Literal["tpu", "gpu", "cpu"]
Outcome = Literal["set", "kept", "too late"]

# jax's names for a platform, as they come first in JAX_PLATFORMS.
_PLATFORM_OF_JAX_NAME: Mapping[str, Platform] = {
    "tpu": "tpu",
    "cuda": "gpu",
    "rocm": "gpu",
    "gpu": "gpu",
    "cpu": "cpu",
}
JaxState = Literal["absent", "imported", "initialised"]


@dataclass(frozen=True)
class EnvironmentSetting:
    """A variable's value and the reason for it."""

    value: str
    why: str


@dataclass(frozen=True)
class VariableChange:
    """What happened to one variable."""

    name: str
    before: str | None
    after: str | None
    outcome: Outcome
    why: str


@dataclass(frozen=True)
class EnvironmentReport(Shown):
    """The detected machine, and the changes of `configure_tpu_environment`."""

    platform: Platform
    evidence: tuple[str, ...]
    jax_state: JaxState
    changes: tuple[VariableChange, ...]

    @property
    def too_late(self) -> tuple[VariableChange, ...]:
        """Variables that can no longer be changed, because jax has opened its devices."""
        return tuple(change for change in self.changes if change.outcome == "too late")

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title="environment", title_justify="left", show_edge=False)
        for heading in ("variable", "outcome", "before", "after", "why"):
            table.add_column(heading, overflow="fold")
        for change in self.changes:
            row = (change.name, change.outcome, change.before or "—", change.after or "—")
            table.add_row(*map(Text, (*row, change.why)))
        head = Text(f"platform {self.platform}: {'; '.join(self.evidence)}. jax: {self.jax_state}")
        return Group(head, table)


def environment_for(
    platform: Platform, *, allocator: str | None = None, preallocate: bool | None = None
) -> dict[str, EnvironmentSetting]:
    """Return the variables that suit a platform, each with its reason; set nothing.

    Args:
        platform: "tpu", "gpu" or "cpu".
        allocator: Value of XLA_PYTHON_CLIENT_ALLOCATOR: "platform", "bfc" or "cuda_async".
        preallocate: Value of XLA_PYTHON_CLIENT_PREALLOCATE.

    Raises:
        ConfigError: The platform is not one of those.
    """
    if platform not in get_args(Platform):
        raise ConfigError(
            f"platform is {platform!r}; it must be 'tpu', 'gpu' or 'cpu'."
            + did_you_mean(str(platform), get_args(Platform))
        )
    settings: dict[str, EnvironmentSetting] = {}
    if platform == "tpu":
        settings["JAX_PLATFORMS"] = EnvironmentSetting(
            "tpu,cpu",
            "a missing TPU is an error, not a silent run on CPU; host arrays stay possible",
        )
    elif platform == "gpu":
        settings["JAX_PLATFORMS"] = EnvironmentSetting(
            "cuda,cpu", "libtpu is not loaded; a missing GPU is an error, not a silent run on CPU"
        )
    else:
        settings["JAX_PLATFORMS"] = EnvironmentSetting(
            "cpu", "libtpu is not loaded, so its lock file and its start-up cannot get in the way"
        )
    if platform != "tpu":
        # NO_GCE_CHECK would be next, but on a cloud VM it also takes away storage credentials.
        settings["TPU_SKIP_MDS_QUERY"] = EnvironmentSetting(
            "1", "off a TPU VM libtpu would ask the metadata server, for minutes"
        )
    if allocator is not None:
        settings["XLA_PYTHON_CLIENT_ALLOCATOR"] = EnvironmentSetting(
            allocator, "asked for; only the GPU client reads it"
        )
    if preallocate is not None:
        settings["XLA_PYTHON_CLIENT_PREALLOCATE"] = EnvironmentSetting(
            str(preallocate).lower(), "asked for; only the GPU client reads it"
        )
    return settings


def configure_tpu_environment(
    *,
    environment: MutableMapping[str, str] | None = None,
    platform: Platform | None = None,
    allocator: str | None = None,
    preallocate: bool | None = None,
) -> EnvironmentReport:
    """Detect a TPU, GPU or CPU machine and set the environment variables that suit it.

    This loads no libtpu, opens no device and uses no network, so it cannot hang. A variable that is
    already set is kept. After jax has opened its devices nothing is set, and the report lists what
    is too late.

    Args:
        environment: The environment to change; by default the process's own.
        platform: The platform, instead of detecting it.
        allocator: Value of XLA_PYTHON_CLIENT_ALLOCATOR.
        preallocate: Value of XLA_PYTHON_CLIENT_PREALLOCATE.

    Raises:
        ConfigError: `platform` is not "tpu", "gpu" or "cpu".
    """
    target = os.environ if environment is None else environment
    found, evidence = _choose_platform(target, platform)
    state = jax_state()
    changes: list[VariableChange] = []
    wanted = environment_for(found, allocator=allocator, preallocate=preallocate)
    for name, setting in wanted.items():
        before = target.get(name)
        if before is not None:
            why = "already so" if before == setting.value else "you set it; " + setting.why
            changes.append(VariableChange(name, before, before, "kept", why))
        elif state == "initialised" and target is os.environ:
            why = f"{setting.value!r} would be right, but jax has opened its devices; "
            why += "call this before anything uses jax"
            changes.append(VariableChange(name, None, None, "too late", why))
        else:
            target[name] = setting.value
            changes.append(VariableChange(name, None, setting.value, "set", setting.why))
            if name == "JAX_PLATFORMS" and state == "imported" and target is os.environ:
                _tell_imported_jax(setting.value)
    return EnvironmentReport(found, evidence, state, tuple(changes))


def open_devices() -> list[Any]:
    """Return jax's devices, after choosing jax's platform unless it is already chosen.

    By itself jax loads libtpu on machines without a TPU too, which prints a page of errors about
    worker hostnames.
    """
    import jax

    chosen = os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]  made at run time
    if not chosen and jax_state() != "initialised":
        configure_tpu_environment()
    return jax.devices()


def _tell_imported_jax(platforms: str) -> None:
    # jax read the variable when it was imported; its own setting still counts until a device opens.
    import jax

    jax.config.update("jax_platforms", platforms)


def _choose_platform(
    environment: Mapping[str, str], asked: Platform | None
) -> tuple[Platform, tuple[str, ...]]:
    if asked is not None:
        return asked, ("you asked for it",)
    here = detect_accelerators(environment=environment)
    wanted = environment.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    if wanted in _PLATFORM_OF_JAX_NAME:
        evidence = f"JAX_PLATFORMS={environment['JAX_PLATFORMS']} is set"
        return _PLATFORM_OF_JAX_NAME[wanted], (evidence, *here.evidence)
    return _platform_here(here)


def _platform_here(here: Accelerators) -> tuple[Platform, tuple[str, ...]]:
    if here.kind == "tpu" and not is_any_installed("libtpu"):
        return "cpu", (*here.evidence, "libtpu is not installed: pip install 'tpukit[tpu]'")
    if here.kind == "gpu" and not is_any_installed("jax-cuda"):
        return "cpu", (
            *here.evidence,
            "jax's CUDA plugin is not installed: pip install 'jax[cuda13]'",
        )
    return here.kind, here.evidence


def jax_state() -> JaxState:
    """Return whether jax is absent, imported, or has opened its devices."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None:
        return "absent"
    return "initialised" if bridge.backends_are_initialized() else "imported"
