"""Models written in flax linen."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import linen, serialization
from flax.core import lift, meta
from flax.linen.transforms import lift_transform

from ...annotations import PyTree
from ...frameworks import is_instance_of
from ..execution import Execution
from ..loss import Batch
from ..remat.policy import RematPolicy
from ..remat.segments import checkpoint_segments
from .kind import ModelKind, TrainedArrays, nested, plain_array
from .protocol import Applied, ModelInputs, Variables


@dataclass(frozen=True)
class LinenAdapter:
    """A flax linen module; `batch_stats` and the like are carried as `model_state`."""

    model: Any
    inputs: ModelInputs
    initialised: bool = False

    def init(self, rng: jax.Array) -> Variables:
        """Return new variables, made by calling the module on zeros."""
        rngs = {"params": rng, "dropout": jax.random.fold_in(rng, 1)}
        variables = dict(meta.unbox(self.model.init(rngs, *self.inputs.zeros())))
        return Variables(variables.pop("params", {}), variables)

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Apply the module to the batch entries named by `inputs`."""
        remat = execution.remat
        model = checkpoint_linen(self.model, remat) if remat.active else self.model
        outputs, changed = model.apply(
            {"params": variables.params, **variables.model_state},
            *self.inputs.arguments(batch),
            rngs={"dropout": rng},
            mutable=list(variables.model_state),
        )
        return Applied(outputs, {**variables.model_state, **changed})


def checkpoint_linen(model: linen.Module, remat: RematPolicy) -> linen.Module:
    """Return the same module, called in checkpointed segments; names of parameters stay."""
    checkpointed: Any = lift_transform(_in_segments, type(model), remat=remat)
    fields = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(model)  # pyright: ignore[reportArgumentType]  linen modules are dataclasses
        if field.init and field.name not in ("parent", "name")
    }
    return checkpointed(**fields, name=model.name)


def _in_segments(function: Any, *, remat: RematPolicy) -> Any:
    """Lift `checkpoint_segments` to functions of a scope, as flax lifts `jax.checkpoint`."""

    def inner(
        scope_of: Any, packed: Any, variables: PyTree, rngs: Any, *args: Any, **options: Any
    ) -> Any:
        def run(params: PyTree, rest: Any, rngs: Any, *args: Any, **options: Any) -> PyTree:
            joined = [
                tuple({**one, **other} for one, other in zip(*groups, strict=True))
                for groups in zip(params, rest, strict=True)
            ]
            scope = scope_of(tuple(joined), rngs)
            outputs = function(scope, *args, **options)
            return outputs, packed(scope)

        params, rest = (_collections(variables, trained=trained) for trained in (True, False))
        return checkpoint_segments(run, remat)(params, rest, rngs, *args, **options)

    return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)


def _collections(variables: PyTree, *, trained: bool) -> list[list[dict[str, Any]]]:
    """Return the parameters, or all other collections, of every scope."""
    return [
        [{name: scope[name] for name in scope if (name == "params") is trained} for scope in group]
        for group in variables
    ]


VARIABLES_FILE = "variables.msgpack"


def _write(record: Mapping[str, Any], arrays: TrainedArrays, folder: Path) -> str:
    """Write the variables as flax's own msgpack file."""
    del record
    variables = {"params": nested(arrays.params), **nested(arrays.model_state)}
    plain = jax.tree.map(plain_array, variables)
    (folder / VARIABLES_FILE).write_bytes(serialization.msgpack_serialize(plain))
    return (
        "from flax import serialization\n\n"
        f'with open(folder + "/{VARIABLES_FILE}", "rb") as file:\n'
        "    variables = serialization.msgpack_restore(file.read())  # of model.apply"
    )


FLAX_LINEN = ModelKind(
    name="flax linen",
    accepts="a flax linen module",
    recognises=lambda model: is_instance_of(model, "flax.linen"),
    build=LinenAdapter,
    checkpoint=checkpoint_linen,
    write=_write,
)
