"""Several processes from torch: collectives, averaged gradients, and the parts of document 002."""

from collections.abc import Generator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, get_args

import jax
import torch
from jax.sharding import Mesh
from torch import nn

from ..annotations import PyTree
from ..errors import ConfigError, TPUDistributedError, TPUValidationError, did_you_mean
from ..job.compiler_flags import flags_of
from ..runtime.environment import EnvironmentReport
from ..runtime.flags.bundles import generation_for_flags
from ..runtime.multihost import MultiHostConfig
from .collectives import DEFAULT_TIMEOUT_S, Collectives, Reduction, agree
from .config import TorchTPUConfig, tpu_settings
from .devices import XLADeviceManager


class AveragedGradients(nn.Module):
    """A module whose gradients are the mean over processes after `loss.backward()`.

    A hook on the parameters detects a backward pass; at its end all gradients go through one
    all-reduce per dtype. Gradients of earlier backward passes are equal on all processes, so their
    mean with the new ones is right. In `no_sync()` gradients stay local until the next backward
    pass outside of it. A parameter that a process did not use counts as zero there; a parameter
    that no process used keeps `grad=None`.

    Parameters keep their names, so `state_dict()` is that of the module itself.
    """

    def __init__(self, module: nn.Module, distributed: "XLADistributedTraining") -> None:
        super().__init__()
        self.module = module
        self._distributed = distributed
        self._is_synchronized = True
        self._queued = False
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._start_alike()
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._queue_average)

    def forward(self, *arguments: Any, **keywords: Any) -> PyTree:
        """Call the module."""
        return self.module(*arguments, **keywords)

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the module's state."""
        return self.module.state_dict(*arguments, **keywords)

    def load_state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """Load a state of the module."""
        return self.module.load_state_dict(*arguments, **keywords)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Keep gradients local, to sum several micro-batches before one all-reduce."""
        before, self._is_synchronized = self._is_synchronized, False
        try:
            yield
        finally:
            self._is_synchronized = before

    def _start_alike(self) -> None:
        """Copy all values from process 0, because averaging needs equal models."""
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                tensor.copy_(self._distributed.broadcast(tensor))

    def _queue_average(self, parameter: torch.Tensor) -> None:
        if self._queued or not self._is_synchronized:
            return
        self._queued = True
        engine = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]  the only callback at the end of a backward pass
        engine.queue_callback(self._average)

    def _average(self) -> None:
        self._queued = False
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self._trained:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, parameters in by_dtype.items():
            self._average_dtype(dtype, parameters)

    def _average_dtype(self, dtype: torch.dtype, parameters: list[torch.Tensor]) -> None:
        grads = [parameter.grad for parameter in parameters]
        wide = torch.promote_types(dtype, torch.float32)
        used = torch.tensor([grad is not None for grad in grads], dtype=wide)
        parts = [
            torch.zeros(parameter.numel(), dtype=wide)
            if grad is None
            else grad.reshape(-1).to(wide)
            for parameter, grad in zip(parameters, grads, strict=True)
        ]
        joined = self._distributed.all_reduce(torch.cat([used, *parts]), op="mean")
        used, *means = joined.split(
            [len(parameters), *(parameter.numel() for parameter in parameters)]
        )
        for parameter, is_used, mean in zip(parameters, used.tolist(), means, strict=True):
            if is_used:
                value = mean.reshape(parameter.shape).to(parameter.dtype)
                parameter.grad = value if parameter.grad is None else parameter.grad.copy_(value)


class XLADistributedTraining:
    """Collectives on torch tensors between the processes of a job.

    Every process must make the same calls in the same order; otherwise all of them raise an error
    after at most `timeout_s`. In a job of one process a tensor is returned unchanged. A list of
    tensors, one per local device, is reduced or gathered over devices.

    Args:
        device_manager: The devices of this job.
        timeout_s: How long to wait for the other processes.

    Raises:
        TPUDistributedError: The environment names several hosts, but they are not joined.
    """

    def __init__(
        self, device_manager: XLADeviceManager, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if timeout_s <= 0:
            raise TPUValidationError(f"timeout_s is {timeout_s}; give a number of seconds above 0.")
        self.device_manager = device_manager
        self.timeout_s = timeout_s
        if not self.is_distributed:
            _refuse_unjoined()

    @property
    def is_distributed(self) -> bool:
        """Whether the job has other processes."""
        return self.device_manager.is_distributed

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self.device_manager.world_size

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""
        return self.device_manager.rank

    def all_reduce(
        self, tensor: torch.Tensor | Sequence[torch.Tensor], op: str = "sum"
    ) -> torch.Tensor:
        """Return the sum, mean, maximum or minimum over all processes, in the tensor's dtype.

        Dtypes of 16 bits and less are summed in float32 and rounded once. The result has no
        gradient.

        Args:
            tensor: This process's tensor, or a list with one per local device.
            op: "sum", "mean", "max" or "min".

        Raises:
            TPUValidationError: The op is unknown, or not defined for the dtype.
            TPUDistributedError: Another process makes another call.
            CommunicationTimeout: Another process does not call in time.
        """
        tensors = self._shards(tensor)
        dtype = tensors[0].dtype
        how = _reduction(op, dtype)
        wide = dtype
        if dtype == torch.bool:
            wide = torch.uint8
        elif dtype.is_floating_point and dtype.itemsize < 4:
            wide = torch.float32
        self._agree(f"all_reduce({op})", tensors)
        if not self.is_distributed and len(tensors) == 1:
            return tensors[0].detach().clone()
        arrays = [part.detach().to("cpu", wide).reshape(-1).numpy() for part in tensors]
        reduced = torch.from_numpy(self._between(tensor).reduce(arrays, how))
        return reduced.reshape(tensors[0].shape).to(tensors[0].device, dtype)

    def all_gather(self, tensor: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all processes' tensors stacked by rank, bit for bit.

        Raises:
            TPUDistributedError: Another process makes another call.
            CommunicationTimeout: Another process does not call in time.
        """
        tensors = self._shards(tensor)
        self._agree("all_gather", tensors)
        like = tensors[0]
        if not self.is_distributed and len(tensors) == 1:
            return like.detach()[None].clone()
        raw = [
            part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            for part in tensors
        ]
        gathered = torch.from_numpy(self._between(tensor).gather(raw))
        flat = gathered.reshape(-1).view(like.dtype)
        return flat.reshape(len(gathered), *like.shape).to(like.device)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return the tensor of process `source`, bit for bit; the others pass its shape and dtype.

        Raises:
            TPUValidationError: There is no process of that index.
            TPUDistributedError: Another process makes another call.
            CommunicationTimeout: Another process does not call in time.
        """
        if not 0 <= source < self.world_size:
            raise TPUValidationError(
                f"source is {source}; expected 0 to {self.world_size - 1}, because this job has "
                f"{self.world_size} processes."
            )
        (only,) = self._shards(tensor, lists=False)
        self._agree(f"broadcast({source})", [only])
        if not self.is_distributed:
            return only.detach().clone()
        raw = only.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        # The others send zeros, because a sum moves fewer bytes than a gather.
        sent = raw if self.rank == source else torch.zeros_like(raw)
        received = torch.from_numpy(self._processes.reduce([sent.numpy()], "sum"))
        return received.view(only.dtype).reshape(only.shape).to(only.device)

    def barrier(self) -> None:
        """Wait until every process has called it.

        Raises:
            CommunicationTimeout: Some processes did not call in time; the message names them.
        """
        self._agree("barrier", [])

    def wrap_model(
        self,
        model: torch.nn.Module,
        mesh: Mesh | None = None,
        strategy: str | None = None,
    ) -> torch.nn.Module:
        """Return the model with gradients that each `backward()` averages over processes.

        All processes start from the values of process 0. In a job of one process and without a
        mesh the model is returned unchanged.

        Args:
            model: Any module, prepared or not.
            mesh: A mesh of this process's devices, over which each call is sharded; None keeps the
                model on its device.
            strategy: "data", "fsdp", "fsdp+megatron", …; by default it follows from the axis names.

        Raises:
            TPUValidationError: It is not an nn.Module, or the mesh has devices of other processes.
            TPUDistributedError: The model of another process has other parameters.
        """
        if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  unchecked user code
            raise TPUValidationError(
                f"wrap_model expects an nn.Module, got {type(model).__name__}; pass a module."
            )
        if mesh is not None:
            from .prepared import shard_module

            model = shard_module(model, mesh, strategy)
        elif strategy is not None:
            raise TPUValidationError(
                f"strategy={strategy!r} needs a mesh, but none was given; pass "
                "mesh=, for example create_mesh(mesh_shape=(8,), axis_names=('fsdp',))."
            )
        return AveragedGradients(model, self) if self.is_distributed else model

    @cached_property
    def _processes(self) -> Collectives:
        return Collectives(self.timeout_s, every_device=False)

    @cached_property
    def _devices(self) -> Collectives:
        return Collectives(self.timeout_s, every_device=True)

    def _between(self, tensor: torch.Tensor | Sequence[torch.Tensor]) -> Collectives:
        return self._processes if isinstance(tensor, torch.Tensor) else self._devices

    def _agree(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        if not self.is_distributed:
            return
        what = f" of {_described(tensors[0])}" if tensors else ""
        many = f" on {len(tensors)} devices" if len(tensors) > 1 else ""
        agree(f"{call}{what}{many}", timeout_s=self.timeout_s)

    def _shards(
        self, given: torch.Tensor | Sequence[torch.Tensor], *, lists: bool = True
    ) -> list[torch.Tensor]:
        """Return the given tensors as a list; refuse tensors that differ in shape or dtype."""
        if isinstance(given, torch.Tensor):
            tensors = [given]
        else:
            tensors = list(given) if lists and isinstance(given, list | tuple) else []
            if not tensors or not all(map(torch.is_tensor, tensors)):
                kinds = "a tensor, or a list with one per local device" if lists else "a tensor"
                raise TPUValidationError(
                    f"a collective expects {kinds}, got {type(given).__name__}; pass tensors."
                )
            local = len(self.device_manager.local_devices)
            if len(tensors) != local:
                raise TPUValidationError(
                    f"{len(tensors)} tensors were given for {local} local devices; give one per "
                    "device."
                )
        if len({(tuple(tensor.shape), tensor.dtype) for tensor in tensors}) > 1:
            listed = ", ".join(map(_described, tensors))
            raise TPUValidationError(
                f"the tensors of a list must have one shape and dtype, got {listed}; make them "
                "equal."
            )
        if tensors[0].is_meta:
            raise TPUValidationError(
                "a tensor on torch's meta device has no values; move it to a real device."
            )
        return tensors


def _reduction(op: str, dtype: torch.dtype) -> Reduction:
    for known in get_args(Reduction):
        if op == known:
            break
    else:
        raise TPUValidationError(
            f"op={op!r} is not one of {', '.join(get_args(Reduction))}."
            + did_you_mean(str(op), get_args(Reduction))
        )
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.bool and op in ("sum", "mean"):
        raise TPUValidationError(
            f"op='{op}' is not defined for bool; use 'max' for any, 'min' for all, or pass "
            "tensor.int()."
        )
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise TPUValidationError(f"op='mean' is not defined for {name}; pass tensor.float().")
    if dtype.is_complex and op in ("max", "min"):
        raise TPUValidationError(f"op='{op}' is not defined for {name}; use 'sum' or 'mean'.")
    return known


def _described(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{name}[{', '.join(map(str, tensor.shape))}]"


def _refuse_unjoined() -> None:
    try:
        named = MultiHostConfig.from_environment()
    except ConfigError:
        return  # the environment names no hosts
    if named.num_hosts > 1:
        raise TPUDistributedError(
            f"by the environment this is host {named.host_id} of {named.num_hosts}, but the hosts "
            "are not joined: call MultiHostConfig.from_environment().setup() at the start of the "
            "program, before anything uses a device."
        )


class XLAOptimizations:
    """The compiler flags of the configuration's `xla_optimization_level`.

    They are flags of the process, which jax reads once at its start. `TPUOptimizer` changes a model
    itself (dtypes, rematerialization, kernels).
    """

    def __init__(self, settings: TorchTPUConfig) -> None:
        self._settings = settings

    @property
    def level(self) -> int:
        """`xla_optimization_level`: 0 none, 1 suggested, 2 published recipes, 3 experimental."""
        return self._settings.xla_optimization_level

    @property
    def flags(self) -> dict[str, bool | int | float | str]:
        """The compiler flags of the level, for the configured chip or the TPU here."""
        chip = self._settings.chip
        generation = generation_for_flags(chip.name if chip else None)
        return flags_of(self._settings, generation=generation)

    def apply(self, environment: MutableMapping[str, str] | None = None) -> EnvironmentReport:
        """Set the flags for this process; return which were set and which came too late.

        Only libtpu reads them.

        Args:
            environment: The variables to change; by default those of this process.
        """
        return self._settings.setup_environment_variables(environment)

    def mark_step(self) -> None:
        """Do nothing; torch_xla ends its lazy graph here, and a compiled program has none."""

    def synchronize(self) -> None:
        """Wait until jax has finished all started work."""
        jax.effects_barrier()
        jax.block_until_ready(jax.live_arrays())


def create_xla_integration(
    config: object = None,
) -> tuple[XLADeviceManager, XLADistributedTraining, XLAOptimizations]:
    """Return devices, collectives and compiler flags for one configuration.

    Raises:
        TPUNotAvailableError: There is no TPU and validation is strict.
        TPUDistributedError: The environment names several hosts, but they are not joined.
    """
    settings = tpu_settings(config)
    devices = XLADeviceManager(settings)
    return devices, XLADistributedTraining(devices), XLAOptimizations(settings)
