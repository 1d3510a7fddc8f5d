"""Start workers with the system's ssh, so that its configuration, agents and proxies apply."""

import logging
import math
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ....errors import ConfigError, ProviderError, TPUError
from ....runtime.address import Address
from ....runtime.files import private_folder, state_folder, temporary_folder, write_text
from ...gang.transport import WorkerProcess, any_port
from ...pod import Host, Pod
from ...worker.order import bootstrap

logger = logging.getLogger(__name__)

_NAME = "id_ed25519"
_AT_ONCE = 16


@dataclass(frozen=True)
class Key:
    """A key pair in files; only the owner can read the private key (mode 600)."""

    private_file: Path
    public: str

    def metadata_line(self, user: str) -> str:
        """Return the key in the format of Google Cloud's metadata `ssh-keys`."""
        return f"{user}:{self.public} {user}"


def own_key(folder: Path | None = None) -> Key:
    """Return the key pair in a folder of the state folder, and create it if it is missing.

    Raises:
        ProviderError: The key pair cannot be created.
    """
    folder = folder or state_folder() / "ssh"
    if not (folder / _NAME).exists():
        _make(folder)
    kind, text, *_ = (folder / f"{_NAME}.pub").read_text().split()
    return Key(folder / _NAME, f"{kind} {text}")


def known_hosts(pod: str, created_at: float) -> Path:
    """Return the known-hosts file of one pod.

    Cloud addresses are reused by machines with other keys. So each pod has its own file, in which a
    host keeps its key as long as the pod lives.
    """
    folder = state_folder() / "known_hosts"
    private_folder(folder)
    return folder / f"{pod}.{int(created_at)}"


def learn_hosts(pod: Pod, ask: Callable[[Host], Sequence[str]]) -> Path | None:
    """Return a file with the keys of a pod's hosts, from the provider's own API.

    Each line begins with the host's name, which ssh gets as `HostKeyAlias`.

    Args:
        pod: A ready pod.
        ask: Returns the keys of a host ("ssh-ed25519 AAAA…"), or none if it has not published any.

    Returns:
        None where the keys of some host are not to be had: None if the keys of some host are
            missing; its first connection is then trusted.
    """
    remembered = known_hosts(pod.name, pod.created_at or 0.0)
    file = remembered.with_name(f"{remembered.name}.told")
    if file.exists():
        return file
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            published = list(pool.map(ask, pod.hosts))
        except TPUError as error:
            logger.debug("The provider has no host keys for %s: %s", pod.name, error)
            return None
    if not all(published):
        return None
    lines = [
        f"{host.name} {key}\n"
        for host, keys in zip(pod.hosts, published, strict=True)
        for key in keys
    ]
    write_text(file, "".join(lines))
    return file


def forget_hosts(pod: str) -> None:
    """Remove the known-hosts file of a pod."""
    for file in (state_folder() / "known_hosts").glob(f"{pod}.*"):
        file.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    private_folder(folder.parent)
    # Created in a folder that is then moved, so that two concurrent commands share one pair.
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


CONNECT_S = 10
ALIVE_S = 15
"""Seconds between two questions whether a host still answers."""
WAIT_S = 600.0
TRY_S = 10.0
REFUSED_KEY = "Host key verification failed"
HOME = "~/tpukit"


class SSHTransport:
    """Starts agents on hosts, which end when their connection does.

    Args:
        folder: Folder for a pod's files, in the user's home on the hosts.
        user: User on the hosts, if ssh's configuration does not set it.
        key_file: The only key to offer; None leaves the choice to ssh.
        known_hosts: File for the keys of new hosts; None uses ssh's own file and rules.
        told_hosts: File with the keys of all hosts by name, from a trusted source, used instead of
            `known_hosts`. Other keys are refused.
        config: ssh configuration file to use instead of the user's.
        connect_s: How long a host may refuse connections, for example while it boots.
        silent_s: How long a connection outlives a lost network.

    Attributes:
        agents: The connections started so far.
    """

    shares_files = False
    unreachable_code = 255

    def __init__(
        self,
        folder: str,
        *,
        user: str | None = None,
        key_file: Path | None = None,
        known_hosts: Path | None = None,
        told_hosts: Path | None = None,
        config: str | None = None,
        connect_s: float = WAIT_S,
        silent_s: float = WAIT_S,
    ) -> None:
        self._folder, self.connect_s = folder, connect_s
        self._names_hosts = told_hosts is not None
        self._options = _options(user, key_file, known_hosts, told_hosts, config, silent_s)
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, host: Host) -> WorkerProcess:
        """Start an agent that waits for its order; return before it is connected."""
        started = subprocess.Popen(
            self.command(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which stops workers in order
        )
        self.agents.append(started)
        return started

    def try_host(self, host: Host) -> str | None:
        """Log in and look for Python; return an error message, or None."""
        argv = ["ssh", *self._to(host)]
        try:
            tried = subprocess.run(
                [*argv, "python3 -V"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TRY_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {TRY_S:g} s"
        except OSError as error:
            return f"ssh cannot be started ({error.strerror})"
        if tried.returncode:
            lines = tried.stderr.decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else f"exit code {tried.returncode}"
        return None

    def command(self, host: Host) -> list[str]:
        """Return the command that runs an agent on a host, as an argument list.

        The remote end passes the text after the host's name to a shell, so that text is constant.
        """
        return ["ssh", *self._to(host), shlex.join(bootstrap())]

    def login(self, host: Host) -> list[str]:
        """Return the command with which a person logs in to a host, as an argument list."""
        # For ssh, the first value of an option applies, but the last terminal switch.
        options, destination = self._options_for(host), _destination(host.address)
        return ["ssh", "-o", "BatchMode=no", *options, "-t", *destination]

    def _options_for(self, host: Host) -> list[str]:
        alias = ["-o", f"HostKeyAlias={host.name}"] if self._names_hosts else []
        return [*self._options, *alias]

    def _to(self, host: Host) -> list[str]:
        return [*self._options_for(host), *_destination(host.address)]

    def is_worth_retrying(self, last_words: str) -> bool:
        """Return whether a host may accept a connection later; one with a wrong key never does."""
        return REFUSED_KEY not in last_words

    def folder(self, host: Host) -> str:
        """Return the host's folder in which a bundle is unpacked and the command runs."""
        return f"{HOME}/{self._folder}"

    def coordinator(self, hosts: Sequence[Host]) -> str:
        """Return `host:port` for jax's coordinator on the first host, with a new port each time."""
        first = hosts[0].internal_address or split_address(hosts[0].address)[1]
        return str(Address(first, any_port()))


def split_address(address: str) -> tuple[str | None, str, int | None]:
    """Return user, host and port of `[user@]host[:port]`.

    Raises:
        ConfigError: The address has another form, or ssh would read it as an option.
    """
    user, at, rest = address.rpartition("@")
    has_port = rest.startswith("[") or rest.count(":") == 1  # a host name, or a bare IPv6 address
    host, port = rest, None
    if has_port:
        parsed = Address.parse(rest, what="host")
        host, port = parsed.host, parsed.port
    if not host or host.startswith("-") or user.startswith("-") or any(map(str.isspace, address)):
        raise ConfigError(f"{address!r} is not a host; expected [user@]host[:port].")
    return user if at else None, host, port


def _destination(address: str) -> list[str]:
    user, host, port = split_address(address)
    login = [] if user is None else ["-l", user]
    at = [] if port is None else ["-p", str(port)]
    return [*login, *at, "--", host]


def _options(
    user: str | None,
    key_file: Path | None,
    known_hosts: Path | None,
    told_hosts: Path | None,
    config: str | None,
    silent_s: float,
) -> list[str]:
    options = {
        "BatchMode": "yes",  # never prompt, because no person is there to answer
        "ConnectTimeout": str(CONNECT_S),
        "ServerAliveInterval": str(ALIVE_S),
        "ServerAliveCountMax": str(max(1, math.ceil(silent_s / ALIVE_S))),
        "TCPKeepAlive": "no",  # it would end the connection when a route is lost for a moment
        "LogLevel": "ERROR",
        # A shared connection would outlive this one, and so would its worker.
        "ControlMaster": "no",
        "ControlPath": "none",
    }
    if user is not None:
        options["User"] = user
    if key_file is not None:
        options["IdentitiesOnly"] = "yes"
        options["IdentityFile"] = _quoted(key_file)
    if told_hosts is not None:
        options["StrictHostKeyChecking"] = "yes"
        options["UserKnownHostsFile"] = _quoted(told_hosts)
        options["GlobalKnownHostsFile"] = "none"
    elif known_hosts is not None:
        options["StrictHostKeyChecking"] = "accept-new"
        options["UserKnownHostsFile"] = _quoted(known_hosts)
    file = [] if config is None else ["-F", str(Path(config).expanduser())]
    return [
        *("-T", "-a", "-x"),
        *file,
        *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
    ]


def _quoted(path: Path) -> str:
    """Return a path as a value for ssh's configuration, in which spaces separate values."""
    return '"' + str(path).replace("%", "%%") + '"'
