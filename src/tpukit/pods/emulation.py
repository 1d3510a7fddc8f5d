"""Emulated clouds by name, to rehearse a launch on. Each is served until Ctrl-C.

To add one, add a line here and a class that implements `Rehearsal`.
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
    """A running emulated cloud."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Values for a job's `launch:` section."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that clients need."""
        ...

    def close(self) -> None:
        """Stop the cloud and everything that runs on it."""
        ...


@dataclass(frozen=True)
class Emulator:
    """A kind of emulated cloud.

    Attributes:
        module: Module of the emulator, in the separate distribution `tpukit_emulators`.
        kind: Name of its class, which takes a folder.
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
        ConfigError: No emulator has that name.
        MissingExtraError: The emulators are not installed.
    """
    if name not in EMULATORS:
        raise ConfigError(
            f"There is no emulator of {name!r}; known are {', '.join(EMULATORS)}."
            + did_you_mean(name, EMULATORS)
        )
    emulator = EMULATORS[name]
    try:
        kind: Any = getattr(import_module(emulator.module), emulator.kind)
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
    """Serve an emulated cloud until Ctrl-C, and print how to launch on it.

    Args:
        name: Name of the emulator.
        folder: Folder for keys and machines; by default a temporary one.
        progress: Called with each line to print.
        until: Event that ends it.
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
