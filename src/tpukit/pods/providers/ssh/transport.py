"""Starting workers over the system's own ssh: its configuration, agents and proxies all hold."""

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ....errors import ConfigError
from ....runtime.address import Address
from ...gang.ports import any_port
from ...gang.transport import WorkerProcess
from ...pod import Host
from ...worker.order import bootstrap

CONNECT_S = 5
CONNECT_TRIES = 6
"""A host that has just started refuses connections for a while."""
ALIVE_S, ALIVE_MISSES = 5, 3
"""A host that went silent is found after their product, in seconds."""
TRY_S = 10.0
HOME = "~/tpukit"


class SSHTransport:
    """Starts agents on hosts; the connection is their lifeline.

    Args:
        folder: Where on the hosts the files of a pod go, under the user's home.
        user: On the hosts, where ssh's configuration does not say it.
        key_file: The key to offer, and no other; None: whatever ssh would offer.
        known_hosts: Where the keys of new hosts are remembered; None: ssh's own file and rules.
        told_hosts: A file with the keys of all hosts by name, from a channel that can be trusted:
            other keys are refused. Instead of `known_hosts`.
        config: ssh's configuration file, instead of the user's own.

    Attributes:
        agents: The connections it has started.
    """

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
    ) -> None:
        self._folder = folder
        self._names_hosts = told_hosts is not None
        self._options = _options(user, key_file, known_hosts, told_hosts, config)
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, host: Host) -> WorkerProcess:
        """Start an agent that waits for its order; returns before it is connected."""
        started = subprocess.Popen(
            self.command(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us: workers are told, and given time
        )
        self.agents.append(started)
        return started

    def try_host(self, host: Host) -> str | None:
        """Log in and look for Python; return what went wrong, or None."""
        # The first word on an option counts.
        argv = ["ssh", "-o", "ConnectionAttempts=1", *self._to(host)]
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
            said = tried.stderr.decode(errors="replace").strip().splitlines()
            return said[-1] if said else f"exit code {tried.returncode}"
        return None

    def command(self, host: Host) -> list[str]:
        """Return the argument list that is an agent on a host.

        The far end hands what follows the host's name to a shell, so that is one constant text.
        """
        return ["ssh", *self._to(host), shlex.join(bootstrap())]

    def login(self, host: Host) -> list[str]:
        """Return the argument list with which a person logs in to a host."""
        # The first word on an option counts, and the last switch for or against a terminal.
        options, destination = self._options_for(host), _destination(host.address)
        return ["ssh", "-o", "BatchMode=no", *options, "-t", *destination]

    def _options_for(self, host: Host) -> list[str]:
        alias = ["-o", f"HostKeyAlias={host.name}"] if self._names_hosts else []
        return [*self._options, *alias]

    def _to(self, host: Host) -> list[str]:
        return [*self._options_for(host), *_destination(host.address)]

    def folder(self, host: Host) -> str:
        """Return where on the host a bundle is unpacked and the command runs."""
        return f"{HOME}/{self._folder}"

    def coordinator(self, hosts: Sequence[Host]) -> str:
        """Return `host:port` for jax's coordinator on the first host: another port each time."""
        first = hosts[0].internal_address or split_address(hosts[0].address)[1]
        return str(Address(first, any_port()))


def split_address(address: str) -> tuple[str | None, str, int | None]:
    """Return user, host and port of `[user@]host[:port]`.

    Raises:
        ConfigError: It has another form, or ssh would take it for an option.
    """
    user, at, rest = address.rpartition("@")
    has_port = rest.startswith("[") or rest.count(":") == 1  # else a name, or bare IPv6
    host, port = rest, None
    if has_port:
        parsed = Address.parse(rest, what="host")
        host, port = parsed.host, parsed.port
    if not host or host.startswith("-") or user.startswith("-") or any(map(str.isspace, address)):
        raise ConfigError(f"{address!r} is no host of the form [user@]host[:port].")
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
) -> list[str]:
    options = {
        "BatchMode": "yes",  # never asks: nobody is there to answer
        "ConnectTimeout": str(CONNECT_S),
        "ConnectionAttempts": str(CONNECT_TRIES),
        "ServerAliveInterval": str(ALIVE_S),
        "ServerAliveCountMax": str(ALIVE_MISSES),
        "LogLevel": "ERROR",
        # A connection that others share would outlive this one, and so would the worker.
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
    """Return a path as a value of ssh's configuration, where spaces separate."""
    return '"' + str(path).replace("%", "%%") + '"'
