"""A PyTorch module behind the protocol that every model here stands behind."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ....errors import TPUModelError
from ...execution import Execution
from ...loss.loss import Batch
from ...remat.policy import RematPolicy
from ..protocol import Applied, ModelInputs, Variables
from .arrays import to_array
from .environment import require_torch, running
from .layers import CheckpointedLayers
from .placement import PlacedActivations, count_heads
from .refusals import explained
from .state import ModuleState, attributes_restored

# (module, tensors of the batch by name) -> outputs, or a loss.
Forward = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class TorchModel:
    """A module, and how it is called on a batch where that is not simply by its inputs.

    Attributes:
        module: An `nn.Module`.
        forward: (module, batch) -> outputs or a scalar loss, in torch; None calls the module on
            the entries that a workload names as its inputs.
    """

    module: Any
    forward: Forward | None = None


@dataclass(frozen=True)
class TorchAdapter:
    """A module as two pure functions; names of parameters are torch's own."""

    model: TorchModel
    inputs: ModelInputs

    @cached_property
    def state(self) -> ModuleState:
        """The module's tensors by name."""
        return ModuleState.of(self.model.module)

    @property
    def head_counts(self) -> dict[str, int] | None:
        """How many heads there are, where the module says it."""
        return count_heads(self.model.module)

    @property
    def initialised(self) -> bool:
        """A module has values, unless it was made on torch's meta device."""
        return self.state.has_values

    def init(self, rng: jax.Array) -> Variables:
        """Copy the module's own values; while it is traced for shapes, nothing is copied.

        Raises:
            TPUModelError: Values of a module on the meta device are asked for.
        """
        if not isinstance(rng, Tracer) and self.initialised:
            parts = (self.state.trained, self.state.carried)
            params, rest = ({name: to_array(one) for name, one in p.items()} for p in parts)
            return Variables(params, rest)
        if not isinstance(rng, Tracer):
            raise TPUModelError(
                f"{type(self.model.module).__name__} is on torch's meta device and has no values "
                "to train; build it without torch.device('meta') (to check it, shapes are enough)."
            )
        shapes = self.state.shapes()
        params, rest = (
            {name: jnp.zeros(s.shape, s.dtype) for name, s in p.items()} for p in shapes
        )
        return Variables(params, rest)

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the module; buffers that it wrote to are its new state."""
        model = TorchModel(self.model.module, self._forward)
        outputs, state = run_module(
            model, self.state, variables, batch, rng=rng, remat=execution.remat
        )
        return Applied(plain_outputs(outputs), state)

    @cached_property
    def _forward(self) -> Forward:
        if self.model.forward is not None:
            return self.model.forward
        names = self.inputs.names
        known = inspect.signature(self.model.module.forward).parameters

        def by_inputs(module: Any, batch: Mapping[str, Any]) -> Any:
            arguments = dict(zip(names, self.inputs.arguments(batch), strict=True))
            keywords = {name: one for name, one in arguments.items() if name in known}
            others = [one for name, one in arguments.items() if name not in known]
            return module(*others, **keywords)

        return by_inputs


def run_module(
    model: TorchModel,
    state: ModuleState,
    variables: Variables,
    batch: Mapping[str, Any],
    *,
    rng: jax.Array,
    remat: RematPolicy,
) -> tuple[Any, dict[str, jax.Array]]:
    """Run a module on other values than its own: a pure function.

    Returns:
        What its forward gave, with arrays for tensors, and the state that it carries on.

    Raises:
        TPUModelError: The module cannot be one program; the message names the line.
    """
    module, forward = model.module, model.forward
    if forward is None:
        raise TPUModelError("run_module() needs to know how the module is called.")
    with running(rng) as environment, explained(module):
        tensors = environment.j2t_iso({**variables.params, **variables.model_state})
        held = {name_in(path): one for path, one in state.whole(tensors).items()}
        with (
            attributes_restored(module),
            CheckpointedLayers(module, remat),
            PlacedActivations(module),
        ):
            given = environment.j2t_iso(dict(batch))
            outputs = _call(module, forward, held, given)
            _refuse_writes(module, batch, given, variables, held)
        changed = {path: held[name_in(path)] for path in variables.model_state}
        outputs, changed = environment.t2j_iso((outputs, changed))
    carried = {path: new.astype(variables.model_state[path].dtype) for path, new in changed.items()}
    return outputs, carried


def _refuse_writes(
    module: Any,
    batch: Mapping[str, Any],
    given: Mapping[str, Any],
    variables: Variables,
    held: Mapping[str, Any],
) -> None:
    """Refuse a forward that writes to what comes in: nobody outside would see it."""
    before, after = jax.tree.leaves(dict(batch)), jax.tree.leaves(dict(given))
    kind = type(module).__name__
    if any(one is not tensor.jax() for one, tensor in zip(before, after, strict=True)):
        raise TPUModelError(
            f"{kind} writes into its input in place, which its caller would not see here; write "
            "into a copy: x = x.clone()."
        )
    for path, array in variables.params.items():
        if held[name_in(path)].jax() is not array:
            raise TPUModelError(
                f"{kind} writes into its parameter {path.replace('/', '.')} in its forward; keep "
                "what changes there in a buffer."
            )


def name_in(path: str) -> str:
    """Return what a tensor is called in the module that `_call` makes around the user's own."""
    return "module." + path.replace("/", ".")


def plain_outputs(outputs: Any) -> Any:
    """Return a model's outputs as plain trees; of a Hugging Face output its loss or its logits."""
    if not hasattr(outputs, "to_tuple"):
        return outputs
    for name in ("loss", "logits", "last_hidden_state"):
        found = getattr(outputs, name, None)
        if found is not None:
            return found
    return outputs.to_tuple()


def checkpoint_torch(model: Any, remat: RematPolicy) -> TorchModel:
    """Return the same module with gradient checkpoints between its layers."""
    whole = model if isinstance(model, TorchModel) else TorchModel(model)
    inner = whole.forward

    def forward(module: Any, batch: Mapping[str, Any]) -> Any:
        with CheckpointedLayers(module, remat):
            return module(*batch.values()) if inner is None else inner(module, batch)

    return dataclasses.replace(whole, forward=forward)


def _call(module: Any, forward: Forward, held: dict[str, Any], batch: Mapping[str, Any]) -> Any:
    """Call `forward` on the module while it holds other tensors; `held` gets what it wrote."""
    torch = require_torch("a PyTorch model")

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: Mapping[str, Any]) -> Any:
            return forward(self.module, batch)

    whole = Whole()
    whole.training = module.training
    return torch.func.functional_call(whole, held, (batch,), tie_weights=False)
