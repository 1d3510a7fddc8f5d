"""Join the hosts of one job into one jax runtime, with time-outs and errors instead of aborts."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from ..errors import ConfigError, TPUDistributedError
from ..shown import Shown
from . import rendezvous
from .address import Address, listen
from .environment import jax_state
from .versions import NOT_INSTALLED, installed_version

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8482  # the port jax itself uses on Cloud TPU
# Once all hosts have met, connecting takes about a second; a slow disk may delay jax's import.
SHORTEST_CONNECT_S = 60
# As gRPC reads them: lower case, and the first that is set counts.
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
EXEMPTIONS = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True)
class HostGroup(Shown):
    """What `MultiHostConfig.setup()` did."""

    num_hosts: int
    host_id: int
    coordinator: str
    rendezvous_s: float
    initialize_s: float

    def to_dict(self) -> dict[str, Any]:
        """The group as plain data."""
        return asdict(self)

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
        num_hosts: How many processes the job has.
        host_id: This process's number, from 0; host 0 runs the coordinator. None reads it from the
            environment; asking jax (`jax.process_index()`) would start it too early.
        coordinator_address: Host 0's `host:port`, the same on every host.
        timeout_s: How long to wait for all hosts to come.
        heartbeat_timeout_s: How long a silent host counts as alive; then jax ends every process.
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
                f"host_id is {self.host_id}, and the {self.num_hosts} hosts of this job are "
                f"numbered 0 to {self.num_hosts - 1}; give each process its own number."
            )
        for name in ("timeout_s", "heartbeat_timeout_s", "shutdown_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give it some seconds.")
        Address.parse(self.coordinator_address)
        if self.bind_address is not None:
            Address.parse(self.bind_address, what="bind_address")

    @property
    def number(self) -> int:
        """`host_id`, given or read."""
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
            ConfigError: Nothing of it is set, or only a part.
        """
        variables = os.environ if environment is None else environment
        rank = _rank_by_tpukit(variables) or _rank_by_cloud_tpu(variables)
        if rank is None:
            raise ConfigError(
                "The environment does not say which host this is; set TPUKIT_NUM_HOSTS, "
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
        """Gather all hosts; return where jax connects to and, on host 0, where it listens."""
        own = rendezvous.Hello(
            host_id=self.number,
            num_hosts=self.num_hosts,
            jax_version=installed_version("jax") or NOT_INSTALLED,
        )
        coordinator = Address.parse(self.coordinator_address)
        if self.host_id:
            # jax gets the IP address that has just answered: gRPC resolves names its own way.
            found = rendezvous.join(
                (coordinator.host, coordinator.port), own, timeout_s=self.timeout_s
            )
            return Address(found, coordinator.port), None
        asked = Address.parse(self.bind_address) if self.bind_address else coordinator
        bind_to = asked.resolved()
        with listen(bind_to) as listener:
            rendezvous.Gathering(listener, own).wait_for_all(self.timeout_s)
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
    """Keep gRPC from taking the coordinator's connection through an HTTP proxy, even loopback."""
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
    """This process's number, where only that is asked of the environment."""
    if variables.get("TPUKIT_HOST_ID"):
        return _number(variables, "TPUKIT_HOST_ID")
    rank = _rank_by_cloud_tpu(variables)
    if rank is not None:
        return rank[1]
    raise ConfigError(
        "host_id is None and the environment does not say which host this is; set TPUKIT_HOST_ID, "
        "run on a TPU VM that sets TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, or pass host_id."
    )


def _refuse_missing(variables: Mapping[str, str], names: tuple[str, ...]) -> None:
    if missing := [name for name in names if not variables.get(name)]:
        raise ConfigError(
            f"The environment sets a part of the multi-host variables and not "
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
    """What process 0 says; every process must ask."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.asarray(value, np.int32)))


def smallest_of_all(value: int) -> int:
    """The smallest of what the processes say; every process must ask."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    said = multihost_utils.process_allgather(np.asarray(value, np.int32))
    return int(np.min(said))
