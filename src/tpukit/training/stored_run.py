"""A run directory in an object store: a local folder, the lease, and the upload."""

import contextlib
import logging
import os
import secrets
from collections.abc import Callable

from ..errors import TPUError
from ..records.lease import LEASES, RunLease
from ..records.mirror import RunMirror
from ..records.names import HOSTS_FOLDER
from ..records.upload import FolderUpload, Stamp, stamp_of
from ..runtime.files import folder_beside, private_folder, state_folder
from ..runtime.interruption import undone_if_interrupted
from ..runtime.multihost import smallest_of_all
from ..runtime.object_store import ObjectStore

logger = logging.getLogger(__name__)

WRITING, UNSENT = "runs-being-written", "runs-not-sent"
"""Folders of the state folder, because lines that are not sent yet exist nowhere else."""


class StoredRun:
    """The parts of a run directory in an object store: local folder, lease and upload.

    Args:
        address: The run's address.
        stack: Closes the parts, the newest first.
    """

    def __init__(self, address: str, stack: contextlib.ExitStack) -> None:
        self.store = ObjectStore(address)
        self._stack = stack
        place = private_folder(state_folder() / WRITING)
        # The folder has the run's name, which hooks show.
        own = stack.enter_context(folder_beside(place / self.store.address.split("/")[-1]))
        own.chmod(0o700)
        self.folder = private_folder(own / self.store.address.split("/")[-1])
        self.lease = RunLease(self.store, on_lost=self._lose)
        self.is_lost = False
        self._mirror = RunMirror(self.store, self.folder)
        self._pulled: dict[str, Stamp] = {}
        self._upload: FolderUpload | None = None
        stack.callback(self.lease.release)

    def pull(self, wanted: Callable[[str], bool]) -> None:
        """Copy what earlier attempts wrote."""
        self._mirror.pull(wanted)
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        self._pulled = {
            path.relative_to(self.folder).as_posix(): stamp_of(path)
            for path in files
            if not path.name.startswith(".")
        }

    def open_host(self, process: int) -> None:
        """Prepare to write the files of one process other than the first."""
        self.store.try_access(LEASES)
        self.pull(lambda file: file.startswith(f"{HOSTS_FOLDER}/{process}/"))

    def start(self) -> None:
        """Begin to send; every process must call it, because they share the lease's number."""
        epoch = -smallest_of_all(-self.lease.epoch)  # only process 0 has a lease
        upload = FolderUpload(self.folder, self.store, epoch=epoch, known=self._pulled)
        upload.start()
        self._upload = upload
        self._stack.callback(self._finish, upload)
        self._stack.enter_context(undone_if_interrupted(self.flush))

    def flush(self) -> None:
        """Send all lines now, as far as the store takes them."""
        if self._upload is not None:
            with contextlib.suppress(TPUError, OSError):
                self._upload.flush()

    def _lose(self) -> None:
        self.is_lost = True
        if self._upload is not None:
            self._upload.fence()

    def _finish(self, upload: FolderUpload) -> None:
        """Send the rest; keep the local folder if the store does not take it."""
        self._upload = None
        try:
            upload.close()
        except (TPUError, OSError) as error:
            kept = private_folder(state_folder() / UNSENT)
            kept /= f"{self.folder.name}-{os.getpid()}-{secrets.token_hex(4)}"
            self.folder.rename(kept)
            logger.error(
                "the last lines of %s could not be sent and are in %s: %s",
                self.store.address,
                kept,
                error,
            )
