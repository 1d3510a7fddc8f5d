"""Models written in equinox, which is imported only for such models."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...frameworks import is_instance_of
from ...parallel.sharding.trees import join_path
from ..execution import Execution
from ..loss import Batch
from ..remat.policy import RematPolicy
from ..remat.segments import checkpoint_segments
from .kind import ModelKind, TrainedArrays
from .protocol import Applied, ModelInputs, Variables


@dataclass(frozen=True)
class EquinoxAdapter:
    """An equinox module, called on one example at a time (equinox's convention) under vmap."""

    model: Any
    inputs: ModelInputs
    initialised: bool = True

    def init(self, rng: jax.Array) -> Variables:
        """Return copies of the module's arrays."""
        import equinox

        return Variables(equinox.filter(self.model, equinox.is_inexact_array), {}).copied()

    def apply(
        self, variables: Variables, batch: Batch, *, rng: jax.Array, execution: Execution
    ) -> Applied:
        """Call the module on every example."""
        import equinox

        static = equinox.filter(self.model, equinox.is_inexact_array, inverse=True)

        def call(params: PyTree, *arguments: Any) -> PyTree:
            return jax.vmap(equinox.combine(params, static))(*arguments)

        run = checkpoint_segments(call, execution.remat)
        outputs = run(variables.params, *self.inputs.arguments(batch))
        return Applied(outputs, variables.model_state)


def _checkpoint(model: Any, remat: RematPolicy) -> Any:
    from ..remat.equinox_module import CheckpointedModule

    return CheckpointedModule(model, remat)


LEAVES_FILE = "model.eqx"


def _describe(model: Any) -> dict[str, Any]:
    """Return the leaves in order: the name of a parameter, or the content of another leaf."""
    import equinox

    leaves: list[dict[str, str]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        if equinox.is_inexact_array(leaf):
            leaves.append({"parameter": join_path(path)})
            continue
        content = io.BytesIO()
        equinox.default_serialise_filter_spec(content, leaf)
        leaves.append({"content": base64.b64encode(content.getvalue()).decode()})
    return {"leaves": leaves}


def _write(record: Mapping[str, Any], arrays: TrainedArrays, folder: Path) -> str:
    """Write the leaves as `equinox.tree_serialise_leaves` does."""
    with (folder / LEAVES_FILE).open("wb") as file:
        for leaf in record["leaves"]:
            if "parameter" in leaf:
                jnp.save(file, jnp.asarray(arrays.params[leaf["parameter"]]))
            else:
                file.write(base64.b64decode(leaf["content"]))
    return (
        "import equinox\n\n"
        f'model = equinox.tree_deserialise_leaves(folder + "/{LEAVES_FILE}", like=model)'
    )


EQUINOX = ModelKind(
    name="equinox",
    accepts="an equinox module",
    recognises=lambda model: is_instance_of(model, "equinox"),
    build=EquinoxAdapter,
    checkpoint=_checkpoint,
    describe=_describe,
    write=_write,
)
