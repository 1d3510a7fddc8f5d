"""The adapter of PyTorch modules."""

import dataclasses
import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ....errors import TPUError, TPUModelError
from ....plain_data import JsonMapping
from ....runtime.user_code import first_line, user_line
from ...execution import Execution
from ...loss import Batch
from ...remat.policy import RematPolicy
from ..protocol import Applied, ModelInputs, Variables
from .arrays import to_array
from .environment import require_torch, running
from .layers import CheckpointedLayers, PlacedActivations, count_heads
from .state import ModuleState, attributes_restored

# (module, tensors of the batch by name) -> outputs, or a loss.
Forward = Callable[[Any, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class TorchModel:
    """A module, and an optional function that calls it on a batch.

    Attributes:
        module: An `nn.Module`.
        forward: (module, batch) -> outputs or a scalar loss, in torch; None calls the module with
            the inputs of the workload.
    """

    module: Any
    forward: Forward | None = None


@dataclass(frozen=True)
class TorchAdapter:
    """A module as two pure functions; parameters have torch's names."""

    model: TorchModel
    inputs: ModelInputs

    @cached_property
    def state(self) -> ModuleState:
        """The module's tensors by name."""
        return ModuleState.of(self.model.module)

    @property
    def head_counts(self) -> dict[str, int] | None:
        """Numbers of heads, or None where the module has no such configuration."""
        return count_heads(self.model.module)

    @property
    def initialised(self) -> bool:
        """Whether the module has values, unlike one on torch's meta device."""
        return self.state.has_values

    def init(self, rng: jax.Array) -> Variables:
        """Return copies of the module's values, or zeros while it is traced for shapes.

        Raises:
            TPUModelError: The module is on the meta device and has no values.
        """
        if not isinstance(rng, Tracer) and self.initialised:
            parts = (self.state.trained, self.state.carried)
            params, rest = ({name: to_array(one) for name, one in p.items()} for p in parts)
            return Variables(params, rest)
        if not isinstance(rng, Tracer):
            raise TPUModelError(
                f"{type(self.model.module).__name__} is on torch's meta device and has no values "
                "to train; build it without torch.device('meta'), which is for checks only."
            )
        shapes = self.state.shapes()
        params, rest = (
            {name: jnp.zeros(s.shape, s.dtype) for name, s in p.items()} for p in shapes
        )
        return Variables(params, rest)

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Run the module; the buffers it changed are its new state."""
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
    """Run a module on given variables instead of its own; a pure function.

    Returns:
        The outputs with arrays in place of tensors, and the new carried state.

    Raises:
        TPUModelError: The module cannot be traced; the message names the line.
    """
    module, forward = model.module, model.forward
    if forward is None:
        raise TPUModelError("run_module() needs a TorchModel with a forward function.")
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
    given: JsonMapping,
    variables: Variables,
    held: Mapping[str, Any],
) -> None:
    """Raise an error for a forward that changes its inputs, which the caller would not see."""
    before, after = jax.tree.leaves(dict(batch)), jax.tree.leaves(dict(given))
    kind = type(module).__name__
    if any(one is not tensor.jax() for one, tensor in zip(before, after, strict=True)):
        raise TPUModelError(
            f"{kind} changes its input in place, which its caller would not see; change a copy: "
            "x = x.clone()."
        )
    for path, array in variables.params.items():
        if held[name_in(path)].jax() is not array:
            raise TPUModelError(
                f"{kind} changes its parameter {path.replace('/', '.')} in its forward; use a "
                "buffer for changing values."
            )


def name_in(path: str) -> str:
    """Return the name of a tensor in the module that `_call` wraps around the user's module."""
    return "module." + path.replace("/", ".")


def plain_outputs(outputs: Any) -> Any:
    """Return outputs as plain trees; a Hugging Face output becomes its loss or its logits."""
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
    """Call `forward` on the module with the tensors of `held`, which is updated in place."""
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


@contextmanager
def explained(module: Any) -> Generator[None]:
    """Convert errors of jax and torchax to errors with a fix.

    Raises:
        TPUModelError: The module branches on values, has shapes that depend on values, uses an
            operation without lowering or gradient, uses a foreign tensor, or fails while traced.
    """
    name = type(module).__name__
    try:
        yield
    except (TPUError, jax.errors.JaxRuntimeError):  # a runtime error comes after tracing
        raise
    except Exception as error:  # a user's module may raise anything
        said = _said(error) or f"cannot be traced: {type(error).__name__}: {first_line(error)}"
        where = f" ({line})" if (line := user_line(error)) else ""
        raise TPUModelError(f"{name} {said}{where}.") from error


def _said(error: Exception) -> str | None:
    text = str(error)
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return (
            "selects by a boolean mask, so a shape depends on values, and a TPU program has fixed "
            "shapes: use torch.where, or a fixed number of indices"
        )
    if isinstance(
        error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError
    ):
        return (
            "branches on the value of a tensor, which is unknown when the program is compiled: "
            "use torch.where, or decide by shapes or settings"
        )
    if type(error).__name__ == "OperatorNotFound":
        operation = text.removeprefix("Operator with name ").removesuffix(" has no lowering")
        return f"uses {operation}, which has no lowering to jax; replace it by others"
    if isinstance(error, AssertionError) and "mixed math" in text:
        return (
            "uses a tensor that is neither an input nor part of the module: register it with "
            "register_buffer, or pass it as an input"
        )
    return None
