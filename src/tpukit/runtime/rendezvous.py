"""Gather every host of a job over plain TCP, with a deadline, before jax.distributed may start.

jax's own client aborts the process in C++ when a host is missing, the address is wrong or the
port is taken (SIGABRT or SIGSEGV; no exception reaches Python). So host 0 first listens on the
coordinator's own port, each other host says who it is there, and only when all have come does
host 0 answer "go", leave the port and start the real coordinator on it.
"""

import json
import logging
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from ..errors import CommunicationTimeout, TPUDistributedError

logger = logging.getLogger(__name__)

PROTOCOL = "tpukit-rendezvous-1"
LONGEST_LINE_BYTES = 4096
RETRY_S = 0.2
CONNECT_TIMEOUT_S = 5.0
HOSTS_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a host says of itself. All hosts must agree on all but `host_id`."""

    host_id: int
    num_hosts: int
    jax_version: str

    def to_line(self) -> bytes:
        """The hello as one line on the wire."""
        return _line({"protocol": PROTOCOL, **asdict(self)})

    @classmethod
    def from_line(cls, line: bytes) -> "Hello | None":
        """Read a hello, or `None` when whoever wrote the line is not a host of a job."""
        said = _read_line(line)
        host_id, num_hosts, version = (
            said.get(key) for key in ("host_id", "num_hosts", "jax_version")
        )
        if said.get("protocol") != PROTOCOL:
            return None
        if type(host_id) is not int or type(num_hosts) is not int or not isinstance(version, str):
            return None
        return cls(host_id=host_id, num_hosts=num_hosts, jax_version=version)


class Gathering:
    """Host 0's side: who has come, over which connection, and what to tell them."""

    def __init__(self, listener: socket.socket, own: Hello) -> None:
        self._listener = listener
        self._own = own
        self._selector = selectors.DefaultSelector()
        self._unread: dict[socket.socket, bytes] = {}
        self._peers: dict[socket.socket, str] = {}
        self._here: dict[int, socket.socket] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def wait_for_all(self, timeout_s: float) -> None:
        """Return when every host is here and has been told to go.

        Raises:
            CommunicationTimeout: Some host did not come; the message names them.
            TPUDistributedError: Two hosts claim one number, or the hosts do not agree.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while missing := self._missing():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise CommunicationTimeout(self._who_is_missing(missing, timeout_s))
                for key, _ in self._selector.select(left_s):
                    self._serve(key.fileobj)  # pyright: ignore[reportArgumentType] - sockets only
            self._tell_all({"go": True})
        except TPUDistributedError as failure:
            self._tell_all(_refusal(failure))
            raise
        finally:
            for connection in self._unread:
                connection.close()
            self._selector.close()

    def _missing(self) -> list[int]:
        return [host for host in range(1, self._own.num_hosts) if host not in self._here]

    def _serve(self, ready: socket.socket) -> None:
        if ready is self._listener:
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, ConnectionError):  # gone before it was let in
                return
            connection.setblocking(False)
            self._unread[connection], self._peers[connection] = b"", peer[0]
            self._selector.register(connection, selectors.EVENT_READ)
            return
        try:
            received = ready.recv(LONGEST_LINE_BYTES)
        except ConnectionError:
            received = b""
        if not received:  # the host went away; it may come again
            self._forget(ready)
            return
        self._unread[ready] += received
        line, newline, _ = self._unread[ready].partition(b"\n")
        if newline:
            self._welcome(ready, Hello.from_line(line))
        elif len(line) >= LONGEST_LINE_BYTES:
            self._forget(ready)

    def _welcome(self, connection: socket.socket, hello: Hello | None) -> None:
        peer = self._peers[connection]
        if hello is None:
            logger.warning("A stranger connected to the coordinator's port", extra={"peer": peer})
            self._forget(connection)
            return
        for what, theirs, ours in (
            ("num_hosts", hello.num_hosts, self._own.num_hosts),
            ("jax version", hello.jax_version, self._own.jax_version),
        ):
            if theirs != ours:
                self._refuse(
                    connection,
                    f"Host {hello.host_id} ({peer}) has {what} {theirs} and host 0 has {ours}; "
                    "start every host with the same job and the same installation.",
                )
        if hello.host_id not in self._missing():
            self._refuse(
                connection,
                f"A second process, at {peer}, says it is host {hello.host_id}; "
                f"give every process its own host_id from 0 to {self._own.num_hosts - 1}.",
            )
        self._here[hello.host_id] = connection
        logger.info("Host is here", extra={"host_id": hello.host_id, "peer": peer})

    def _refuse(self, connection: socket.socket, why: str) -> NoReturn:
        _tell(connection, _refusal(failure := TPUDistributedError(why)))
        raise failure

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._unread[connection], self._peers[connection]
        self._here = {host: other for host, other in self._here.items() if other is not connection}
        connection.close()

    def _tell_all(self, answer: Mapping[str, Any]) -> None:
        for connection in self._here.values():
            _tell(connection, answer)

    def _who_is_missing(self, missing: list[int], timeout_s: float) -> str:
        total = self._own.num_hosts
        named = ", ".join(str(host) for host in missing[:HOSTS_NAMED])
        more = f" and {len(missing) - HOSTS_NAMED} more" if len(missing) > HOSTS_NAMED else ""
        return (
            f"{total - len(missing)} of {total} hosts came within {timeout_s:g} s; missing: host "
            f"{named}{more}. Start the job on every host with this coordinator address (look at "
            "the missing hosts' logs), or allow a longer timeout_s."
        )


def join(
    address: tuple[str, int], own: Hello, *, timeout_s: float, retry_s: float = RETRY_S
) -> str:
    """Another host's side: report to host 0 and wait for its "go".

    Returns:
        The IP address at which host 0 answered.

    Raises:
        CommunicationTimeout: Nobody answered, or some host did not come.
        TPUDistributedError: Host 0 refused, or whoever answers there is not host 0.
    """
    deadline = time.monotonic() + timeout_s
    where = f"{address[0]}:{address[1]}"
    last_refusal = ""
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, min(left_s, CONNECT_TIMEOUT_S)) as connection:
                connection.sendall(own.to_line())
                connection.settimeout(max(deadline - time.monotonic(), retry_s) + retry_s)
                line = _receive_line(connection)
                answer = _read_line(line)
                if answer.get("go") is True:
                    return connection.getpeername()[0]
                if "refused" in answer:
                    kind = CommunicationTimeout if answer.get("timeout") else TPUDistributedError
                    raise kind(str(answer["refused"]))
                refusal = (
                    "it answers, but not as host 0 of a tpukit job"
                    if line
                    else "it hangs up without an answer"
                )
        except OSError as error:
            if isinstance(error, CommunicationTimeout):
                raise
            refusal = _explain(error, address[0])
        if refusal != last_refusal:
            logger.warning(
                "Host 0 is not reachable yet",
                extra={"coordinator": where, "reason": refusal, "giving_up_in_s": round(left_s)},
            )
            last_refusal = refusal
        time.sleep(min(retry_s, max(deadline - time.monotonic(), 0)))
    raise CommunicationTimeout(
        f"No coordinator at {where} within {timeout_s:g} s ({last_refusal or 'no time was left'}). "
        "Check that host 0 runs, that the address and port are host 0's, and that no firewall is "
        "between."
    )


def _receive_line(connection: socket.socket) -> bytes:
    received = b""
    while b"\n" not in received and len(received) < LONGEST_LINE_BYTES:
        part = connection.recv(LONGEST_LINE_BYTES)
        if not part:
            break
        received += part
    return received.partition(b"\n")[0]


def _explain(error: OSError, host: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {host!r} does not resolve"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "no answer"
    return error.strerror or str(error)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read_line(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:  # also what is not UTF-8
        return {}
    return message if isinstance(message, dict) else {}


def _refusal(failure: TPUDistributedError) -> dict[str, Any]:
    return {"refused": str(failure), "timeout": isinstance(failure, CommunicationTimeout)}


def _tell(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.sendall(_line(answer))
    except OSError as error:  # it will find out by its own deadline
        logger.warning("A host left before it was answered", extra={"error": str(error)})
