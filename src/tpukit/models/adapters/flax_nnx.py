"""Models written in flax nnx: a module, or a function that makes one."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from ...errors import TPUModelError
from ...frameworks import is_instance_of, is_subclass_of
from ..execution import Execution
from ..loss.loss import Batch
from ..remat.nnx_layers import checkpoint_nnx
from ..remat.segments import checkpoint_segments
from .kind import ModelKind
from .own_files import TrainedArrays, nested
from .protocol import Applied, ModelInputs, Variables


@dataclass(frozen=True)
class NnxAdapter:
    """A flax nnx module, or a function that makes one from `nnx.Rngs`."""

    model: Any
    inputs: ModelInputs

    @property
    def initialised(self) -> bool:
        """A module that was handed over keeps the values it has."""
        return isinstance(self.model, nnx.Module)

    def init(self, rng: jax.Array) -> Variables:
        """The module's own variables, or new ones from the factory."""
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


def _makes_modules(model: object) -> bool:
    """Whether this is an nnx class or a function; an object that can be called is neither."""
    if isinstance(model, functools.partial):
        return _makes_modules(model.func)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    if is_subclass_of(model, "flax.nnx"):
        return True
    return callable(model) and inspect.isroutine(inspect.unwrap(model))


STATE_FOLDER = "state"


def _describe(model: Any) -> dict[str, Any]:
    """Record which variables are random state, which belongs to a run and not to its model."""
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
    # To checkpoints a function is a function, whatever it makes.
    checkpoint=checkpoint_segments,
    describe=_describe,
    write=_write,
)
