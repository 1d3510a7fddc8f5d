"""The shardings of a recorded program's arrays, which were never computed."""

from collections.abc import Callable
from typing import Any

from .settings import CaptureState

_meshes: dict[Any, Any] = {}


def is_unspecified(sharding: Any) -> bool:
    """Return whether a sharding is left to the compiler."""
    return sharding is None or type(sharding).__name__ in ("UnspecifiedValue", "AUTO")


def devices_of(sharding: Any) -> int:
    """Return how many devices a sharding or a mesh spans, abstract or not."""
    mesh = getattr(sharding, "mesh", sharding)
    return mesh.size if hasattr(mesh, "axis_names") else len(getattr(sharding, "device_set", (0,)))


def as_concrete(sharding: Any, capture: CaptureState) -> Any:
    """Return an abstract sharding over the devices of the program's own mesh."""
    import jax
    import numpy as np
    from jax._src import mesh as meshes

    mesh = getattr(sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        if mesh is not None and not mesh.empty:
            _meshes.setdefault(tuple(mesh.shape.items()), mesh)
        return sharding
    for known in (meshes.get_concrete_mesh(), meshes.thread_resources.env.physical_mesh):
        if not getattr(known, "empty", True):  # None in jax 0.6
            _meshes.setdefault(tuple(known.shape.items()), known)
    like = _meshes.get(tuple(mesh.shape.items()))
    if like is None:
        capture.note(
            f"no mesh with devices was seen for the abstract mesh {dict(mesh.shape)}, so its "
            "devices are in the order of their ids."
        )
        grid = np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
    else:
        grid = like.devices
    made = jax.sharding.Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
    return jax.sharding.NamedSharding(made, sharding.spec, memory_kind=sharding.memory_kind)


def result_shardings(
    program: Any, capture: CaptureState, lower_here: Callable[[], Any]
) -> list[Any]:
    """Return a sharding for each result of a program.

    The first of these that exists: the program's statement, a constraint on the result, the
    argument that the result replaces or passes on, XLA's choice in a compile for the CPU (without a
    run), or replication, with a note.
    """
    import jax

    jaxpr = program.params["jaxpr"].jaxpr
    known = list(program.params["out_shardings"])
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    passed_on = dict(zip(jaxpr.invars, program.in_shardings, strict=True))
    named = [*program.in_shardings, *known, *program.found.meshes]
    several = [one for one in named if not is_unspecified(one) and devices_of(one) > 1]
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for place, var in enumerate(jaxpr.outvars):
        if not is_unspecified(known[place]):
            continue
        literal = hasattr(var, "val")
        eqn = None if literal else made.get(var)
        partner = program.partner.get(place)
        if not several:
            known[place] = single
        elif eqn is not None and eqn.primitive.name == "sharding_constraint":
            known[place] = eqn.params["sharding"]
        elif partner is not None and program.kind != "other" and program.in_shardings[partner]:
            known[place] = program.in_shardings[partner]
        elif not literal and passed_on.get(var) is not None:
            known[place] = passed_on[var]
    if any(map(is_unspecified, known)) and program.kind == "other" and not program.found.needs_tpu:
        capture.progress(f"ask XLA how the results of {program.name} are sharded")
        try:
            known = list(lower_here().compile()._out_shardings)
        except Exception as error:  # noqa: BLE001 - whatever XLA refuses, results can be replicated
            capture.note(f"XLA did not tell the sharding of {program.name} ({error})."[:200])
    if any(map(is_unspecified, known)):
        meshes = (getattr(one, "mesh", one) for one in several)
        mesh = next((one for one in meshes if hasattr(one, "axis_names")), None)
        if mesh is not None:
            single = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            if program.kind == "other":
                capture.note(f"results of {program.name} without a sharding count as replicated.")
        known = [single if is_unspecified(one) else one for one in known]
    program.committed = program.committed or bool(several)
    return [as_concrete(one, capture) for one in known]
