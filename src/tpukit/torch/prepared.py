"""Prepared modules: the user's own objects, with calls that run as compiled programs."""

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import compress
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..annotations import PyTree
from ..errors import TPUModelError, TPUValidationError
from ..models.adapters.torch_module.arrays import shape_of, to_array, to_tensor
from ..models.adapters.torch_module.environment import environment, take_apart
from ..models.adapters.torch_module.layers import count_heads
from ..models.adapters.torch_module.state import ModuleState
from ..models.remat.policy import NO_REMAT, RematPolicy
from ..parallel.mesh.axes import count_batch_ways
from ..parallel.mesh.mesh import axis_sizes
from ..parallel.sharding.layout import Layout, make_layout
from ..parallel.sharding.strategy import strategy_for
from .border import ArgumentPlacement, Arrays, ModuleProgram, call_with_gradient, tensor_of
from .lru import LRUCache

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LINK = "_tpukit_link"


class Link:
    """Connects one module with its programs, and with newer values on the device.

    A module keeps its own parameters. After fused steps the device has newer values; reading the
    module through its attributes, `parameters()` or `state_dict()` returns those.
    """

    def __init__(
        self,
        module: "torch.nn.Module",
        *,
        remat: RematPolicy = NO_REMAT,
        programs: Callable[[], int | None] | None = None,
        strict: bool = False,
        donate: bool = False,
    ) -> None:
        self.module, self.remat, self.strict, self.donate = module, remat, strict, donate
        self.placement: ArgumentPlacement | None = None  # None: on one device
        self.stays_eager = ""  # why the module cannot become a program, if so
        self.programs: LRUCache[Any, ModuleProgram] = LRUCache(max_size=programs)
        self.newer: Any = None  # copies the device's values to the module, if they are newer
        self._signature: Any = None
        self._state: ModuleState | None = None
        self._seed = jax.random.key(0)
        self._calls = 0

    def pull(self) -> None:
        """Copy newer values from the device to the module's tensors."""
        if self.newer is not None:
            copy_values, self.newer = self.newer, None
            copy_values()

    def fall_back(self, error: TPUModelError) -> None:
        """Let the module run in plain torch from now on, and log the reason.

        Raises:
            TPUValidationError: Validation is strict.
        """
        if self.strict:
            raise TPUValidationError(str(error)) from error
        self.stays_eager = str(error)
        logger.warning("%s It runs in plain torch, not compiled.", error)

    def seed(self, key: jax.Array) -> None:
        """Set the random key."""
        self._seed, self._calls = key, 0

    def call(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> PyTree:
        """Run the module's forward as a program, compiled once per shape of arguments."""
        import torch

        self.pull()
        state = self._current_state()
        tensors, nesting = take_apart((arguments, options))
        gradient = torch.is_grad_enabled()
        moves = tuple(gradient and tensor.requires_grad for tensor in tensors)
        needs_gradient = any(moves) or (gradient and bool(state.trained))
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        key = (nesting, shapes, moves, self._signature, self.remat)
        program = self.programs.get(key)
        if program is None:
            logger.info("compile module=%s shapes=%s", type(self.module).__name__, shapes)
            how: dict[str, Any] = {"placement": self.placement, "donate": self.donate}
            program = ModuleProgram(self.module, state, nesting.rebuild, moves, self.remat, **how)
            self.programs.put(key, program)
        # A donated array must not share torch's memory.
        copies = self.donate and not needs_gradient
        given = [to_array(tensor, copy=copies) for tensor in tensors]
        self._calls += 1
        arrays = Arrays(
            params={path: to_array(tensor, copy=False) for path, tensor in state.trained.items()},
            carried={path: to_array(tensor, copy=False) for path, tensor in state.carried.items()},
            moving=list(compress(given, moves)),
            fixed=list(compress(given, (not move for move in moves))),
            key=jax.random.fold_in(self._seed, self._calls),
        )
        if needs_gradient:
            sources = [*state.trained.values(), *compress(tensors, moves)]
            floats, others, changed = call_with_gradient(program, arrays, sources)
        else:
            results, (others, changed) = program.forward(arrays)
            floats = [to_tensor(array) for array in jax.block_until_ready(results)]
        state.write({}, changed)  # running statistics
        return program.outputs(floats, [tensor_of(array) for array in others])

    def _current_state(self) -> ModuleState:
        """Return the module's tensors, read again if the module was changed."""
        modules = tuple((id(part), part.training) for part in self.module.modules())
        tensors = tuple((id(param), param.requires_grad) for param in self.module.parameters())
        if self._state is None or (modules, tensors) != self._signature:
            self._state, self._signature = ModuleState.of(self.module), (modules, tensors)
        return self._state


def prepare(module: "torch.nn.Module", **options: Any) -> Any:
    """Make a module's calls run as programs, and return the same object.

    Its class is replaced by a subclass of the same name, so `isinstance`, attributes and state
    dicts stay unchanged.
    """
    if link_of(module) is not None:
        return module
    environment()  # raises here, not in the first call, if a package is missing
    kind = type(module)
    module.__class__ = type(kind.__name__, (_Prepared, kind), {"__module__": kind.__module__})
    object.__setattr__(module, _LINK, Link(module, **options))
    return module


def release(module: "torch.nn.Module") -> Any:
    """Turn a prepared module into what it was, with the newest values."""
    link = link_of(module)
    if link is not None:
        link.pull()
        object.__delattr__(module, _LINK)
        module.__class__ = type(module).__bases__[1]
    return module


def link_of(module: object) -> Link | None:
    """Return the link of a prepared module; None for any other module."""
    return vars(module).get(_LINK)


class _Prepared:
    """The first base of every prepared module's class."""

    def forward(self, *arguments: Any, **options: Any) -> PyTree:
        link = link_of(self)
        # While a program is traced, the module's own code runs.
        if link is None or environment().enabled:
            return super().forward(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of the user's class
        refusal: TPUModelError | None = None
        if not link.stays_eager:
            try:
                return link.call(arguments, options)
            except TPUModelError as error:
                refusal = error
        # A wrong call fails here too, with torch's own error, and the module stays compiled.
        outputs = super().forward(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of the user's class
        if refusal is not None:
            link.fall_back(refusal)
        return outputs

    def __getattr__(self, name: str) -> Any:
        link = vars(self).get(_LINK)
        if link is not None and link.newer is not None:
            link.pull()
        return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]  of nn.Module

    def named_parameters(self, *arguments: Any, **options: Any) -> Any:
        _pull(self)
        return super().named_parameters(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of nn.Module

    def named_buffers(self, *arguments: Any, **options: Any) -> Any:
        _pull(self)
        return super().named_buffers(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of nn.Module

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        _pull(self)
        return super().state_dict(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of nn.Module

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        _pull(self)
        return super().load_state_dict(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of nn.Module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module without its link; the copy can be prepared again."""
        _pull(self)
        kind: Any = type(self).__bases__[1]
        copied = kind.__new__(kind)
        memo[id(self)] = copied
        own = {name: value for name, value in vars(self).items() if name != _LINK}
        copied.__dict__.update(copy.deepcopy(own, memo))
        return copied


def _pull(module: object) -> None:
    link = link_of(module)
    if link is not None:
        link.pull()


def shard_module(module: "torch.nn.Module", mesh: Mesh, strategy: str | None = None) -> Any:
    """Make a module's calls run on a mesh, and return the same module.

    Parameters stay torch tensors on the host. In a program they and the batch are sharded over the
    devices; the returned gradients are complete.

    Args:
        module: A module, prepared or not.
        mesh: A mesh of this process's devices.
        strategy: "data", "fsdp", "fsdp+megatron", …; by default it follows from the axis names.

    Raises:
        TPUValidationError: The mesh has devices of other processes.
        ShardingError: The strategy does not fit the mesh.
    """
    here = jax.process_index()
    if any(device.process_index != here for device in mesh.devices.flat):
        raise TPUValidationError(
            "the mesh has devices of other processes, but a loop over torch tensors can use only "
            "devices of its own process: make the mesh from device_manager.local_devices "
            "(gradients are averaged between processes), or train with TPUTrainer on all devices."
        )
    trained = ModuleState.of(module).trained
    shapes = {path: shape_of(tensor) for path, tensor in trained.items()}
    layout = make_layout(
        shapes, mesh, strategy or strategy_for(mesh.axis_names), head_counts=count_heads(module)
    )
    link = link_of(prepare(module))
    assert link is not None, "a prepared module has a link"
    link.placement = MeshPlacement(mesh, layout)
    link.programs.clear()
    return module


class MeshPlacement:
    """Places parameters by a layout, and inputs sharded over the devices that share a batch."""

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        self.layout = layout
        self._mesh = mesh
        self._ways = count_batch_ways(axis_sizes(mesh))

    def rules(self) -> AbstractContextManager[Any]:
        """Return the context that shards activations by the layout's strategy."""
        return self.layout.activation_rules()

    def arguments(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return a program's arguments, in order, on their shards."""
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        return (
            jax.device_put(arrays.params, self.layout.shardings),
            jax.device_put(arrays.carried, everywhere),
            self.by_batch(arrays.moving),
            self.by_batch(arrays.fixed),
            jax.device_put(arrays.key, everywhere),
        )

    def by_batch(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Shard arrays by their first dimension, if it divides evenly among the devices."""
        axes = self.layout.batch_spec[:1]

        def place(array: jax.Array) -> jax.Array:
            is_even = array.ndim > 0 and array.shape[0] % self._ways == 0
            spec = PartitionSpec(*axes) if is_even else PartitionSpec()
            return jax.device_put(array, NamedSharding(self._mesh, spec))

        return [place(array) for array in arrays]
