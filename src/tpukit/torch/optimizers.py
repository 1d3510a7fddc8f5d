"""torch.optim's optimizers as optax transformations, with torch's formulas and state names.

Learning rates are part of the state, not of the program, so a torch scheduler can change them
between steps without another compile.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..annotations import PyTree
from ..errors import TPUOptimizationError
from ..models.adapters.torch_module.arrays import to_array, to_tensor
from ..models.adapters.torch_module.state import ModuleState
from ..plain_data import JsonMapping

if TYPE_CHECKING:
    import torch

Slots = dict[str, jax.Array]
STEP = "step"


class _Update(NamedTuple):
    """The arguments of an update formula for one parameter."""

    group: JsonMapping
    rate: jax.Array
    step: jax.Array
    gradient: jax.Array
    param: jax.Array
    slots: Slots


# Returns the new parameter and slots.
Formula = Callable[[_Update], tuple[jax.Array, Slots]]


class TorchOptimizerState(NamedTuple):
    """The state of a mapped optimizer.

    Attributes:
        step: Number of steps taken.
        learning_rates: One per parameter group.
        slots: Arrays by path, for each of torch's state names (such as "exp_avg").
    """

    step: jax.Array
    learning_rates: jax.Array
    slots: dict[str, dict[str, jax.Array]]


@dataclass(frozen=True)
class OptimizerKind:
    """The update formula of one torch.optim class, and its initial slots."""

    formula: Formula
    slots_of: Callable[[JsonMapping, jax.Array], Slots]


@dataclass(frozen=True)
class MappedOptimizer:
    """A torch optimizer as an optax transformation of one module's parameters.

    Attributes:
        optimizer: The user's torch optimizer; its groups are read again before every step.
        transformation: The optax transformation, for arrays by path.
        tensors: The module's parameters by path.
    """

    optimizer: "torch.optim.Optimizer"
    transformation: optax.GradientTransformation
    tensors: dict[str, Any]

    def learning_rates(self) -> np.ndarray:
        """Return every group's present learning rate."""
        return np.asarray([float(g["lr"]) for g in self.optimizer.param_groups], np.float32)

    def load(self, state: TorchOptimizerState) -> TorchOptimizerState:
        """Return the state with the torch optimizer's state of earlier steps."""
        known = self.optimizer.state
        slots = {
            slot: {
                path: to_array(known[self.tensors[path]][slot])
                if slot in known.get(self.tensors[path], {})
                else start
                for path, start in arrays.items()
            }
            for slot, arrays in state.slots.items()
        }
        steps = [float(slots[STEP]) for slots in known.values() if STEP in slots]
        step = jnp.asarray(max(steps, default=float(bool(known))), jnp.int32)
        return TorchOptimizerState(step, jnp.asarray(self.learning_rates()), slots)

    def store(self, state: TorchOptimizerState) -> None:
        """Copy the state to the torch optimizer, as if it had taken the steps."""
        import torch

        taken = float(state.step)
        if not taken or not state.slots:  # torch has no state then either
            return
        for path, tensor in self.tensors.items():
            own = self.optimizer.state[tensor]
            for slot, arrays in state.slots.items():
                if path in arrays:
                    own[slot] = to_tensor(arrays[path], dtype=None).to(tensor.device).clone()
            if not isinstance(self.optimizer, torch.optim.SGD):
                own[STEP] = torch.tensor(taken)


def map_optimizer(
    optimizer: "torch.optim.Optimizer",
    module: "torch.nn.Module",
    reached: Collection[str] | None = None,
) -> MappedOptimizer:
    """Return a torch optimizer of a module's parameters as an optax transformation.

    Args:
        optimizer: An optimizer of torch.optim.
        module: The module with its parameters.
        reached: Paths of the parameters that the loss depends on; None for all. Like torch, the
            optimizer skips the others, weight decay included, because they have no gradient.

    Raises:
        TPUOptimizationError: It is not SGD, Adam, AdamW or Adafactor, or has parameters that are
            not the module's.
    """
    kind = _kind_of(optimizer)
    tensors = ModuleState.of(module).trained
    path_of = {id(tensor): path for path, tensor in tensors.items()}
    group_of: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if id(tensor) in path_of:
                group_of[path_of[id(tensor)]] = index
            elif tensor.requires_grad:
                raise TPUOptimizationError(
                    f"the optimizer has a parameter of shape {tuple(tensor.shape)} that is not "
                    f"in {type(module).__name__}; create it from model.parameters()."
                )
    settings = [dict(group, params=None) for group in optimizer.param_groups]
    if reached is not None:
        group_of = {path: group for path, group in group_of.items() if path in reached}
    optimized = {path: tensor for path, tensor in tensors.items() if path in group_of}
    return MappedOptimizer(optimizer, _transformation(kind, settings, group_of), optimized)


def _transformation(
    kind: OptimizerKind, settings: Sequence[JsonMapping], group_of: Mapping[str, int]
) -> optax.GradientTransformation:
    def init(params: PyTree) -> TorchOptimizerState:
        slots: dict[str, dict[str, jax.Array]] = {}
        for path, group in group_of.items():
            for slot, value in kind.slots_of(settings[group], params[path]).items():
                slots.setdefault(slot, {})[path] = value
        rates = jnp.asarray([float(group["lr"]) for group in settings], jnp.float32)
        return TorchOptimizerState(jnp.zeros((), jnp.int32), rates, slots)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **_: Any) -> tuple[Any, Any]:
        gradients = updates
        step = state.step + 1
        changes = {path: jnp.zeros_like(param) for path, param in params.items()}
        slots = {slot: dict(arrays) for slot, arrays in state.slots.items()}
        for path, group in group_of.items():
            own = {slot: arrays[path] for slot, arrays in slots.items() if path in arrays}
            gradient = gradients[path].astype(params[path].dtype)
            gradient = -gradient if settings[group]["maximize"] else gradient
            rate = state.learning_rates[group]
            moved, new = kind.formula(
                _Update(settings[group], rate, step, gradient, params[path], own)
            )
            changes[path] = moved - params[path]
            for slot, value in new.items():
                slots[slot][path] = value
        return changes, TorchOptimizerState(step, state.learning_rates, slots)

    return optax.GradientTransformation(init, update)


def _sgd_slots(group: JsonMapping, param: jax.Array) -> Slots:
    return {"momentum_buffer": jnp.zeros_like(param)} if group["momentum"] else {}


def _sgd(update: _Update) -> tuple[jax.Array, Slots]:
    group, rate, step, gradient, param, slots = update
    momentum = group["momentum"]
    if group["weight_decay"]:
        gradient = gradient + group["weight_decay"] * param
    if momentum:
        kept = momentum * slots["momentum_buffer"] + (1 - group["dampening"]) * gradient
        kept = jnp.where(step == 1, gradient, kept)  # torch dampens from step 2 on
        slots = {"momentum_buffer": kept}
        gradient = gradient + momentum * kept if group["nesterov"] else kept
    return param - rate.astype(param.dtype) * gradient, slots


def _adam_slots(group: JsonMapping, param: jax.Array) -> Slots:
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
    return {name: jnp.zeros_like(param) for name in names}


def _adam(update: _Update) -> tuple[jax.Array, Slots]:
    group, rate, step, gradient, param, slots = update
    first, second = (float(beta) for beta in group["betas"])
    rate = rate.astype(param.dtype)
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        param = param * (1 - rate * group["weight_decay"])
    elif group["weight_decay"]:
        gradient = gradient + group["weight_decay"] * param
    mean = slots["exp_avg"] + (gradient - slots["exp_avg"]) * (1 - first)
    square = slots["exp_avg_sq"] * second + gradient * gradient * (1 - second)
    new = {"exp_avg": mean, "exp_avg_sq": square}
    if group["amsgrad"]:
        new["max_exp_avg_sq"] = square = jnp.maximum(slots["max_exp_avg_sq"], square)
    size = (rate / _one_minus_power(first, step)).astype(param.dtype)
    root = jnp.sqrt(_one_minus_power(second, step)).astype(param.dtype)
    return param - size * mean / (jnp.sqrt(square) / root + group["eps"]), new


def _adafactor_slots(group: JsonMapping, param: jax.Array) -> Slots:
    if param.ndim <= 1:
        return {"variance": jnp.zeros_like(param)}
    rows, columns = (*param.shape[:-1], 1), (*param.shape[:-2], 1, param.shape[-1])
    return {"row_var": jnp.zeros(rows, param.dtype), "col_var": jnp.zeros(columns, param.dtype)}


def _adafactor(update: _Update) -> tuple[jax.Array, Slots]:
    group, rate, step, gradient, param, slots = update
    least, least_scale = group["eps"]
    least = float(jnp.finfo(param.dtype).eps) if least is None else least
    share = step.astype(jnp.float32) ** group["beta2_decay"]
    size = jnp.minimum(rate, step.astype(jnp.float32) ** -0.5)
    size = jnp.maximum(least_scale, _root_mean_square(param)) * size
    param = param * (1 - rate * group["weight_decay"]).astype(param.dtype)
    if param.ndim > 1:
        squares = gradient * gradient
        means = {name: squares.mean(axis, keepdims=True) for name, axis in _FACTORS}
        new = {name: slots[name] + (mean - slots[name]) * share for name, mean in means.items()}
        mean = jnp.maximum(new["row_var"].mean(-2, keepdims=True), least)
        estimate = new["row_var"] * new["col_var"] / mean
    else:
        new = {"variance": slots["variance"] + (gradient * gradient - slots["variance"]) * share}
        estimate = new["variance"]
    change = gradient * jax.lax.rsqrt(jnp.maximum(estimate, least * least))
    size = size / jnp.maximum(1.0, _root_mean_square(change) / group["d"])
    new = {name: value.astype(param.dtype) for name, value in new.items()}
    return param - size.astype(param.dtype) * change.astype(param.dtype), new


_FACTORS = (("row_var", -1), ("col_var", -2))


def _root_mean_square(array: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(array.astype(jnp.float32))))


def _one_minus_power(beta: float, step: jax.Array) -> jax.Array:
    """Return 1 - beta ** step, accurate also near 0."""
    if beta == 0.0:
        return jnp.ones((), jnp.float32)
    return -jnp.expm1(step.astype(jnp.float32) * math.log(beta))


_KINDS = {
    "SGD": OptimizerKind(_sgd, _sgd_slots),
    "Adam": OptimizerKind(_adam, _adam_slots),
    "AdamW": OptimizerKind(_adam, _adam_slots),
    "Adafactor": OptimizerKind(_adafactor, _adafactor_slots),
}


def _kind_of(optimizer: "torch.optim.Optimizer") -> OptimizerKind:
    """Return the kind of exactly this class, because a subclass may do something else."""
    import torch

    kind = type(optimizer)
    known = _KINDS.get(kind.__name__) if kind.__module__.startswith("torch.optim") else None
    if known is None or kind is not getattr(torch.optim, kind.__name__):
        raise TPUOptimizationError(
            f"{kind.__module__}.{kind.__name__} has no exact counterpart in optax; fused steps "
            "accept "
            f"torch.optim's {', '.join(_KINDS)}. Any optimizer works in an ordinary loop "
            "(loss.backward(), optimizer.step())."
        )
    return known
