"""`Workload`: model, loss, optimizer and batch as pure functions with a sharding for each leaf."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from rich.table import Table

from ..annotations import AnyMesh, PyTree
from ..errors import TPUModelError
from ..frameworks import model_name
from ..hardware import Figure
from ..hardware.target import on_one_gpu
from ..models.adapters import ModelAdapter, TransformerAdapter, Variables, adapt, head_counts_of
from ..models.attention.choice import AttentionFunction
from ..models.execution import Execution
from ..models.lora.adapter import LoraAdapter, lora_layout
from ..models.lora.spec import LoraSpec, lora_multiply_adds
from ..models.loss import Batch, LossChunks, LossFunction, check_loss_chunks, loss_chunks_text
from ..models.remat.policy import RematPolicy, RematSpec
from ..models.stored.placement import stored_shardings
from ..models.stored.running import dense_shapes
from ..models.transformer.accounting import count_flops_per_step
from ..models.transformer.config import TransformerConfig
from ..parallel.rebalancing import move
from ..parallel.sharding.layout import Layout, make_layout
from ..parallel.sharding.rules import Rules
from ..plain_data import JsonObject
from ..runtime.user_code import errors_in_trace
from ..shown import Shown
from .mixed_precision import narrowed
from .optimizer import build_optimizer
from .optimizer_spec import DEFAULT_LEARNING_RATE, OptimizerSpec
from .parts import StepSettings, TrainState, random_batch
from .placement import batch_shardings, execution_on, in_ring_order
from .update import check_stages, updated_state

# Compile time grows with unrolled layers; see `Workload.scan_layers`.
MOST_UNROLLED_LAYERS = 64
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


@dataclass(frozen=True)
class StepShardings:
    """A NamedSharding for every leaf a training step reads and writes."""

    state: TrainState
    batch: dict[str, NamedSharding]
    layout: Layout


@dataclass(frozen=True)
class Workload(Shown):
    """A training setup that can be planned, compiled and run.

    Args:
        model: A preset name, a `TransformerConfig`, a flax nnx, flax linen or equinox module, a
            function that makes an nnx module from `nnx.Rngs`, or a pair (init, apply).
        batch_size: Examples per step, over all devices.
        sequence_length: Tokens per example (language models).
        batch: Shapes of the batch entries, where they are not "inputs" and "targets" of token ids.
        inputs: The batch entries that the model is called with.
        loss: (outputs, batch) -> a mean loss or a `WeightedLoss`. By default a scalar output is
            the loss, and logits are compared with `batch["targets"]`.
        loss_chunks: Chunks of each device's tokens for the reference transformer's loss, so that
            all logits never exist at once. "auto" chunks where logits would be large (see
            `chunked_next_token_loss`), None never chunks, and a function (x, kernel, targets)
            computes the loss from activations.
        z_loss: Weight of the squared log of the softmax's normaliser in the default loss.
        compute_dtype: For user models: parameters and inputs are cast to this for each use, while
            master weights, gradients and the loss keep their formats ("bfloat16").
        param_dtype: For user models: the format of the master weights.
        optimizer: Any optax transformation; by default the one of `OptimizerSpec()`.
        remat: What the backward pass recomputes; see `RematPolicy`.
        strategy: How to split the work over a mesh: "fsdp", "megatron", "fsdp+megatron", …
        rules: (pattern, spec) pairs that go before the strategy.
        microbatches: Micro-batches per step. With the "pipeline" strategy they flow through the
            stages; otherwise their gradients are accumulated.
        pipeline_schedule: "gpipe" or "1f1b".
        attention: "auto", "flash", "splash", "xla", "ring", "cudnn", or a function.
        scan_layers: Whether the reference transformer scans its layers or unrolls them. None
            unrolls on one GPU, where a scan copies gradients into their stack.
        grad_norm: Whether a step reports the norm of all gradients; clipping does not need it.
        seed: Seed of the random numbers in a step (dropout).
        lora: LoRA settings; only the LoRA matrices are trained then.
        frozen: With `lora`: a function that returns the frozen base parameters in a quantized
            form; by default they keep their format.

    Example:
        >>> work = Workload("tiny", batch_size=8, sequence_length=32)
        >>> state = work.init(jax.random.key(0))
        >>> state, metrics = jax.jit(work.train_step)(state, work.example_batch())
    """

    model: object
    _: KW_ONLY
    batch_size: int | None = None
    sequence_length: int | None = None
    batch: Mapping[str, jax.ShapeDtypeStruct] | None = None
    inputs: Sequence[str] = ("inputs",)
    loss: LossFunction | None = None
    loss_chunks: LossChunks = "auto"
    z_loss: float = 0.0
    compute_dtype: str | None = None
    param_dtype: str | None = None
    optimizer: optax.GradientTransformation | None = None
    remat: RematSpec = None
    strategy: str = "fsdp"
    rules: Rules | None = None
    microbatches: int = 1
    pipeline_schedule: str = "1f1b"
    attention: str | AttentionFunction = "auto"
    scan_layers: bool | None = None
    grad_norm: bool = True
    seed: int = 0
    lora: LoraSpec | None = None
    frozen: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        shapes = self.batch_shapes()
        for name, shape in shapes.items():
            if shape.shape[:1] != (self.examples,):
                raise TPUModelError(
                    f"batch entry '{name}' has shape {shape.shape}; expected the batch dimension "
                    f"{self.examples} first, as in every entry."
                )
        if self.microbatches < 1 or self.examples % self.microbatches:
            raise TPUModelError(
                f"microbatches={self.microbatches} does not divide batch_size={self.examples}; "
                "choose a divisor."
            )
        config = self.config
        if config is not None and (self.sequence_length or 0) > config.max_seq_len:
            raise TPUModelError(
                f"sequence_length={self.sequence_length} is longer than the limit of "
                f"'{config.name}', max_seq_len={config.max_seq_len}; shorten it or raise the limit."
            )
        check_loss_chunks(self.loss_chunks, own_loss=self.loss is None and config is not None)
        object.__setattr__(self, "remat", RematPolicy.parse(self.remat))

    def replace(self, **changes: Any) -> "Workload":
        """Return the same workload with some settings changed."""
        return dataclasses.replace(self, **changes)

    @property
    def examples(self) -> int:
        """Examples per step, over all devices."""
        return next((shape.shape[0] for shape in self.batch_shapes().values() if shape.ndim), 1)

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens per step, or None for a batch without sequences."""
        return None if self.sequence_length is None else self.examples * self.sequence_length

    @property
    def config(self) -> TransformerConfig | None:
        """The configuration of a reference transformer, or None for a user model."""
        adapter = self.adapter.inner if isinstance(self.adapter, LoraAdapter) else self.adapter
        return adapter.config if isinstance(adapter, TransformerAdapter) else None

    @property
    def flops_per_step(self) -> Figure:
        """FLOPs of a step over all devices, as MFU counts them; missing for user models."""
        thin: float | None = None
        if self.lora is not None and self.config is not None:
            thin = lora_multiply_adds(self.lora, self.config)
        return count_flops_per_step(
            self.config,
            sequence_length=self.sequence_length,
            tokens_per_step=self.tokens_per_step,
            lora_multiply_adds=thin,
        )

    @cached_property
    def adapter(self) -> ModelAdapter:
        """The adapter of the model, with mixed precision and LoRA applied."""
        adapter = adapt(self.model, inputs=self.inputs, batch_shapes=self.batch_shapes())
        if self.compute_dtype is not None or self.param_dtype is not None:
            adapter = narrowed(adapter, self.compute_dtype, self.param_dtype)
        return adapter if self.lora is None else LoraAdapter(adapter, self.lora, self.frozen)

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of every batch entry."""
        if self.batch is not None:
            if not self.batch:
                raise TPUModelError("batch={} has no entries; leave it out, or give their shapes.")
            return dict(self.batch)
        if self.batch_size is None or self.sequence_length is None:
            raise TPUModelError(
                "a workload needs batch_size and sequence_length (token batches), or batch= with "
                "the shapes of every entry."
            )
        tokens = jax.ShapeDtypeStruct((self.batch_size, self.sequence_length), jnp.int32)
        return {"inputs": tokens, "targets": tokens}

    def example_batch(self, seed: int = 0) -> dict[str, jax.Array]:
        """Return a random batch of the right shapes, with token ids within the vocabulary."""
        vocabulary = self.config.vocab_size if self.config is not None else 2
        return random_batch(self.batch_shapes(), below=vocabulary, seed=seed)

    @cached_property
    def transformation(self) -> optax.GradientTransformation:
        """The optimizer in use."""
        if self.optimizer is not None:
            return self.optimizer
        return build_optimizer(OptimizerSpec(), DEFAULT_LEARNING_RATE)

    def init(self, rng: jax.Array) -> TrainState:
        """Return a new state; a pure function of `rng`."""
        variables = self._variables(rng)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=variables.params,
            opt_state=self.transformation.init(variables.params),
            model_state=variables.model_state,
        )

    def train_step(
        self, state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Run one step on the devices of the arguments; a pure function."""
        return self._step(state, batch, self.execution, mesh=None)

    def train_step_on(self, mesh: AnyMesh) -> TrainStep:
        """Return the step with activations and collectives placed on `mesh`; a pure function."""
        layout = self.layout(mesh)
        execution = self.execution_on(mesh)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            with layout.activation_rules():
                return self._step(state, batch, execution, mesh=mesh)

        return step

    def jit_train_step(self, mesh: AnyMesh) -> jax.stages.Wrapped:
        """Return `train_step_on(mesh)` jitted, with all shardings and a donated state."""
        shardings = self.shardings(mesh)
        everywhere = NamedSharding(mesh, PartitionSpec())
        return jax.jit(
            self.train_step_on(mesh),
            in_shardings=(shardings.state, shardings.batch),
            out_shardings=(shardings.state, everywhere),
            donate_argnums=0,
        )

    def state_shapes(self) -> TrainState:
        """Return the shape and dtype of every leaf of the state; nothing is allocated."""
        return self._state_shapes

    def layout(self, mesh: AnyMesh) -> Layout:
        """Return the layout of the model's parameters on `mesh`, derived once per mesh."""
        if mesh not in self._layouts:
            if self.config is not None:
                check_stages(self.config, mesh, self.strategy)
            heads = head_counts_of(self.adapter)
            self._layouts[mesh] = make_layout(
                self.base_shapes, mesh, self.strategy, rules=self.rules, head_counts=heads
            )
        return self._layouts[mesh]

    def shardings(self, mesh: AnyMesh) -> StepShardings:
        """Return a sharding for every leaf of the state and the batch, derived once per mesh.

        Optimizer state is sharded like the parameters it belongs to.
        """
        if mesh not in self._shardings:
            self._shardings[mesh] = self._derive_shardings(mesh)
        return self._shardings[mesh]

    def _derive_shardings(self, mesh: AnyMesh) -> StepShardings:
        layout, shapes = self.layout(mesh), self.state_shapes()
        everywhere = NamedSharding(mesh, PartitionSpec())
        trained = layout if self.lora is None else lora_layout(shapes.params, layout)
        state = TrainState(
            step=everywhere,
            params=trained.shardings,
            opt_state=trained.for_optimizer_state(shapes.opt_state),
            model_state=_everywhere(mesh, shapes.model_state),
        )
        if self.lora is not None:
            kept = shapes.model_state["base"]
            state.model_state["base"] = stored_shardings(kept, layout.shardings)
        shardings = batch_shardings(
            layout,
            self.batch_shapes(),
            sequence_length=self.sequence_length,
            microbatches=self.microbatches,
        )
        return StepShardings(state, shardings, layout)

    def abstract_args(self, mesh: AnyMesh) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
        """Return the step's arguments as shapes with shardings, for compiling without memory."""
        shardings = self.shardings(mesh)

        def placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        state = jax.tree.map(placed, self.state_shapes(), shardings.state)
        return state, jax.tree.map(placed, self.batch_shapes(), shardings.batch)

    def init_on(self, mesh: AnyMesh, rng: jax.Array, params: PyTree = None) -> TrainState:
        """Return a new sharded state; no device ever holds an unsharded parameter.

        Args:
            mesh: The mesh of the state.
            rng: The random key of new parameters.
            params: Existing parameters of the model; None draws new ones.
        """
        shardings = self.shardings(mesh).state
        if params is None and not self.adapter.initialised:
            return jax.jit(self.init, out_shardings=shardings)(rng)
        # The parameters exist already, so they are moved and only the rest is made in place.
        variables = self._variables(rng) if params is None else self._around(params, rng)
        params = jax.tree.map(move, variables.params, shardings.params)
        opt_state = jax.jit(self.transformation.init, out_shardings=shardings.opt_state)(params)
        return TrainState(
            step=move(jnp.zeros((), jnp.int32), shardings.step),
            params=params,
            opt_state=opt_state,
            model_state=jax.tree.map(move, variables.model_state, shardings.model_state),
        )

    def put_batch(self, mesh: AnyMesh, batch: Batch) -> dict[str, jax.Array]:
        """Return the sharded batch; every process passes the full batch and places its shards."""
        shardings = self.shardings(mesh).batch
        return {
            name: jax.make_array_from_callback(
                value.shape, shardings[name], lambda index, value=value: np.asarray(value)[index]
            )
            for name, value in batch.items()
        }

    def to_dict(self) -> JsonObject:
        """Return the settings as plain data, with the parameter count."""
        params = jax.tree.leaves(self._param_shapes)
        return {
            "model": self.config.name if self.config is not None else model_name(self.model),
            "parameters": sum(leaf.size for leaf in params),
            "batch_size": self.examples,
            "sequence_length": self.sequence_length,
            "strategy": self.strategy,
            "remat": str(self.remat),
            "loss_chunks": loss_chunks_text(self.loss_chunks),
            "microbatches": self.microbatches,
            "pipeline_schedule": self.pipeline_schedule if "pipeline" in self.strategy else None,
        }

    def __rich__(self) -> Table:
        table = Table("workload", "", title=None)
        for name, value in self.to_dict().items():
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
        return table

    @cached_property
    def _layouts(self) -> dict[AnyMesh, Layout]:
        return {}

    @cached_property
    def _shardings(self) -> dict[AnyMesh, StepShardings]:
        return {}

    @cached_property
    def _state_shapes(self) -> TrainState:
        # Cached, because tracing a model is slow and a start needs the shapes many times.
        return jax.eval_shape(self.init, jax.random.key(0))

    @cached_property
    def _param_shapes(self) -> Any:
        return jax.eval_shape(lambda rng: self._variables(rng).params, jax.random.key(0))

    @cached_property
    def base_shapes(self) -> PyTree:
        """Shape and dtype of every parameter of the model, frozen and quantized ones included."""
        if self.lora is None:
            return self._param_shapes
        return dense_shapes(self.state_shapes().model_state["base"])

    def _variables(self, rng: jax.Array) -> Variables:
        with errors_in_trace(model_name(self.model)):
            return self.adapter.init(rng)

    def _around(self, params: PyTree, rng: jax.Array) -> Variables:
        """Return variables with existing parameters and new carried state."""
        shapes = jax.eval_shape(self._variables, rng)
        if isinstance(self.adapter, LoraAdapter):
            carried = shapes.model_state["carried"]
            if jax.tree.leaves(carried):
                carried = self.adapter.inner.init(rng).model_state
            return self.adapter.with_new_matrices(params, carried, rng)
        carried = shapes.model_state
        if jax.tree.leaves(carried):
            carried = self.adapter.init(rng).model_state
        return Variables(params, carried)

    @property
    def _scans_layers(self) -> bool:
        if self.scan_layers is not None:
            return self.scan_layers
        few = self.config is not None and self.config.n_layers <= MOST_UNROLLED_LAYERS
        return not (few and on_one_gpu())

    @property
    def execution(self) -> Execution:
        """The execution settings without a mesh."""
        return Execution(
            attention=self.attention,
            remat=RematPolicy.parse(self.remat),
            scan_layers=self._scans_layers,
            gpu_kernels=on_one_gpu(),
            loss_chunks=self.loss_chunks if self.loss is None else None,
            z_loss=self.z_loss,
        )

    def execution_on(self, mesh: AnyMesh) -> Execution:
        """Return the execution settings on `mesh`."""
        return execution_on(
            mesh,
            self.strategy,
            self.execution,
            config=self.config,
            sequence_length=self.sequence_length if self.loss is None else None,
        )

    def _step(
        self, state: TrainState, batch: Batch, execution: Execution, *, mesh: AnyMesh | None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        rng = jax.random.fold_in(jax.random.key(self.seed), state.step)
        batch = in_ring_order(batch, execution.zigzag)
        settings = StepSettings(
            adapter=self.adapter,
            loss=self.loss,
            execution=execution,
            microbatches=self.microbatches,
            pipeline_schedule=self.pipeline_schedule,
            strategy=self.strategy,
            grad_norm=self.grad_norm,
            mesh=mesh,
        )
        with errors_in_trace(model_name(self.model)):
            return updated_state(settings, self.transformation, state, batch, rng)


def _everywhere(mesh: AnyMesh, tree: PyTree) -> Any:
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree)
