"""torch.optim's optimizers as optax transformations, in torch's own formulas and state names.

Learning rates stand in the state, not in the program: a scheduler of torch may change them
between two steps, and nothing is compiled again.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..errors import TPUOptimizationError
from ..models.adapters.torch_module.arrays import to_array, to_tensor
from ..models.adapters.torch_module.state import ModuleState

Slots = dict[str, jax.Array]
# (settings of the group, learning rate, number of this step, gradient, parameter, its slots)
# -> the new parameter and slots.
Formula = Callable[
    [Mapping[str, Any], jax.Array, jax.Array, jax.Array, jax.Array, Slots],
    tuple[jax.Array, Slots],
]
STEP = "step"


class TorchOptimizerState(NamedTuple):
    """What an optimizer carries.

    Attributes:
        step: Steps made.
        learning_rates: Of each group of parameters.
        slots: torch's names of what is kept of a parameter, each with arrays by path.
    """

    step: jax.Array
    learning_rates: jax.Array
    slots: dict[str, dict[str, jax.Array]]


@dataclass(frozen=True)
class OptimizerKind:
    """How one class of torch.optim starts and moves a parameter."""

    formula: Formula
    slots_of: Callable[[Mapping[str, Any], jax.Array], Slots]


@dataclass(frozen=True)
class MappedOptimizer:
    """A torch optimizer, as an optax transformation on the parameters of one module.

    Attributes:
        optimizer: The user's own; its groups are read again before every step.
        transformation: The same, for arrays by path.
        tensors: The module's parameters by path.
    """

    optimizer: Any
    transformation: optax.GradientTransformation
    tensors: dict[str, Any]

    def learning_rates(self) -> np.ndarray:
        """Return what every group's learning rate is now; on the host, where torch has them."""
        return np.asarray([float(g["lr"]) for g in self.optimizer.param_groups], np.float32)

    def load(self, state: TorchOptimizerState) -> TorchOptimizerState:
        """Return a state with what the torch optimizer has gathered in earlier steps."""
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
        steps = [float(one[STEP]) for one in known.values() if STEP in one]
        step = jnp.asarray(max(steps, default=float(bool(known))), jnp.int32)
        return TorchOptimizerState(step, jnp.asarray(self.learning_rates()), slots)

    def store(self, state: TorchOptimizerState) -> None:
        """Write what the arrays hold into the torch optimizer, as if it had made the steps."""
        import torch

        made = float(state.step)
        if not made or not state.slots:  # torch keeps nothing then either
            return
        for path, tensor in self.tensors.items():
            own = self.optimizer.state[tensor]
            for slot, arrays in state.slots.items():
                if path in arrays:
                    own[slot] = to_tensor(arrays[path], dtype=None).to(tensor.device).clone()
            if not isinstance(self.optimizer, torch.optim.SGD):
                own[STEP] = torch.tensor(made)


def map_optimizer(
    optimizer: Any, module: Any, reached: Collection[str] | None = None
) -> MappedOptimizer:
    """Return a torch optimizer of a module's parameters as an optax transformation.

    Args:
        optimizer: Of torch.optim.
        module: Whose parameters it holds.
        reached: Paths of the parameters that the loss depends on. torch leaves all others alone,
            also by weight decay: they have no gradient. None: all are.

    Raises:
        TPUOptimizationError: It is none of SGD, Adam, AdamW and Adafactor, or it holds
            parameters that are not the module's.
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
                    f"the optimizer holds a parameter of shape {tuple(tensor.shape)} that is not "
                    f"one of {type(module).__name__}'s; make it from model.parameters()."
                )
    settings = [dict(group, params=None) for group in optimizer.param_groups]
    if reached is not None:
        group_of = {path: group for path, group in group_of.items() if path in reached}
    held = {path: tensor for path, tensor in tensors.items() if path in group_of}
    return MappedOptimizer(optimizer, _transformation(kind, settings, group_of), held)


def _transformation(
    kind: OptimizerKind, settings: Sequence[Mapping[str, Any]], group_of: Mapping[str, int]
) -> optax.GradientTransformation:
    def init(params: Any) -> TorchOptimizerState:
        slots: dict[str, dict[str, jax.Array]] = {}
        for path, group in group_of.items():
            for slot, value in kind.slots_of(settings[group], params[path]).items():
                slots.setdefault(slot, {})[path] = value
        rates = jnp.asarray([float(one["lr"]) for one in settings], jnp.float32)
        return TorchOptimizerState(jnp.zeros((), jnp.int32), rates, slots)

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, Any]:
        gradients = updates
        step = state.step + 1
        changes = {path: jnp.zeros_like(one) for path, one in params.items()}
        slots = {slot: dict(arrays) for slot, arrays in state.slots.items()}
        for path, group in group_of.items():
            own = {slot: arrays[path] for slot, arrays in slots.items() if path in arrays}
            gradient = gradients[path].astype(params[path].dtype)
            gradient = -gradient if settings[group]["maximize"] else gradient
            moved, new = kind.formula(
                settings[group], state.learning_rates[group], step, gradient, params[path], own
            )
            changes[path] = moved - params[path]
            for slot, value in new.items():
                slots[slot][path] = value
        return changes, TorchOptimizerState(step, state.learning_rates, slots)

    return optax.GradientTransformation(init, update)


def _sgd_slots(group: Mapping[str, Any], param: jax.Array) -> Slots:
    return {"momentum_buffer": jnp.zeros_like(param)} if group["momentum"] else {}


def _sgd(
    group: Mapping[str, Any],
    rate: jax.Array,
    step: jax.Array,
    gradient: jax.Array,
    param: jax.Array,
    slots: Slots,
) -> tuple[jax.Array, Slots]:
    momentum = group["momentum"]
    if group["weight_decay"]:
        gradient = gradient + group["weight_decay"] * param
    if momentum:
        kept = momentum * slots["momentum_buffer"] + (1 - group["dampening"]) * gradient
        kept = jnp.where(step == 1, gradient, kept)  # torch dampens from the second step on
        slots = {"momentum_buffer": kept}
        gradient = gradient + momentum * kept if group["nesterov"] else kept
    return param - rate.astype(param.dtype) * gradient, slots


def _adam_slots(group: Mapping[str, Any], param: jax.Array) -> Slots:
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
    return {name: jnp.zeros_like(param) for name in names}


def _adam(
    group: Mapping[str, Any],
    rate: jax.Array,
    step: jax.Array,
    gradient: jax.Array,
    param: jax.Array,
    slots: Slots,
) -> tuple[jax.Array, Slots]:
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


def _adafactor_slots(group: Mapping[str, Any], param: jax.Array) -> Slots:
    if param.ndim <= 1:
        return {"variance": jnp.zeros_like(param)}
    rows, columns = (*param.shape[:-1], 1), (*param.shape[:-2], 1, param.shape[-1])
    return {"row_var": jnp.zeros(rows, param.dtype), "col_var": jnp.zeros(columns, param.dtype)}


def _adafactor(
    group: Mapping[str, Any],
    rate: jax.Array,
    step: jax.Array,
    gradient: jax.Array,
    param: jax.Array,
    slots: Slots,
) -> tuple[jax.Array, Slots]:
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
        whole = jnp.maximum(new["row_var"].mean(-2, keepdims=True), least)
        estimate = new["row_var"] * new["col_var"] / whole
    else:
        new = {"variance": slots["variance"] + (gradient * gradient - slots["variance"]) * share}
        estimate = new["variance"]
    update = gradient * jax.lax.rsqrt(jnp.maximum(estimate, least * least))
    size = size / jnp.maximum(1.0, _root_mean_square(update) / group["d"])
    new = {name: value.astype(param.dtype) for name, value in new.items()}
    return param - size.astype(param.dtype) * update.astype(param.dtype), new


_FACTORS = (("row_var", -1), ("col_var", -2))


def _root_mean_square(array: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(array.astype(jnp.float32))))


def _one_minus_power(beta: float, step: jax.Array) -> jax.Array:
    """Return 1 - beta ** step to float32's precision, also where it is near 0."""
    if beta == 0.0:
        return jnp.ones((), jnp.float32)
    return -jnp.expm1(step.astype(jnp.float32) * math.log(beta))


_KINDS = {
    "SGD": OptimizerKind(_sgd, _sgd_slots),
    "Adam": OptimizerKind(_adam, _adam_slots),
    "AdamW": OptimizerKind(_adam, _adam_slots),
    "Adafactor": OptimizerKind(_adafactor, _adafactor_slots),
}


def _kind_of(optimizer: Any) -> OptimizerKind:
    """Return the formula of exactly this class; a class derived from it may do something else."""
    import torch

    kind = type(optimizer)
    found = _KINDS.get(kind.__name__) if kind.__module__.startswith("torch.optim") else None
    if found is None or kind is not getattr(torch.optim, kind.__name__):
        raise TPUOptimizationError(
            f"{kind.__module__}.{kind.__name__} has no exact counterpart here; fused steps take "
            f"torch.optim's {', '.join(_KINDS)}. Any optimizer works in an ordinary loop "
            "(loss.backward(), optimizer.step())."
        )
    return found
