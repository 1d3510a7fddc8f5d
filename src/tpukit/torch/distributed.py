"""Several processes from torch: reductions, gathers, broadcasts, and models trained together."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, get_args

from ..errors import ConfigError, TPUDistributedError, TPUValidationError, did_you_mean
from ..runtime.multihost import MultiHostConfig
from .collectives import DEFAULT_TIMEOUT_S, Collectives, Reduction, agree
from .data_parallel import AveragedGradients
from .devices import XLADeviceManager

if TYPE_CHECKING:
    import torch
    from jax.sharding import Mesh


class XLADistributedTraining:
    """Collectives on torch tensors between the processes of a job.

    Every process makes the same calls in the same order; one that does not is an error on all of
    them, after at most `timeout_s`. In a job of one process a tensor comes back as it went in. A
    list of tensors, one for every local device, is exchanged between devices.

    Args:
        device_manager: The devices of this job.
        timeout_s: How long to wait for the other processes.

    Raises:
        TPUDistributedError: The environment names several hosts and nobody has joined them.
    """

    def __init__(
        self, device_manager: XLADeviceManager, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        if timeout_s <= 0:
            raise TPUValidationError(f"timeout_s is {timeout_s}; give it some seconds.")
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
        """How many processes the job has."""
        return self.device_manager.world_size

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.device_manager.rank

    def all_reduce(
        self, tensor: "torch.Tensor | Sequence[torch.Tensor]", op: str = "sum"
    ) -> "torch.Tensor":
        """Return the sum, mean, maximum or minimum over all processes, in the tensor's format.

        Formats of 16 bits and less are added up in float32 and rounded once. The result is
        outside of autograd.

        Args:
            tensor: This process's, or a list with one for each local device.
            op: "sum", "mean", "max" or "min".

        Raises:
            TPUValidationError: No such op, or none for this format.
            TPUDistributedError: Another process reduces something else.
            CommunicationTimeout: Another process does not come.
        """
        import torch

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
        arrays = [one.detach().to("cpu", wide).reshape(-1).numpy() for one in tensors]
        reduced = torch.from_numpy(self._between(tensor).reduce(arrays, how))
        return reduced.reshape(tensors[0].shape).to(tensors[0].device, dtype)

    def all_gather(self, tensor: "torch.Tensor | Sequence[torch.Tensor]") -> "torch.Tensor":
        """Return all processes' tensors stacked by rank, bit for bit.

        Raises:
            TPUDistributedError: Another process gathers something else.
            CommunicationTimeout: Another process does not come.
        """
        import torch

        tensors = self._shards(tensor)
        self._agree("all_gather", tensors)
        like = tensors[0]
        if not self.is_distributed and len(tensors) == 1:
            return like.detach()[None].clone()
        raw = [
            one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for one in tensors
        ]
        gathered = torch.from_numpy(self._between(tensor).gather(raw))
        whole = gathered.reshape(-1).view(like.dtype)
        return whole.reshape(len(gathered), *like.shape).to(like.device)

    def broadcast(self, tensor: "torch.Tensor", source: int = 0) -> "torch.Tensor":
        """Return the tensor of process `source`, bit for bit; the others give shape and format.

        Raises:
            TPUValidationError: There is no process of that number.
            TPUDistributedError: Another process broadcasts something else.
            CommunicationTimeout: Another process does not come.
        """
        import torch

        if not 0 <= source < self.world_size:
            raise TPUValidationError(
                f"source is {source}, and the {self.world_size} processes of this job are numbered "
                f"0 to {self.world_size - 1}."
            )
        (only,) = self._shards(tensor, lists=False)
        self._agree(f"broadcast({source})", [only])
        if not self.is_distributed:
            return only.detach().clone()
        raw = only.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        # Zeros from all others: a sum moves less than a gather of everybody's.
        sent = raw if self.rank == source else torch.zeros_like(raw)
        received = torch.from_numpy(self._processes.reduce([sent.numpy()], "sum"))
        return received.view(only.dtype).reshape(only.shape).to(only.device)

    def barrier(self) -> None:
        """Wait until every process has come here.

        Raises:
            CommunicationTimeout: Some have not come in time; the message names them.
        """
        self._agree("barrier", [])

    def wrap_model(
        self,
        model: "torch.nn.Module",
        mesh: "Mesh | None" = None,
        strategy: str | None = None,
    ) -> "torch.nn.Module":
        """Return the model with gradients that are averaged over processes by each `backward()`.

        All processes start from the values of process 0. In a job of one process and without a
        mesh the model comes back as it is.

        Args:
            model: Any module, prepared or not.
            mesh: Of this process's devices, over which each call is split; None leaves the model
                where it runs.
            strategy: How: "data", "fsdp", "fsdp+megatron", …; by the names of the axes by default.

        Raises:
            TPUValidationError: It is not an nn.Module, or the mesh is not of this process.
            TPUDistributedError: The model of another process has other parameters.
        """
        import torch

        if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]  users pass anything
            raise TPUValidationError(
                f"wrap_model takes an nn.Module, not a {type(model).__name__}."
            )
        if mesh is not None:
            from .sharded import shard_module

            model = shard_module(model, mesh, strategy)
        elif strategy is not None:
            raise TPUValidationError(
                f"strategy={strategy!r} says how to split over a mesh, and there is none; give "
                "mesh=, for example create_mesh(mesh_shape=(8,), axis_names=('fsdp',))."
            )
        return AveragedGradients(model, self) if self.is_distributed else model

    @cached_property
    def _processes(self) -> Collectives:
        return Collectives(self.timeout_s, every_device=False)

    @cached_property
    def _devices(self) -> Collectives:
        return Collectives(self.timeout_s, every_device=True)

    def _between(self, asked: "torch.Tensor | Sequence[torch.Tensor]") -> Collectives:
        import torch

        return self._processes if isinstance(asked, torch.Tensor) else self._devices

    def _agree(self, call: str, tensors: "Sequence[torch.Tensor]") -> None:
        if not self.is_distributed:
            return
        what = f" of {_described(tensors[0])}" if tensors else ""
        many = f" on {len(tensors)} devices" if len(tensors) > 1 else ""
        agree(f"{call}{what}{many}", timeout_s=self.timeout_s)

    def _shards(
        self, asked: "torch.Tensor | Sequence[torch.Tensor]", *, lists: bool = True
    ) -> "list[torch.Tensor]":
        """Return the tensors asked about, once they are known to fit together."""
        import torch

        if isinstance(asked, torch.Tensor):
            tensors = [asked]
        else:
            tensors = list(asked) if lists and isinstance(asked, list | tuple) else []
            if not tensors or not all(map(torch.is_tensor, tensors)):
                kinds = (
                    "a tensor, or a list with one for each local device" if lists else "a tensor"
                )
                raise TPUValidationError(
                    f"a collective takes {kinds}, not a {type(asked).__name__}."
                )
            local = len(self.device_manager.local_devices)
            if len(tensors) != local:
                raise TPUValidationError(
                    f"{len(tensors)} tensors were given for {local} local devices; give one for "
                    "each."
                )
        if len({(tuple(one.shape), one.dtype) for one in tensors}) > 1:
            listed = ", ".join(map(_described, tensors))
            raise TPUValidationError(f"the tensors of a list must be alike, not {listed}.")
        if tensors[0].is_meta:
            raise TPUValidationError("a tensor on torch's meta device has no values to exchange.")
        return tensors


def _reduction(op: str, dtype: "torch.dtype") -> Reduction:
    import torch

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
            f"op='{op}' has no meaning for bool; 'max' is true where any is, 'min' where all are, "
            "and tensor.int() can be added up."
        )
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise TPUValidationError(f"the mean of {name} is no {name}; pass tensor.float().")
    if dtype.is_complex and op in ("max", "min"):
        raise TPUValidationError(f"{name} has no order, so no '{op}'.")
    return known


def _described(tensor: "torch.Tensor") -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return f"{name}[{', '.join(map(str, tensor.shape))}]"


def _refuse_unjoined() -> None:
    try:
        named = MultiHostConfig.from_environment()
    except ConfigError:
        return  # nothing about hosts, or nothing that can be used
    if named.num_hosts > 1:
        raise TPUDistributedError(
            f"the environment says that this is host {named.host_id} of {named.num_hosts}, and "
            "they are not joined: call MultiHostConfig.from_environment().setup() at the start of "
            "the program, before anything touches a device."
        )
