"""Models written in flax nnx: a module, or a function that makes one."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from ...annotations import PyTree
from ...errors import TPUModelError
from ...frameworks import is_instance_of, is_subclass_of
from ..execution import Execution
from ..loss import Batch
from ..remat.policy import RematPolicy
from ..remat.segments import checkpoint_segments
from ..transformer.model import Transformer
from .kind import ModelKind, TrainedArrays, nested
from .protocol import Applied, ModelInputs, Variables


@dataclass(frozen=True)
class NnxAdapter:
    """A flax nnx module, or a function that makes one from `nnx.Rngs`."""

    model: Any
    inputs: ModelInputs

    @property
    def initialised(self) -> bool:
        """Whether the model is a module, which keeps its values."""
        return isinstance(self.model, nnx.Module)

    def init(self, rng: jax.Array) -> Variables:
        """Return the module's own variables, or new ones from the factory."""
        model = self.model if self.initialised else self.model(nnx.Rngs(rng))
        if not isinstance(model, nnx.Module):
            raise TPUModelError(
                f"the model function returned {type(model).__name__}, not a flax nnx module; "
                "for plain functions pass the pair (init, apply)."
            )
        _, params, rest = nnx.split(model, nnx.Param, ...)
        return Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(rest)).copied()

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Call the module on the batch entries named by `inputs`."""

        def make() -> Any:
            return self.model if self.initialised else self.model(nnx.Rngs(0))

        definition, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
        nnx.replace_by_pure_dict(params, variables.params)
        nnx.replace_by_pure_dict(rest, variables.model_state)
        model = nnx.merge(definition, params, rest)
        if execution.remat.active:
            model = checkpoint_nnx(model, execution.remat)
        outputs = model(*self.inputs.arguments(batch))
        _, _, rest = nnx.split(model, nnx.Param, ...)
        return Applied(outputs, nnx.to_pure_dict(rest))


def checkpoint_nnx(model: nnx.Module, remat: RematPolicy) -> nnx.Module:
    """Return the same module with `__call__` in checkpointed segments.

    Parameters keep their names and order. A reference transformer sets its own checkpoints.
    """
    copy = nnx.merge(*nnx.split(model))
    if isinstance(copy, Transformer):
        copy.execution = copy.execution.replace(remat=remat)
        return copy
    copy.__class__ = _checkpointed(type(model), remat)
    return copy


def _checkpointed(kind: type[Any], remat: RematPolicy) -> type[Any]:
    """Return a subclass with `__call__` in checkpointed segments."""

    def call(self: Any, *args: Any, **options: Any) -> Any:
        definition, params, rest = nnx.split(self, nnx.Param, ...)

        def run(params: PyTree, rest: Any, *args: Any, **options: Any) -> PyTree:
            model = nnx.merge(definition, params, rest)
            outputs = kind.__call__(model, *args, **options)
            return outputs, nnx.split(model, nnx.Param, ...)[2]

        outputs, changed = checkpoint_segments(run, remat)(params, rest, *args, **options)
        nnx.update(self, changed)
        return outputs

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _makes_modules(model: object) -> bool:
    """Whether this is an nnx class or a function, as opposed to a callable object."""
    if isinstance(model, functools.partial):
        return _makes_modules(model.func)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    if is_subclass_of(model, "flax.nnx"):
        return True
    return callable(model) and inspect.isroutine(inspect.unwrap(model))


STATE_FOLDER = "state"


def _describe(model: Any) -> dict[str, Any]:
    """Return the names of random state, which belongs to a run and not to its model."""
    made = nnx.eval_shape(lambda: model if isinstance(model, nnx.Module) else model(nnx.Rngs(0)))
    _, random, _ = nnx.split(made, nnx.RngState, ...)
    return {"random": ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(random)]}


def _write(record: Mapping[str, Any], arrays: TrainedArrays, folder: Path) -> str:
    """Write the state as an Orbax checkpoint, which flax recommends for nnx."""
    import orbax.checkpoint as ocp

    whole = {**arrays.params, **arrays.model_state}
    kept = {name: array for name, array in whole.items() if name not in record["random"]}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / STATE_FOLDER).absolute(), nested(kept))
    return (
        "import os\n\nimport orbax.checkpoint as ocp\nfrom flax import nnx\n\n"
        "state = nnx.state(model)\n"
        f'path = os.path.abspath(folder + "/{STATE_FOLDER}")\n'
        "saved = ocp.StandardCheckpointer().restore(path)\n"
        "nnx.replace_by_pure_dict(state, saved)\n"
        "nnx.update(model, state)"
    )


FLAX_NNX = ModelKind(
    name="flax nnx",
    accepts="a flax nnx module",
    recognises=lambda model: is_instance_of(model, "flax.nnx"),
    build=NnxAdapter,
    checkpoint=checkpoint_nnx,
    describe=_describe,
    write=_write,
)
FLAX_NNX_FUNCTION = ModelKind(
    name="flax nnx function",
    accepts="a function that makes an nnx module from nnx.Rngs",
    recognises=_makes_modules,
    build=NnxAdapter,
    # A function is checkpointed as a function of its parameters.
    checkpoint=checkpoint_segments,
    describe=_describe,
    write=_write,
)
