"""Write a recorded program for TPU, as `jax.export` does, with the facts that a compile needs.

The program is lowered from the jaxpr that the user's own call traced, so the compiler's messages
and memory report name the user's lines. Versions of jax whose private functions differ go through
the public `jax.export`, which loses those lines.
"""
# The parts of jax that every program passes through have no public names.
# pyright: reportPrivateUsage=false

import contextlib
import functools
import importlib.util
import os
import sys
from dataclasses import replace
from math import prod
from typing import Any

from .callbacks import without_callbacks
from .evidence import find_evidence
from .layout import as_concrete, is_unspecified
from .programs import RecordedProgram
from .settings import CaptureState
from .survey import size_of

# jax.export vouches only for calls that later versions read, too. These are read at once.
_READ_AT_ONCE = ("ragged_all_to_all", "annotate_device_placement")


def write_program(program: RecordedProgram, capture: CaptureState, path: str) -> dict[str, Any]:
    """Write one program, and return its facts as JSON data."""
    from jax import export

    params, jaxpr = program.params, program.params["jaxpr"]
    ins = [None if one is None else as_concrete(one, capture) for one in program.in_shardings]
    outs = [
        None if is_unspecified(one) else as_concrete(one, capture)
        for one in params["out_shardings"]
    ]
    meshes = (getattr(one, "mesh", None) for one in (*ins, *outs))
    ids = [device["id"] for device in capture.devices]
    mesh = next((one for one in meshes if one is not None and not one.empty), None)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _READ_AT_ONCE]
    with without_callbacks():
        try:
            exported, lines = _export_as_traced(program, checks), True
        except (TypeError, AttributeError, ImportError) as error:
            capture.note(f"this jax keeps no source lines of a captured program ({error})."[:200])
            exported, lines = _export_again(program, ins, outs, mesh, checks), False
    exported = replace(exported, ordered_effects=(), unordered_effects=())
    if capture.flatbuffers and not _has_flatbuffers():
        sys.path.append(capture.flatbuffers)
    with open(path, "wb") as file:
        file.write(bytes(exported.serialize()))
    return {
        **program.row(),
        "file": os.path.basename(path),
        "argument_names": program.argument_names,
        "argument_bytes": [size_of(aval) for aval in jaxpr.in_avals],
        "argument_types": [aval.str_short(short_dtypes=True) for aval in jaxpr.in_avals],
        "argument_specs": [str(getattr(one, "spec", "")) for one in ins],
        "argument_copies": [_copies(one, mesh) for one in ins],
        "purposes": program.purposes(),
        "state": sorted(program.state),
        "donated": [number for number, given in enumerate(params["donated_invars"]) if given],
        "mesh_axes": [] if mesh is None else [[axis, size] for axis, size in mesh.shape.items()],
        "axis_types": [] if mesh is None else [one.name for one in mesh.axis_types],
        "device_order": [] if mesh is None else [ids[device.id] for device in mesh.devices.flat],
        "source_lines": lines,
        "open_loops": program.found.open_loops,
        "evidence": find_evidence(program),
    }


def _export_as_traced(program: RecordedProgram, checks: list[Any]) -> Any:
    from jax._src import config
    from jax._src.export import _export
    from jax._src.interpreters import mlir

    traced = _traced(program)
    wanted: dict[str, Any] = {
        "for_export": True,
        "hoist_constants_as_args": False,  # jax 0.6 has no such parameter, and never does it
        "export_ignore_forward_compatibility": config.export_ignore_forward_compatibility.value,
    }
    known = mlir.LoweringParameters.__dataclass_fields__
    lowered = traced.lower(
        lowering_platforms=("tpu",),
        _private_parameters=mlir.LoweringParameters(
            **{name: value for name, value in wanted.items() if name in known}
        ),
    )
    return _export._export_lowered(lowered, traced.jaxpr, traced.fun_name, disabled_checks=checks)


def _traced(program: RecordedProgram) -> Any:
    """Return what `jax.jit(f).trace(...)` gives, without tracing again."""
    import jax
    from jax._src import pjit, stages

    jaxpr = program.params["jaxpr"]
    asked = ("lowering_platforms", "lowering_parameters", "pgle_profiler")
    params = {name: value for name, value in program.params.items() if name not in asked}
    in_tree = jax.tree.structure((tuple(jaxpr.in_avals), {}))
    out_tree = jax.tree.structure(list(jaxpr.out_avals))
    make: Any = stages.Traced
    if "_lower_callable" in vars(make):  # jax 0.6
        make_info: Any = stages.make_args_info
        donated = tuple(number for number, given in enumerate(params["donated_invars"]) if given)
        info = make_info(in_tree, jaxpr.in_avals, donated)
        lower = functools.partial(
            pjit._resolve_and_lower, program.args, **params, pgle_profiler=None
        )
        return make(jaxpr, info, program.name, out_tree, lower, program.args)
    since_0_11 = [None] if "_fun_sourceinfo" in vars(make) else []
    return make(program.args, params, in_tree, out_tree, [], *since_0_11)


def _export_again(
    program: RecordedProgram, ins: list[Any], outs: list[Any], mesh: Any, checks: list[Any]
) -> Any:
    import jax
    from jax import export
    from jax._src import core

    jaxpr = program.params["jaxpr"]
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(jaxpr.in_avals, ins, strict=True)
    ]
    function = core.jaxpr_as_fun(jaxpr)

    def again(*flat: Any) -> Any:
        return function(*flat)

    again.__name__ = program.name
    donated = [number for number, given in enumerate(program.params["donated_invars"]) if given]
    stated: dict[str, Any] = {}
    if any(one is not None for one in outs):
        stated["out_shardings"] = outs
    jitted = jax.jit(again, donate_argnums=donated, keep_unused=True, **stated)
    context: Any = contextlib.nullcontext()
    wanted = program.params.get("ctx_mesh")
    if wanted is not None and not getattr(wanted, "empty", True) and mesh is not None:
        use = getattr(jax, "set_mesh", None) or getattr(jax.sharding, "use_mesh", None)
        context = context if use is None else use(mesh)
    with context:
        return export.export(jitted, platforms=["tpu"], disabled_checks=checks)(*shapes)


def _has_flatbuffers() -> bool:
    """Return whether the user's environment has what `jax.export` writes with; few trainers do."""
    return importlib.util.find_spec("flatbuffers") is not None


def _copies(sharding: Any, mesh: Any) -> int:
    """Return on how many devices the same part of an argument is placed."""
    if mesh is None:
        return 1
    used = set()
    for part in getattr(sharding, "spec", ()) or ():
        used.update((part,) if isinstance(part, str) else part or ())
    return prod(size for axis, size in mesh.shape.items() if axis not in used)
