"""The emulated cloud of a rehearsal."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..hardware import Slice
from ..plain_data import JsonObject
from ..pods.emulation import EMULATORS, open_emulator
from ..pods.store import Store
from ..runtime.files import cache_folder, temporary_folder
from ..runtime.interruption import undone_if_interrupted

if TYPE_CHECKING:  # an extra
    from tpukit_emulators.machine_rehearsal import MachineAPI, MachineRehearsal

# gRPC reads trusted certificates once per process, so all clouds of a process share an authority.
_AUTHORITY_FILES = ("ca.pem", "ca.key")
_authority: dict[str, bytes] = {}


@dataclass(frozen=True)
class EmulatedCloud:
    """A cloud emulated on this machine, whose pods can be preempted on request.

    Attributes:
        provider: The provider whose API it emulates.
        store: The launch state of this rehearsal alone.
    """

    provider: str
    store: Store
    inside: "MachineRehearsal[MachineAPI]"

    @property
    def meaning(self) -> str:
        """The emulated cloud as text."""
        return EMULATORS[self.provider].meaning

    def launch_section(self, slice: Slice) -> JsonObject:
        """Return a job's `launch:` section for preemptible capacity of this cloud."""
        zones = [
            zone for zone, has in self.inside.world.zones.items() if slice.chip.name in has.capacity
        ]
        return {
            **self.inside.settings,
            "zone": zones[0],
            "zones": zones[1:],
            "spot": True,
            # Hosts have home folders of their own, but should use this machine's compile cache.
            "environment": {"TPUKIT_CACHE_DIR": str(cache_folder().absolute())},
        }

    def preempt(self, pod: str, *, notice_s: float) -> bool:
        """Preempt a pod after a notice; return whether there was a pod."""
        return self.inside.api.cloud.preempt(pod, node=None, notice_s=notice_s)

    @property
    def leftovers(self) -> list[str]:
        """Names of the resources that still exist."""
        return [held.name for held in self.inside.world.holdings()]


@contextmanager
def emulated_cloud(slice: Slice) -> Generator[EmulatedCloud]:
    """Emulate a cloud with slices of this kind until the block ends, and remove it then.

    Raises:
        MissingExtraError: What emulators are made of is not installed.
    """
    # Chips that the Cloud TPU API does not offer come through Compute Engine.
    provider = "gcp" if slice.chip.tpu_api_type else "gce"
    # Otherwise gRPC logs every connection that Ctrl-C ends to the terminal.
    with _variables({"GRPC_VERBOSITY": "NONE"}), temporary_folder("tpukit-rehearsal-") as folder:
        _restore_authority(folder / "cloud")
        inside = cast("MachineRehearsal[MachineAPI]", open_emulator(provider, folder / "cloud"))
        _keep_authority(folder / "cloud")
        # Login keys and other state are of this rehearsal alone.
        own = {**inside.environment, "TPUKIT_STATE_DIR": str(folder / "state")}
        with undone_if_interrupted(inside.close), _variables(own):
            store = Store()
            try:
                yield EmulatedCloud(provider, store, inside)
            finally:
                store.close()
                inside.close()


def _keep_authority(folder: Path) -> None:
    for name in _AUTHORITY_FILES:
        if (file := folder / name).is_file():
            _authority[name] = file.read_bytes()


def _restore_authority(folder: Path) -> None:
    """Use the certificates of an earlier rehearsal of this process."""
    folder.mkdir(mode=0o700)
    for name, content in _authority.items():
        from tpukit_emulators.identity import write_secret

        write_secret(folder / name, content)


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Generator[None]:
    """Set environment variables for the block; clients read trusted certificates from them."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
