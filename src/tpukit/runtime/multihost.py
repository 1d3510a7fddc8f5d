"""Join the hosts of a job into one jax runtime, with time-outs and errors instead of aborts.

jax's own client aborts the process in C++ if a host is missing, the address is wrong or the port is
taken (SIGABRT or SIGSEGV, without a Python exception). So all hosts meet over plain TCP first: host
0 listens on the coordinator's port, and every other host identifies itself there. When all hosts
have connected, host 0 answers "go", closes the port and starts the real coordinator on it.
"""

import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from ..errors import CommunicationTimeout, ConfigError, TPUDistributedError
from ..plain_data import JsonMapping, JsonObject
from ..shown import Shown
from .address import Address, listen
from .environment import jax_state
from .versions import NOT_INSTALLED, installed_version

logger = logging.getLogger(__name__)

PROTOCOL = "tpukit-rendezvous-1"
LONGEST_LINE_BYTES = 4096
RETRY_S = 0.2
CONNECT_TIMEOUT_S = 5.0
HOSTS_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A host's identification. All hosts must agree on every field but `host_id`."""

    host_id: int
    num_hosts: int
    jax_version: str

    def to_line(self) -> bytes:
        """Return the hello as one line for the wire."""
        return _line({"protocol": PROTOCOL, **asdict(self)})

    @classmethod
    def from_line(cls, line: bytes) -> "Hello | None":
        """Parse a hello; return None if the line is not from a host of a job."""
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
    """Host 0's side: the connected hosts and the replies to them."""

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
        """Wait until every host has connected, and send "go" to all.

        Raises:
            CommunicationTimeout: A host did not connect; the message names the missing ones.
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

    def _tell_all(self, answer: JsonMapping) -> None:
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


def report_to_host_0(
    address: tuple[str, int], own: Hello, *, timeout_s: float, retry_s: float = RETRY_S
) -> str:
    """Connect to host 0 from another host and wait for its "go".

    Returns:
        The IP address at which host 0 answered.

    Raises:
        CommunicationTimeout: Host 0 did not answer, or a host is missing.
        TPUDistributedError: Host 0 refused, or another program answered.
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


def _line(message: JsonMapping) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read_line(line: bytes) -> JsonObject:
    try:
        message = json.loads(line)
    except ValueError:  # also what is not UTF-8
        return {}
    return message if isinstance(message, dict) else {}


def _refusal(failure: TPUDistributedError) -> JsonObject:
    return {"refused": str(failure), "timeout": isinstance(failure, CommunicationTimeout)}


def _tell(connection: socket.socket, answer: JsonMapping) -> None:
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.sendall(_line(answer))
    except OSError as error:  # it will find out by its own deadline
        logger.warning("A host left before it was answered", extra={"error": str(error)})


DEFAULT_PORT = 8482  # the port jax itself uses on Cloud TPU
# Once all hosts have met, connecting takes about a second; a slow disk may delay jax's import.
SHORTEST_CONNECT_S = 60
# As gRPC reads them: lower case, and the first that is set counts.
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
EXEMPTIONS = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True)
class HostGroup(Shown):
    """The result of `MultiHostConfig.setup()`."""

    num_hosts: int
    host_id: int
    coordinator: str
    rendezvous_s: float
    initialize_s: float

    def __rich__(self) -> str:
        return (
            f"host {self.host_id} of {self.num_hosts}, coordinator {self.coordinator}: all hosts "
            f"met after {self.rendezvous_s:.1f} s, joined in {self.initialize_s:.1f} s (measured)"
        )


@dataclass(frozen=True)
class MultiHostConfig:
    """One process's rank in a job of several hosts.

    ```python
    with MultiHostConfig(num_hosts=8, host_id=3, coordinator_address="10.0.0.1:8482"):
        train()
    ```

    Attributes:
        num_hosts: Number of processes of the job.
        host_id: This process's number, from 0; host 0 runs the coordinator. None reads it from the
            environment; asking jax (`jax.process_index()`) would start it too early.
        coordinator_address: Host 0's `host:port`, the same on every host.
        timeout_s: How long to wait for all hosts.
        heartbeat_timeout_s: After this long without a heartbeat, jax ends every process.
        shutdown_timeout_s: How long `shutdown()` waits for the other hosts to finish; then jax
            ends every process, so keep it longer than hosts may lie apart at the end.
        bind_address: What host 0 listens on; by default only `coordinator_address` itself, so a
            loopback address is never reachable from outside. `0.0.0.0:port` means every network.
        local_device_ids: The devices of this process, when several processes share a host.
    """

    num_hosts: int
    host_id: int | None
    coordinator_address: str
    timeout_s: float = field(default=300, kw_only=True)
    heartbeat_timeout_s: int = field(default=100, kw_only=True)
    shutdown_timeout_s: int = field(default=300, kw_only=True)
    bind_address: str | None = field(default=None, kw_only=True)
    local_device_ids: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.num_hosts < 1:
            raise ConfigError(f"num_hosts is {self.num_hosts}; a job has at least one host.")
        if self.host_id is None:
            object.__setattr__(self, "host_id", _host_id_in(os.environ))
        if not 0 <= self.number < self.num_hosts:
            raise ConfigError(
                f"host_id is {self.host_id}, but the {self.num_hosts} hosts of this job are "
                f"numbered 0 to {self.num_hosts - 1}; give each process its own number."
            )
        for name in ("timeout_s", "heartbeat_timeout_s", "shutdown_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; give it a positive number of seconds."
                )
        Address.parse(self.coordinator_address)
        if self.bind_address is not None:
            Address.parse(self.bind_address, what="bind_address")

    @property
    def number(self) -> int:
        """`host_id`, given or read from the environment."""
        assert self.host_id is not None
        return self.host_id

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **settings: Any
    ) -> "MultiHostConfig":
        """Read this process's rank from the environment.

        `TPUKIT_NUM_HOSTS`, `TPUKIT_HOST_ID` and `TPUKIT_COORDINATOR` come first; otherwise what
        Cloud TPU and GKE set: `TPU_WORKER_HOSTNAMES`, `TPU_WORKER_ID` and, for several slices,
        `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID`, `MEGASCALE_COORDINATOR_ADDRESS`.
        `TPUKIT_HEARTBEAT_S` sets `heartbeat_timeout_s`.

        Args:
            environment: Read this instead of the process's own.
            **settings: The keyword arguments of `MultiHostConfig`.

        Raises:
            ConfigError: The variables are missing, or only some are set.
        """
        variables = os.environ if environment is None else environment
        rank = _rank_by_tpukit(variables) or _rank_by_cloud_tpu(variables)
        if rank is None:
            raise ConfigError(
                "The environment does not identify this host; set TPUKIT_NUM_HOSTS, "
                "TPUKIT_HOST_ID and TPUKIT_COORDINATOR (host:port), or run on a TPU VM that sets "
                "TPU_WORKER_HOSTNAMES and TPU_WORKER_ID."
            )
        if variables.get("TPUKIT_HEARTBEAT_S"):
            settings.setdefault("heartbeat_timeout_s", _number(variables, "TPUKIT_HEARTBEAT_S"))
        return cls(*rank, **settings)

    def setup(self) -> HostGroup:
        """Wait for all hosts, then start jax.distributed. Call it before anything uses devices.

        A job of one host needs no coordinator; then nothing is started.

        Raises:
            CommunicationTimeout: Host 0 cannot be reached, or hosts are missing.
            TPUDistributedError: The port is in use, the hosts disagree, or jax has already
                started.
        """
        if self.num_hosts == 1:
            return HostGroup(1, 0, self.coordinator_address, 0.0, 0.0)
        self._refuse_late_setup()
        started = time.monotonic()
        connect_to, bind_to = self._meet()
        met = time.monotonic()
        self._initialize(connect_to, bind_to, left_s=self.timeout_s - (met - started))
        group = HostGroup(
            self.num_hosts,
            self.number,
            str(connect_to),
            rendezvous_s=met - started,
            initialize_s=time.monotonic() - met,
        )
        logger.info("All hosts are joined", extra=group.to_dict())
        return group

    def shutdown(self) -> None:
        """Leave the job, after all hosts have called this."""
        import jax

        jax.distributed.shutdown()

    def __enter__(self) -> "MultiHostConfig":
        self.setup()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error the other hosts are still inside a collective: waiting here for them
        # would end in jax's abort, and the user would never see the error.
        if error is None:
            self.shutdown()

    def _refuse_late_setup(self) -> None:
        import jax

        if jax.distributed.is_initialized():
            raise TPUDistributedError(
                "jax.distributed is already set up in this process; call setup() once, or "
                "shutdown() first."
            )
        if jax_state() == "initialised":
            raise TPUDistributedError(
                "jax has already opened its devices, so the hosts can no longer be joined; call "
                "setup() before anything that touches a device (jax.process_index() does), and "
                "take host_id from the launcher or MultiHostConfig.from_environment()."
            )

    def _meet(self) -> tuple[Address, Address | None]:
        """Gather all hosts; return the address jax connects to and, on host 0, where it listens."""
        own = Hello(
            host_id=self.number,
            num_hosts=self.num_hosts,
            jax_version=installed_version("jax") or NOT_INSTALLED,
        )
        coordinator = Address.parse(self.coordinator_address)
        if self.host_id:
            # jax gets the IP address that has just answered: gRPC resolves names its own way.
            found = report_to_host_0(
                (coordinator.host, coordinator.port), own, timeout_s=self.timeout_s
            )
            return Address(found, coordinator.port), None
        asked = Address.parse(self.bind_address) if self.bind_address else coordinator
        bind_to = asked.resolved()
        with listen(bind_to) as listener:
            Gathering(listener, own).wait_for_all(self.timeout_s)
        return (coordinator if bind_to.is_wildcard else bind_to), bind_to

    def _initialize(self, connect_to: Address, bind_to: Address | None, *, left_s: float) -> None:
        import jax

        _bypass_proxy(connect_to.host)
        try:
            jax.distributed.initialize(
                coordinator_address=str(connect_to),
                num_processes=self.num_hosts,
                process_id=self.number,
                local_device_ids=self.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=max(SHORTEST_CONNECT_S, int(left_s)),
                heartbeat_timeout_seconds=self.heartbeat_timeout_s,
                shutdown_timeout_seconds=self.shutdown_timeout_s,
                coordinator_bind_address=None if bind_to is None else str(bind_to),
            )
        except RuntimeError as error:
            raise TPUDistributedError(
                f"All {self.num_hosts} hosts met at {connect_to}, and then jax could not join "
                f"them: {error}"
            ) from error


def _bypass_proxy(host: str) -> None:
    """Keep gRPC from sending the coordinator's connection through an HTTP proxy."""
    if not any(os.environ.get(name) for name in PROXY_VARIABLES):
        return
    # gRPC reads no_proxy only when no_grpc_proxy is unset, so carry over what it held.
    exempt = next((found for name in EXEMPTIONS if (found := os.environ.get(name))), "")
    os.environ[EXEMPTIONS[0]] = ",".join([*filter(None, exempt.split(",")), host])


def _rank_by_tpukit(variables: Mapping[str, str]) -> tuple[int, int, str] | None:
    names = ("TPUKIT_NUM_HOSTS", "TPUKIT_HOST_ID", "TPUKIT_COORDINATOR")
    if not any(variables.get(name) for name in names):
        return None
    _refuse_missing(variables, names)
    num_hosts, host_id, coordinator = names
    return _number(variables, num_hosts), _number(variables, host_id), variables[coordinator]


def _rank_by_cloud_tpu(variables: Mapping[str, str]) -> tuple[int, int, str] | None:
    if not variables.get("TPU_WORKER_HOSTNAMES"):
        return None
    _refuse_missing(variables, ("TPU_WORKER_ID",))
    workers = [name.strip() for name in variables["TPU_WORKER_HOSTNAMES"].split(",")]
    worker_id = _number(variables, "TPU_WORKER_ID")
    if not variables.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return len(workers), worker_id, f"{workers[0]}:{DEFAULT_PORT}"
    _refuse_missing(variables, ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"))
    slices = _number(variables, "MEGASCALE_NUM_SLICES")
    slice_id = _number(variables, "MEGASCALE_SLICE_ID")
    first = variables["MEGASCALE_COORDINATOR_ADDRESS"].split(":")[0]
    rank = slice_id * len(workers) + worker_id
    return slices * len(workers), rank, f"{first}:{DEFAULT_PORT}"


def _host_id_in(variables: Mapping[str, str]) -> int:
    """Return this process's number from the environment."""
    if variables.get("TPUKIT_HOST_ID"):
        return _number(variables, "TPUKIT_HOST_ID")
    rank = _rank_by_cloud_tpu(variables)
    if rank is not None:
        return rank[1]
    raise ConfigError(
        "host_id is None, but the environment does not identify this host; set TPUKIT_HOST_ID, "
        "run on a TPU VM that sets TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, or pass host_id."
    )


def _refuse_missing(variables: Mapping[str, str], names: tuple[str, ...]) -> None:
    if missing := [name for name in names if not variables.get(name)]:
        raise ConfigError(
            f"The environment sets some multi-host variables, but not "
            f"{' or '.join(missing)}; set all of them, or none."
        )


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name} is {text!r}; it must be a whole number.")
    return int(text)


def coordination_client() -> Any:
    """Return the client of jax's coordination service: keys and values for all processes.

    Raises:
        TPUDistributedError: The processes are not joined.
    """
    from jax._src.distributed import global_state  # pyright: ignore[reportPrivateUsage]  no public way to it

    if global_state.client is None:
        raise TPUDistributedError(
            "the processes of this job are not joined; call MultiHostConfig.setup() before "
            "anything that touches a device."
        )
    return global_state.client


def said_by_first(value: int) -> int:
    """Return process 0's value; every process must call this."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.asarray(value, np.int32)))


def smallest_of_all(value: int) -> int:
    """Return the smallest of all processes' values; every process must call this."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    said = multihost_utils.process_allgather(np.asarray(value, np.int32))
    return int(np.min(said))
