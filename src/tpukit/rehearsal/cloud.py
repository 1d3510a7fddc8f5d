"""The emulated cloud that a rehearsal launches on, for as long as the rehearsal lasts."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..hardware import Slice
from ..pods.emulation import EMULATORS, open_emulator
from ..pods.store import Store
from ..runtime.files import cache_folder, temporary_folder
from ..runtime.interruption import undone_if_interrupted

if TYPE_CHECKING:  # an extra
    from tpukit_emulators.machine_rehearsal import MachineAPI, MachineRehearsal

# Queued resources end with v6e; Google's way to later chips is Compute Engine.
_BY_CHIP = {"7x": "gce"}
_USUAL = "gcp"
# gRPC reads whom to trust once a process, so all clouds of one have the same authority.
_AUTHORITY_FILES = ("ca.pem", "ca.key")
_authority: dict[str, bytes] = {}


@dataclass(frozen=True)
class EmulatedCloud:
    """A cloud on this machine, and a hand on its fate.

    Attributes:
        provider: Whose API it speaks.
        store: What launches remember; of this rehearsal alone.
    """

    provider: str
    store: Store
    inside: "MachineRehearsal[MachineAPI]"

    @property
    def meaning(self) -> str:
        """What is emulated, in words."""
        return EMULATORS[self.provider].meaning

    def launch_section(self, slice: Slice) -> dict[str, Any]:
        """Return what a job's `launch:` says to run here on capacity that may be taken away."""
        zones = [
            zone for zone, has in self.inside.world.zones.items() if slice.chip.name in has.capacity
        ]
        return {
            **self.inside.settings,
            "zone": zones[0],
            "zones": zones[1:],
            "spot": True,
            # Hosts have homes of their own, and what this machine compiled is to be found again.
            "environment": {"TPUKIT_CACHE_DIR": str(cache_folder().absolute())},
        }

    def preempt(self, pod: str, *, notice_s: float) -> bool:
        """Take a pod away after a notice; tell whether there was one to take."""
        return self.inside.api.cloud.preempt(pod, node=None, notice_s=notice_s)

    @property
    def leftovers(self) -> list[str]:
        """Names of what the cloud still holds."""
        return [held.name for held in self.inside.world.holdings()]


@contextmanager
def emulated_cloud(slice: Slice) -> Generator[EmulatedCloud]:
    """Serve a cloud that has such slices until the block ends; nothing of it is left then.

    Raises:
        MissingExtraError: What emulators are made of is not installed.
    """
    provider = _BY_CHIP.get(slice.chip.name, _USUAL)
    # Or gRPC would tell the terminal, in its own words, of every connection that Ctrl-C ends.
    with _variables({"GRPC_VERBOSITY": "NONE"}), temporary_folder("tpukit-rehearsal-") as folder:
        _restore_authority(folder / "cloud")
        inside = cast("MachineRehearsal[MachineAPI]", open_emulator(provider, folder / "cloud"))
        _keep_authority(folder / "cloud")
        # Keys to log in with, and all else that is remembered, are of this rehearsal alone.
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
    """Let a second rehearsal of this process have the certificates of the first."""
    folder.mkdir(mode=0o700)
    for name, content in _authority.items():
        from tpukit_emulators.identity import write_secret

        write_secret(folder / name, content)


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Generator[None]:
    """Set variables of this process for the block: clients read whom to trust from them."""
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
