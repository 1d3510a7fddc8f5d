"""Keys for ssh: tpukit's own pair, which hosts of cloud pods let in, and the keys of the hosts."""

import logging
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ....errors import ProviderError, TPUError
from ....runtime.files import private_folder, state_folder, temporary_folder, write_text
from ...pod import Host, Pod

logger = logging.getLogger(__name__)

_NAME = "id_ed25519"
_AT_ONCE = 16


@dataclass(frozen=True)
class Key:
    """A key pair in files; the private one is its owner's alone (mode 600)."""

    private_file: Path
    public: str

    def metadata_line(self, user: str) -> str:
        """Return it as Google Cloud's metadata `ssh-keys` takes it."""
        return f"{user}:{self.public} {user}"


def own_key(folder: Path | None = None) -> Key:
    """Return the key pair in a folder of the state folder, which is made where there is none.

    Raises:
        ProviderError: It cannot be made.
    """
    folder = folder or state_folder() / "ssh"
    if not (folder / _NAME).exists():
        _make(folder)
    kind, text, *_ = (folder / f"{_NAME}.pub").read_text().split()
    return Key(folder / _NAME, f"{kind} {text}")


def known_hosts(pod: str, created_at: float) -> Path:
    """Return the file that remembers the hosts of one pod.

    Addresses of cloud machines go round: the next pod has the same one with another key. So each
    pod has a file of its own, in which a host keeps its key as long as the pod lives.
    """
    folder = state_folder() / "known_hosts"
    private_folder(folder)
    return folder / f"{pod}.{int(created_at)}"


def learn_hosts(pod: Pod, ask: Callable[[Host], Sequence[str]]) -> Path | None:
    """Return a file with the keys of a pod's hosts, as the provider's own channel tells them.

    Each line begins with the host's name, which ssh is given as `HostKeyAlias`.

    Args:
        pod: A ready pod.
        ask: Returns the keys of a host ("ssh-ed25519 AAAA…"); none where it has told none yet.

    Returns:
        None where the keys of some host are not to be had: then its first connection is trusted.
    """
    remembered = known_hosts(pod.name, pod.created_at or 0.0)
    file = remembered.with_name(f"{remembered.name}.told")
    if file.exists():
        return file
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            told = list(pool.map(ask, pod.hosts))
        except TPUError as error:
            logger.debug("The provider tells no host keys of %s: %s", pod.name, error)
            return None
    if not all(told):
        return None
    lines = [
        f"{host.name} {key}\n" for host, keys in zip(pod.hosts, told, strict=True) for key in keys
    ]
    write_text(file, "".join(lines))
    return file


def forget_hosts(pod: str) -> None:
    """Remove what is remembered of a pod's hosts."""
    for file in (state_folder() / "known_hosts").glob(f"{pod}.*"):
        file.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    private_folder(folder.parent)
    # In a folder beside it, moved as a whole: two commands that start at once agree on one pair.
    with temporary_folder(".ssh-", inside=folder.parent) as made:
        fresh = made / "ssh"
        fresh.mkdir(mode=0o700)
        arguments = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tpukit"]
        try:
            subprocess.run(
                [*arguments, "-f", str(fresh / _NAME)],
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise ProviderError(
                f"No ssh key could be made ({error}); install OpenSSH's client (ssh-keygen)."
            ) from error
        try:
            fresh.rename(folder)
        except OSError:
            if not (folder / _NAME).exists():
                raise
