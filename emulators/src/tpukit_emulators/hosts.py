"""Machines of emulated pods: ssh servers on loopback addresses that run real processes.

Every host has an address of its own in 127.64.0.0/10 (Linux answers on all of 127.0.0.0/8) and all
share one port, which `ssh_config` names, so a client needs nothing but that file. A host lets in
exactly those whose key is in its metadata, and runs what they ask for in a folder of its own. It is
gone like a machine: its processes are killed and its address refuses connections.
"""

import asyncio
import contextlib
import ipaddress
import os
import resource
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
import psutil

from .isolation import OWN_HOME, OWN_PATH, isolated

LAST_TURNS = 8
FIRST_ADDRESS = ipaddress.ip_address("127.64.0.1")
CLOSE_S = 5.0
CHUNK = 1 << 16
PASSED_ON = ("PYTHONPATH", "LANG", "TMPDIR")
MARK = "TPUKIT_EMULATED_HOST"
# What TPU VMs have; it becomes the one command it is given, instead of standing before it.
SHELL = shutil.which("bash") or "/bin/sh"
_CONFIG = """\
Host 127.*
  Port {port}
"""


@dataclass
class _Host:
    """One machine.

    Attributes:
        mark: In the environment of its processes, by which they are found.
        keys: Public keys by user.
    """

    name: str
    address: str
    mark: str
    folder: Path
    devices: int
    keys: dict[str, list[asyncssh.SSHKey]]
    listening: socket.socket
    is_gone: bool = False
    serving: "Future[None] | None" = None
    server: asyncssh.SSHAcceptor | None = None
    connections: set[asyncssh.SSHServerConnection] = field(
        default_factory=set[asyncssh.SSHServerConnection]
    )


class EmulatedHosts:
    """Starts and stops hosts. Its methods return at once and may be called from any thread.

    Args:
        folder: Where hosts have their homes, and where `ssh_config` is written.
        shared: If given, hosts are isolated: they see the system's files and these folders, but
            neither this Python nor its packages, and have a PATH, HOME and /tmp of their own.
    """

    def __init__(self, folder: Path, *, shared: Sequence[Path] | None = None) -> None:
        self._folder, self._shared = folder, shared
        folder.mkdir(parents=True, exist_ok=True)
        # Every host listens, so a thousand of them need more than a process usually may have.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._hosts: dict[str, _Host] = {}
        self._addresses = iter(range(2**22 - 2))
        self._loop = asyncio.new_event_loop()
        self._signals: dict[str, signal.Signals] = {}  # to be sent, by mark
        self._looking = asyncio.Lock()
        self.token = secrets.token_hex(8)  # other emulators have hosts of the same address
        self._key = asyncssh.generate_private_key("ssh-ed25519")
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="emulated-hosts", daemon=True
        )
        self._thread.start()
        with socket.create_server((str(FIRST_ADDRESS - 1), 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.ssh_config = folder / "ssh_config"
        self.ssh_config.write_text(_CONFIG.format(port=self.port))

    def start(self, name: str, ssh_keys: str, *, devices: int = 1) -> str:
        """Start a host, and return its address; connections are taken from now on.

        Args:
            name: Whatever `stop` will call it.
            ssh_keys: Metadata of Google Cloud: a line `user:public key` for each who may log in.
            devices: What jax finds on it; they are virtual ones of the CPU.
        """
        address = str(FIRST_ADDRESS + next(self._addresses))
        home = self._folder / "hosts" / name
        home.mkdir(parents=True, exist_ok=True)
        listening = socket.create_server((address, self.port), backlog=128)
        mark = f"{self.token}/{address}"
        host = _Host(name, address, mark, home, devices, _read_keys(ssh_keys), listening)
        self._hosts[name] = host
        host.serving = self._run(self._serve(host))
        return address

    def let_in(self, name: str, ssh_keys: str) -> None:
        """Let further users log in, as Google's guest agent does some time after the start."""
        self._hosts[name].keys.update(_read_keys(ssh_keys))

    @property
    def host_key(self) -> tuple[str, str]:
        """The key that every host shows: its type, and the rest."""
        kind, text, *_ = self._key.export_public_key().decode().split()
        return kind, text

    def warn(self, name: str) -> None:
        """Tell all processes of a host to end (SIGTERM), as a machine does that is shut down."""
        if (host := self._hosts.get(name)) is not None:
            self._run(self._signal(host, signal.SIGTERM))

    def stop(self, name: str) -> None:
        """End a host with all its processes; one that is not there is no error."""
        host = self._hosts.pop(name, None)
        if host is not None:
            self._run(self._end(host))

    def close(self) -> None:
        """End all hosts."""
        for name in list(self._hosts):
            self.stop(name)
        with contextlib.suppress(TimeoutError):
            self._run(self._finish()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        self._loop.close()

    async def _finish(self) -> None:
        own = asyncio.current_task()
        while others := asyncio.all_tasks() - {own}:
            await asyncio.wait(others)
        # Who knocked last is turned away in turns of the loop, which are no tasks.
        for _ in range(LAST_TURNS):
            await asyncio.sleep(0)

    def _run(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _serve(self, host: _Host) -> None:
        host.server = await asyncssh.listen(
            sock=host.listening,
            server_factory=lambda: _Door(host),
            server_host_keys=[self._key],
            process_factory=lambda process: self._run_process(host, process),
            encoding=None,
            line_editor=False,
        )

    async def _run_process(self, host: _Host, asked: asyncssh.SSHServerProcess[bytes]) -> None:
        """Run what a client asked for, by a shell as sshd does, until it ends."""
        argv, environment = [SHELL, "-c", asked.command or "exit 0"], _environment(host)
        if self._shared is not None:
            argv = isolated(argv, home=host.folder, shared=self._shared)
            environment = {**_own_environment(host), "PATH": OWN_PATH, "HOME": OWN_HOME}
        child = await asyncio.create_subprocess_exec(
            *argv,
            cwd=host.folder,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        # As with sshd, what the client no longer says ends the input of a process, not its life.
        listening = asyncio.create_task(_copy_in(asked.stdin, child.stdin))
        await asyncio.gather(
            _copy_out(child.stdout, asked.stdout), _copy_out(child.stderr, asked.stderr)
        )
        code = await child.wait()
        listening.cancel()
        if code < 0:
            asked.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
        else:
            asked.exit(code)

    async def _signal(self, host: _Host, number: signal.Signals) -> None:
        # Looking at all processes is slow, so it is done once for all hosts that wait for it.
        self._signals[host.mark] = number
        async with self._looking:
            waiting, self._signals = self._signals, {}
            if waiting:
                await asyncio.to_thread(_send_signals, waiting)

    async def _end(self, host: _Host) -> None:
        assert host.serving is not None
        await asyncio.wrap_future(host.serving)
        host.is_gone = True
        if host.server is not None:
            host.server.close()
        # Connections before processes, as the network goes first for whoever watches from outside.
        for connection in list(host.connections):
            connection.abort()
        await self._signal(host, signal.SIGKILL)


class _Door(asyncssh.SSHServer):
    """Lets in who has a key of the host's metadata."""

    def __init__(self, host: _Host) -> None:
        self._host = host
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._host.connections.add(conn)
        if self._host.is_gone:  # it had knocked before
            conn.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._host.connections.discard(self._connection)

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return key in self._host.keys.get(username, [])


async def _copy_in(source: asyncssh.SSHReader[bytes], target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncssh.Error, OSError):
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()
    target.close()


async def _copy_out(source: asyncio.StreamReader, target: asyncssh.SSHWriter[bytes]) -> None:
    while data := await source.read(CHUNK):
        with contextlib.suppress(asyncssh.Error, OSError):  # nobody listens any more
            target.write(data)
            await target.drain()


def _read_keys(metadata: str) -> dict[str, list[asyncssh.SSHKey]]:
    keys: dict[str, list[asyncssh.SSHKey]] = {}
    for line in metadata.splitlines():
        user, _, key = line.partition(":")
        with contextlib.suppress(asyncssh.KeyImportError):
            keys.setdefault(user, []).append(asyncssh.import_public_key(key))
    return keys


def _environment(host: _Host) -> dict[str, str]:
    """Return what a login on the host has: not ours, except to find this Python."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**passed, **_own_environment(host), "PATH": path, "HOME": str(host.folder)}


def _own_environment(host: _Host) -> dict[str, str]:
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={host.devices}",
        # Nobody answers here where Google's machines ask about themselves.
        "TPU_SKIP_MDS_QUERY": "1",
        "NO_GCE_CHECK": "true",
        MARK: host.mark,
    }


def _send_signals(waiting: dict[str, signal.Signals]) -> None:
    """Send each host's signal to all its processes, also those whose parents have ended."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            number = waiting.get(process.environ().get(MARK, ""))
            if number is not None:
                process.send_signal(number)
