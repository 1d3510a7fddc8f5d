"""Emulated clouds by name, to rehearse a launch on: served until Ctrl-C.

A new one is a line here and a class that `Rehearsal` describes.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from ..errors import ConfigError, MissingExtraError, did_you_mean
from ..job.yaml_text import write_yaml
from ..runtime.files import temporary_folder
from ..runtime.interruption import undone_if_interrupted
from ..runtime.progress import Progress


class Rehearsal(Protocol):
    """An emulated cloud that runs."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a job's `launch:` section says to launch here."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that clients need to trust it."""
        ...

    def close(self) -> None:
        """End it, with all that runs on it."""
        ...


@dataclass(frozen=True)
class Emulator:
    """One kind of emulated cloud.

    Attributes:
        module: Where it is, in a distribution of its own: clients do without it.
        kind: The class, which takes a folder.
    """

    module: str
    kind: str
    meaning: str


EMULATORS = {
    "gcp": Emulator(
        "tpukit_emulators.rehearsal",
        "CloudTPURehearsal",
        "the Cloud TPU API (queued resources, spot, multislice), hosts reached by ssh",
    ),
    "gce": Emulator(
        "tpukit_emulators.compute_api.rehearsal",
        "ComputeEngineRehearsal",
        "Compute Engine (groups of TPU machines, TPU7x too), hosts reached by ssh",
    ),
    "gke": Emulator(
        "tpukit_emulators.kubernetes_api.rehearsal",
        "ClusterRehearsal",
        "a Kubernetes cluster with TPU nodes, JobSet and Kueue, for kubectl too",
    ),
}


def open_emulator(name: str, folder: Path) -> Rehearsal:
    """Start an emulated cloud.

    Raises:
        ConfigError: There is none of that name.
        MissingExtraError: What it is made of is not installed.
    """
    if name not in EMULATORS:
        raise ConfigError(
            f"There is no emulator of {name!r}; known are {', '.join(EMULATORS)}."
            + did_you_mean(name, EMULATORS)
        )
    one = EMULATORS[name]
    try:
        kind: Any = getattr(import_module(one.module), one.kind)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("tpukit.", "tpukit_emulators.")):
            raise
        raise MissingExtraError(
            "emulators", needed_for=f"The emulator of {name!r}", module=str(error.name)
        ) from error
    return cast("Rehearsal", kind(folder))


def serve(
    name: str,
    folder: Path | None,
    progress: Progress,
    *,
    until: threading.Event | None = None,
) -> None:
    """Serve an emulated cloud until Ctrl-C, and say how to launch on it.

    Args:
        name: Which.
        folder: Where keys and machines are kept; by default one that goes with the process.
        progress: Told the lines that a person needs.
        until: Set to end it.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        _serve(name, folder.resolve(), progress, until or threading.Event())
        return
    with temporary_folder("tpukit-emulator-") as made:
        _serve(name, made, progress, until or threading.Event())


def _serve(name: str, folder: Path, progress: Progress, until: threading.Event) -> None:
    cloud = open_emulator(name, folder)
    with undone_if_interrupted(cloud.close):
        try:
            progress(f"# {EMULATORS[name].meaning}; Ctrl-C ends it")
            for variable, value in cloud.environment.items():
                progress(f"export {variable}={value}")
            if control := getattr(cloud, "control", None):
                progress(f"# told what to do at http://{control.address}")
            for offer in getattr(cloud, "offers", ()):
                progress(f"# zone {offer}")
            progress("# in the job file:")
            progress(write_yaml({"launch": dict(cloud.settings)}).rstrip())
            until.wait()
        finally:
            cloud.close()
