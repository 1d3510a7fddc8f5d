"""The fused step: a module's forward, loss, backward and optimizer as one program."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh

from ..annotations import PyTree
from ..errors import TPUModelError, TPUValidationError
from ..models.adapters.protocol import Variables
from ..models.adapters.torch_module.adapter import TorchModel
from ..models.adapters.torch_module.arrays import to_tensor
from ..models.adapters.torch_module.environment import Nesting
from ..models.adapters.torch_module.state import ModuleState
from ..models.remat.policy import RematSpec
from ..parallel.rebalancing import move
from ..parallel.sharding.strategy import strategy_for
from ..step.parts import TrainState
from ..step.workload import Workload
from ..training.recompile import compiler_options
from .batches import TorchInputs, flat_batch, nested_batch
from .collectives import DEFAULT_TIMEOUT_S, agree
from .optimizers import MappedOptimizer, map_optimizer
from .prepared import link_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# (module outputs, targets) -> a scalar loss, in torch.
TorchLoss = Callable[[Any, Any], Any]


class StepLoss:
    """The loss of a fused step; reading it waits for the step.

    `float(loss)`, `loss.item()`, formatting and `loss.detach()` work as on a tensor.
    """

    def __init__(self, array: jax.Array) -> None:
        self.array = array

    def item(self) -> float:
        """Return the number."""
        return float(self.array)

    __float__ = item

    def detach(self) -> "torch.Tensor":
        """Return the loss as a new torch tensor."""
        return to_tensor(self.array).clone()

    def backward(self) -> None:
        """Raise, because the step includes the backward pass.

        Raises:
            TPUValidationError: Always.
        """
        raise TPUValidationError(
            "a fused step includes the backward pass and the optimizer's step; leave out "
            "loss.backward() and optimizer.step()."
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"StepLoss({self.item():.6g})"


class FusedStep:
    """One training step of a prepared module, compiled once per batch shape.

    Parameters, buffers and optimizer state stay on the device between steps. Reading the module
    (`parameters()`, `state_dict()`, an attribute) copies them back; so does `sync()`, which also
    fills the torch optimizer's state. In a job of several processes each passes the full batch and
    computes its share; all must read the module together.

    Example:
        >>> step = backend.train_step(model, nn.functional.cross_entropy, optimizer)
        >>> loss = step(inputs, targets)
    """

    def __init__(
        self,
        module: "torch.nn.Module",
        loss: TorchLoss | None,
        optimizer: "torch.optim.Optimizer",
        *,
        mesh: Mesh,
        strategy: str | None = None,
        remat: RematSpec = None,
        compute_dtype: str | None = None,
        seed: int = 0,
        started: Callable[[jax.Array], None] = lambda loss: None,
    ) -> None:
        link = link_of(module)
        if link is None:
            raise TPUValidationError(
                f"{type(module).__name__} is not prepared; call backend.prepare_model(model) first."
            )
        self.mesh, self.traces, self._started = mesh, 0, started
        self._module, self._loss, self._link = module, loss, link
        self._optimizer: MappedOptimizer = map_optimizer(optimizer, module)
        self._knows_reached = False
        self._options: dict[str, Any] = {
            "optimizer": self._optimizer.transformation,
            "strategy": strategy or strategy_for(mesh.axis_names),
            "remat": remat,
            "compute_dtype": compute_dtype,
            "grad_norm": False,
            "seed": seed,
        }
        self._state: TrainState | None = None
        self._rates = np.zeros(0, np.float32)
        self._compiled: dict[Any, _Compiled] = {}

    def __call__(self, inputs: TorchInputs, targets: TorchInputs | None = None) -> StepLoss:
        """Take one step.

        Args:
            inputs: A tensor, a tuple of positional arguments, or a dict of keywords.
            targets: Targets of the loss, a tensor or a tree of tensors; None if the model's output
                is or contains the loss.
        """
        arrays, nesting = flat_batch((inputs, targets))
        shapes = tuple((name, array.shape, str(array.dtype)) for name, array in arrays.items())
        key = (nesting, shapes)
        if key not in self._compiled:
            self._compiled[key] = self._compile(arrays, nesting)
        compiled = self._compiled[key]
        state = self._state if self._state is not None else self._start(compiled.work)
        rates = self._optimizer.learning_rates()
        if not np.array_equal(rates, self._rates):
            place = state.opt_state.learning_rates.sharding
            moved = state.opt_state._replace(learning_rates=move(rates, place))
            state = replace(state, opt_state=moved)
            self._rates = rates
        self._state, metrics = compiled.step(state, compiled.placed(arrays))
        self._link.newer = self._write_back
        self._started(metrics["loss"])
        return StepLoss(metrics["loss"])

    def sync(self) -> None:
        """Copy parameters, buffers and optimizer state to the torch objects."""
        self._link.pull()

    @property
    def work(self) -> Workload | None:
        """The step as a `Workload`; None before the first batch."""
        compiled = list(self._compiled.values())
        return compiled[-1].work if compiled else None

    def _compile(self, arrays: Mapping[str, PyTree], nesting: Nesting) -> "_Compiled":
        """Trace and compile the step for one batch shape."""
        self._log_compile(arrays)
        shapes = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()
        }
        model = TorchModel(self._module, self._forward(nesting))
        work = self._without_unreached(Workload(model, batch=shapes, **self._options))
        jitted = work.jit_train_step(self.mesh)
        lowered = jitted.lower(*work.abstract_args(self.mesh))
        self.traces += 1
        program = lowered.compile(compiler_options=compiler_options())
        return _Compiled(work, program, work.shardings(self.mesh).batch)

    def _without_unreached(self, work: Workload) -> Workload:
        """Return the step with an optimizer that skips parameters the loss does not depend on."""
        if not self._knows_reached:
            own = self._optimizer
            self._optimizer = map_optimizer(own.optimizer, self._module, reached_by_loss(work))
            self._options["optimizer"] = self._optimizer.transformation
            self._knows_reached = True
        return work.replace(optimizer=self._options["optimizer"])

    def _log_compile(self, arrays: Mapping[str, PyTree]) -> None:
        """Log the compile, and which shape changed since the last one."""
        now = {name: (tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}
        if self._compiled:
            _, shapes = [*self._compiled][-1]
            before = {name: (tuple(shape), dtype) for name, shape, dtype in shapes}
            changed = [
                f"{name} from {before.get(name)} to {shape}"
                for name, shape in now.items()
                if before.get(name) != shape
            ]
            logger.warning("recompile step: %s", "; ".join(changed) or "another structure")
        else:
            logger.info("compile step: %s", now)

    def _forward(self, nesting: Nesting) -> Callable[[Any, Mapping[str, PyTree]], PyTree]:
        loss = self._loss

        def forward(module: "torch.nn.Module", batch: Mapping[str, PyTree]) -> PyTree:
            inputs, targets = nested_batch(batch, nesting)
            if isinstance(inputs, Mapping):
                outputs = module(**inputs)
            else:
                outputs = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
            if loss is not None:
                return loss(outputs, targets)
            value = getattr(outputs, "loss", outputs)
            if getattr(value, "ndim", None) != 0:
                raise TPUModelError(
                    f"{type(module).__name__} returns no scalar loss; pass loss_fn=(outputs, "
                    "targets) "
                    "-> loss, or give a Hugging Face model its labels."
                )
            return value

        return forward

    def _start(self, work: Workload) -> TrainState:
        self._link.pull()
        fresh = work.init_on(self.mesh, jax.random.key(0))
        place = work.shardings(self.mesh).state.opt_state
        opt_state = jax.tree.map(move, self._optimizer.load(fresh.opt_state), place)
        self._rates = self._optimizer.learning_rates()
        return replace(fresh, opt_state=opt_state)

    def _write_back(self) -> None:
        """Copy the device's values to the module and the optimizer."""
        state = self._state
        if state is None:
            return
        if jax.process_count() > 1:  # each process has only its shards, so all must read together
            agree("reading a module after fused steps", timeout_s=DEFAULT_TIMEOUT_S)
        ModuleState.of(self._module).write(state.params, state.model_state)
        self._optimizer.store(state.opt_state)
        # From here on the module has the current values: a change to it affects the next step.
        self._state = None


def reached_by_loss(work: Workload) -> set[str]:
    """Return the paths of the parameters that a step's loss depends on."""
    shapes = work.state_shapes()

    def loss(params: dict[str, Any], model_state: PyTree, batch: PyTree) -> PyTree:
        variables = Variables(params, model_state)
        key = jax.random.key(0)
        return work.adapter.apply(variables, batch, rng=key, execution=work.execution).outputs

    traced = jax.make_jaxpr(loss)(shapes.params, shapes.model_state, work.batch_shapes()).jaxpr
    needed = {var for var in traced.outvars if isinstance(var, Var)}
    for equation in reversed(traced.eqns):
        if not needed.isdisjoint(equation.outvars) and equation.primitive.name != "stop_gradient":
            needed.update(var for var in equation.invars if isinstance(var, Var))
    paths = sorted(shapes.params)  # jax flattens a dict in this order
    return {path for path, var in zip(paths, traced.invars, strict=False) if var in needed}


@dataclass(frozen=True)
class _Compiled:
    """The step for one batch shape, and the shardings of its batch."""

    work: Workload
    step: Any
    shardings: dict[str, Any]

    def placed(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Shard a batch that every process has in full."""
        if jax.process_count() > 1:
            return self.work.put_batch(next(iter(self.shardings.values())).mesh, arrays)
        return jax.device_put(dict(arrays), self.shardings)
