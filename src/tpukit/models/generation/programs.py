"""The two programs of generation and where they keep their arrays: what is checked is what runs."""

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
from ..execution import Execution
from ..placement import experts_on, kernel_spread
from ..stored.parameter import with_stacks
from ..stored.running import with_stored_parameters
from ..transformer.config import TransformerConfig
from .cache import CacheSpec
from .decoding import DecodingState, Sampling, begin_rows, extend_rows, follow_rows
from .preparation import lay_apart
from .slot_kernel import SlotKernel

SMALLEST_ROOM = 32
# A GPU's loop waits for its condition to reach the host; one of a known number of turns does not.
_GPU_TURN = 8
# One token cannot be cut along its sequence, nor keep stages busy.
_NOT_FOR_DECODING: tuple[Role, ...] = ("context", "stage")


def rounded_size(size: int) -> int:
    """The size that programs are compiled for, so that similar prompts share one."""
    return max(SMALLEST_ROOM, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class DecodingPrograms:
    """The programs of one model: `prefill` reads prompts at once, `decode` adds tokens in a loop.

    Experts are routed without a capacity: what a token gets must not depend on its batch.

    Attributes:
        model: What the parameters are of.
        mesh: Rows are split over its data, fsdp and expert axes, heads over tensor, parameters as
            in training. None leaves all of it to the arguments and the compiler.
        loop: Whether layers are a loop over their stacks. Without one, parameters come as
            `prepared` gives them, and no weight or cache is cut out of others: the steps of a GPU,
            which has nothing else to wait for. None: a loop but on one GPU.
        kv: How keys, values and latents are kept; in the model's own dtype by default.

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
                    f"generation cannot use the mesh axis {axis}={size}: a token at a time has no "
                    "sequence to cut and keeps no stages busy; use data, fsdp, tensor or expert."
                )

    @cached_property
    def config(self) -> TransformerConfig:
        """The model as it runs."""
        return self.model.replace(routing="dropless")

    @property
    def strategy(self) -> str:
        """How the work is split, by the names of the mesh's axes."""
        axes = {} if self.mesh is None else axis_sizes(self.mesh)
        return strategy_for(axis for axis in axes if role_of(axis) not in _NOT_FOR_DECODING)

    @cached_property
    def execution(self) -> Execution:
        """How layers, attention and experts run."""
        loop = self._is_loop
        found = Execution(scan_layers=loop, one_product=not loop)
        if self.mesh is None:
            return found
        spread = kernel_spread(self.mesh, self.strategy)
        found = found.replace(
            attention=partial(automatic_attention, **spread), slots=SlotKernel(**spread)
        )
        return experts_on(self.mesh, self.strategy, found) if self.config.has_experts else found

    @cached_property
    def _is_loop(self) -> bool:
        return self.loop if self.loop is not None else not on_one_gpu()

    def prepared(self, params: PyTree) -> PyTree:
        """Parameters as the programs take them."""
        return with_stacks(params) if self._is_loop else jax.jit(lay_apart)(params)

    def prefill(self, *, sampling: Sampling, slots: int) -> Any:
        """(params, tokens, lengths, eos, seed) -> state; see `begin_rows`."""
        return self._jitted("prefill", begin_rows, sampling=sampling, slots=slots)

    def decode(self, *, sampling: Sampling) -> Any:
        """(params, state, until, eos, seed) -> state, written in place; see `extend_rows`."""
        turn = 1 if self._is_loop else _GPU_TURN
        return self._jitted("decode", extend_rows, donate=1, sampling=sampling, turn=turn)

    def follow(self, *, slots: int) -> Any:
        """(params, tokens, lengths, following) -> logits; see `follow_rows`."""
        return self._jitted("follow", follow_rows, slots=slots)

    def rows(self, wanted: int) -> int:
        """How many rows a batch of `wanted` takes: every device has as many as the others."""
        ways = 1 if self.mesh is None else count_batch_ways(axis_sizes(self.mesh))
        return -(-wanted // ways) * ways

    @cached_property
    def layout(self) -> Layout:
        """Where every parameter lives on the mesh."""
        assert self.mesh is not None
        adapter = TransformerAdapter(self.config)
        return make_layout(
            self._param_shapes, self.mesh, self.strategy, head_counts=adapter.head_counts
        )

    def put_rows(self, rows: PyTree) -> PyTree:
        """Arrays with a leading axis of rows, on their devices."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, rows)
        with self._rules():
            return jax.tree.map(lambda leaf: jax.device_put(leaf, _sharding_of_rows(leaf)), rows)

    def abstract_params(self) -> PyTree:
        """Shapes of the parameters, with their shardings; of programs with a loop."""
        shapes = self._param_shapes
        if self.mesh is None:
            return shapes
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.layout.shardings,
        )

    def prefill_arguments(self, *, rows: int, prompt: int) -> tuple[Any, ...]:
        """Arguments of `prefill` but the parameters, as shapes with shardings."""
        with self._rules():
            tokens = _as_placed(jax.ShapeDtypeStruct((rows, prompt), jnp.int32), "batch", None)
            lengths = _as_placed(jax.ShapeDtypeStruct((rows,), jnp.int32), "batch")
        return (tokens, lengths, *self._ends_and_seed())

    def decode_arguments(self, *, rows: int, slots: int) -> tuple[Any, ...]:
        """Arguments of `decode` but the parameters, as shapes with shardings."""
        begin = self.prefill(sampling=Sampling(temperature=0), slots=slots)
        prompts = self.prefill_arguments(rows=rows, prompt=slots)
        state: DecodingState = jax.eval_shape(begin, self._param_shapes, *prompts)
        with self._rules():
            state = state.placed(_as_placed)
        return (state, self._everywhere((), jnp.int32), *self._ends_and_seed())

    def _ends_and_seed(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self._everywhere((1,), jnp.int32), self._everywhere((), jnp.uint32)

    def _everywhere(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        whole = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

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
        whole = with_stored_parameters(bound, shardings=placed)

        def program(*arguments: Any) -> Any:
            with self._rules():
                return whole(*arguments)

        program.__name__ = name  # what the compiler calls it
        return jax.jit(program, donate_argnums=donate)

    @cached_property
    def _param_shapes(self) -> PyTree:
        adapter = TransformerAdapter(self.config)
        return jax.eval_shape(lambda: adapter.init(jax.random.key(0)).params)


def _as_placed(leaf: Any, *dimensions: str | None, units: tuple[int, ...] | None = None) -> Any:
    """The shape of `leaf` where the rules in force would put it."""
    sharding = activation_sharding(units or leaf.shape, *dimensions)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _sharding_of_rows(leaf: Any) -> NamedSharding | None:
    return activation_sharding(leaf.shape, "batch", *(None,) * (leaf.ndim - 1))
