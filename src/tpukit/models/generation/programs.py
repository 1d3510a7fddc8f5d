"""The compiled programs of generation and the placement of their arrays, for runs and checks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ...annotations import AnyMesh, PyTree
from ...errors import ShardingError
from ...hardware.target import on_one_gpu
from ...parallel.mesh.axes import Role, count_batch_ways, role_of
from ...parallel.mesh.mesh import axis_sizes
from ...parallel.sharding.activations import activation_rules, activation_sharding
from ...parallel.sharding.layout import Layout, make_layout
from ...parallel.sharding.strategy import strategy_for
from ..adapters import TransformerAdapter
from ..attention.choice import automatic_attention
from ..execution import Execution, experts_on, kernel_spread
from ..stored.parameter import with_stacks
from ..stored.running import with_stored_parameters
from ..transformer.config import TransformerConfig
from .cache import CacheSpec
from .cache_attention import SlotKernel
from .decoding import DecodingState, Sampling, begin_rows, extend_rows, follow_rows
from .forward import unstack_layers

SMALLEST_ROOM = 32
# A while loop on a GPU waits for its condition to reach the host; a loop of fixed length does not.
_GPU_TOKENS_PER_CHECK = 8
# One token has no sequence to shard and cannot keep pipeline stages busy.
_NOT_FOR_DECODING: tuple[Role, ...] = ("context", "stage")


def rounded_size(size: int) -> int:
    """Return the size that programs are compiled for, which similar prompts share."""
    return max(SMALLEST_ROOM, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class DecodingPrograms:
    """The programs of one model: `prefill` reads prompts at once, `decode` adds tokens in a loop.

    Experts have no capacity limit, because a token's result must not depend on its batch.

    Attributes:
        model: The model.
        mesh: Rows are sharded over its data, fsdp and expert axes, heads over tensor, parameters
            as in training. None leaves shardings to the arguments and the compiler.
        loop: Whether layers are a scan over their stacks. Unrolled layers take the parameters of
            `prepared`, and no weight or cache is sliced from a stack, which is faster on a GPU.
            None unrolls on one GPU only.
        kv: The format of keys, values and latents; the model's own dtype by default.

    Raises:
        ShardingError: The mesh has an axis that decoding cannot use.
    """

    model: TransformerConfig
    mesh: AnyMesh | None = None
    loop: bool | None = None
    kv: CacheSpec | None = None

    def __post_init__(self) -> None:
        for axis, size in {} if self.mesh is None else axis_sizes(self.mesh).items():
            if size > 1 and role_of(axis) in _NOT_FOR_DECODING:
                raise ShardingError(
                    f"generation does not support the mesh axis {axis}={size}, because one token "
                    "has no sequence to shard and cannot keep stages busy; use data, fsdp, tensor "
                    "or expert."
                )

    @cached_property
    def config(self) -> TransformerConfig:
        """The model with dropless routing."""
        return self.model.replace(routing="dropless")

    @property
    def strategy(self) -> str:
        """The sharding strategy for the names of the mesh's axes."""
        axes = {} if self.mesh is None else axis_sizes(self.mesh)
        return strategy_for(axis for axis in axes if role_of(axis) not in _NOT_FOR_DECODING)

    @cached_property
    def execution(self) -> Execution:
        """The execution settings."""
        loop = self._is_loop
        execution = Execution(scan_layers=loop, joined_matmuls=not loop)
        if self.mesh is None:
            return execution
        axes = kernel_spread(self.mesh, self.strategy)
        execution = execution.replace(
            attention=partial(automatic_attention, **axes), slots=SlotKernel(**axes)
        )
        if not self.config.has_experts:
            return execution
        return experts_on(self.mesh, self.strategy, execution)

    @cached_property
    def _is_loop(self) -> bool:
        return self.loop if self.loop is not None else not on_one_gpu()

    def prepared(self, params: PyTree) -> PyTree:
        """Return the parameters in the form of the programs' first argument."""
        return with_stacks(params) if self._is_loop else jax.jit(unstack_layers)(params)

    def prefill(self, *, sampling: Sampling, slots: int) -> Any:
        """Return the program (params, tokens, lengths, eos, seed) -> state; see `begin_rows`."""
        return self._jitted("prefill", begin_rows, sampling=sampling, slots=slots)

    def decode(self, *, sampling: Sampling) -> Any:
        """Return the program (params, state, until, eos, seed) -> state; see `extend_rows`."""
        tokens = 1 if self._is_loop else _GPU_TOKENS_PER_CHECK
        return self._jitted(
            "decode", extend_rows, donate=1, sampling=sampling, tokens_per_check=tokens
        )

    def follow(self, *, slots: int) -> Any:
        """Return the program (params, tokens, lengths, following) -> logits; see `follow_rows`."""
        return self._jitted("follow", follow_rows, slots=slots)

    def rows(self, wanted: int) -> int:
        """Return the rows of a batch padded so that every device has the same number."""
        ways = 1 if self.mesh is None else count_batch_ways(axis_sizes(self.mesh))
        return -(-wanted // ways) * ways

    @cached_property
    def layout(self) -> Layout:
        """The layout of the parameters on the mesh."""
        assert self.mesh is not None
        adapter = TransformerAdapter(self.config)
        return make_layout(
            self._param_shapes, self.mesh, self.strategy, head_counts=adapter.head_counts
        )

    def put_rows(self, rows: PyTree) -> PyTree:
        """Return arrays with a leading axis of rows, placed on their devices."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, rows)
        with self._rules():
            return jax.tree.map(lambda leaf: jax.device_put(leaf, _sharding_of_rows(leaf)), rows)

    def abstract_params(self) -> PyTree:
        """Return the shapes of the parameters with their shardings, for programs with a scan."""
        shapes = self._param_shapes
        if self.mesh is None:
            return shapes
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.layout.shardings,
        )

    def prefill_arguments(self, *, rows: int, prompt: int) -> tuple[Any, ...]:
        """Return the arguments of `prefill` after the parameters, as shapes with shardings."""
        with self._rules():
            tokens = _as_placed(jax.ShapeDtypeStruct((rows, prompt), jnp.int32), "batch", None)
            lengths = _as_placed(jax.ShapeDtypeStruct((rows,), jnp.int32), "batch")
        return (tokens, lengths, *self._ends_and_seed())

    def decode_arguments(self, *, rows: int, slots: int) -> tuple[Any, ...]:
        """Return the arguments of `decode` after the parameters, as shapes with shardings."""
        begin = self.prefill(sampling=Sampling(temperature=0), slots=slots)
        prompts = self.prefill_arguments(rows=rows, prompt=slots)
        state: DecodingState = jax.eval_shape(begin, self._param_shapes, *prompts)
        with self._rules():
            state = state.placed(_as_placed)
        return (state, self._everywhere((), jnp.int32), *self._ends_and_seed())

    def _ends_and_seed(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self._everywhere((1,), jnp.int32), self._everywhere((), jnp.uint32)

    def _everywhere(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        replicated = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)

    def _rules(self) -> AbstractContextManager[object]:
        if self.mesh is None:
            return nullcontext()
        return activation_rules(self.mesh, self.strategy)

    def _jitted(
        self, name: str, function: Callable[..., Any], *, donate: Any = (), **static: Any
    ) -> Any:
        bound = partial(
            function, config=self.config, execution=self.execution, kv=self.kv, **static
        )
        placed = None if self.mesh is None else lambda: self.layout.shardings
        run = with_stored_parameters(bound, shardings=placed)

        def program(*arguments: Any) -> Any:
            with self._rules():
                return run(*arguments)

        program.__name__ = name  # the name in compiled programs
        return jax.jit(program, donate_argnums=donate)

    @cached_property
    def _param_shapes(self) -> PyTree:
        adapter = TransformerAdapter(self.config)
        return jax.eval_shape(lambda: adapter.init(jax.random.key(0)).params)


def _as_placed(leaf: Any, *dimensions: str | None, units: tuple[int, ...] | None = None) -> Any:
    """Return the shape of `leaf` with its sharding under the current activation rules."""
    sharding = activation_sharding(units or leaf.shape, *dimensions)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _sharding_of_rows(leaf: Any) -> NamedSharding | None:
    return activation_sharding(leaf.shape, "batch", *(None,) * (leaf.ndim - 1))
