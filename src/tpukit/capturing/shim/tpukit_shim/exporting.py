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

# The parts of jax that every program passes through have no public names.
# pyright: reportPrivateUsage=false
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from .layout import as_concrete, devices_of, is_unspecified
from .programs import RecordedProgram
from .settings import CaptureState
from .survey import inner_jaxprs, is_callback, size_of, without_callbacks

_LEAST_LENGTH = 1024  # of a sequence: shorter ones have small scores
_LARGEST_HEAD = 256
_MOST_LISTED = 20
_CALLS = ("jit", "pjit", "custom_jvp_call")  # jax.numpy is made of them
_ARGUMENT = re.compile(r"([A-Za-z_]\w*)(.*)", re.DOTALL)
_RESULT = re.compile(r"(result(?:\[\d+\])?)(.*)", re.DOTALL)


def find_evidence(program: Any) -> dict[str, Any]:
    """Return the observed defects of one recorded program, as JSON data."""
    eqns = list(_leaves(program.params["jaxpr"].jaxpr, set()))
    return {
        "scores": _scores(eqns),
        "callbacks": [
            {"name": eqn.primitive.name, "line": _line(eqn)}
            for eqn in eqns
            if is_callback(eqn.primitive)
        ][:_MOST_LISTED],
        "changes": _changes(program)[:_MOST_LISTED],
        "from_host": [number for number, arg in enumerate(program.args) if _is_of_host(arg)],
    }


def _leaves(jaxpr: Any, seen: set[int]) -> Iterator[Any]:
    """Yield each equation except loops, branches and kernels."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            continue
        inner = list(inner_jaxprs(eqn))
        if not inner or is_callback(eqn.primitive) or eqn.primitive.name in _CALLS:
            yield eqn
        for one in inner:
            yield from _leaves(one, seen)


def _scores(eqns: list[Any]) -> list[dict[str, Any]]:
    """Return query-key matmuls whose result a softmax reads.

    They have batch dimensions, contract over one head, and a value of their size is exponentiated.
    """
    softmaxes = {_size(eqn.outvars[0]) for eqn in eqns if eqn.primitive.name in ("exp", "exp2")}
    found: dict[Any, dict[str, Any]] = {}
    for eqn in eqns:
        if eqn.primitive.name != "dot_general":
            continue
        aval, left = eqn.outvars[0].aval, eqn.invars[0].aval.shape
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        if (
            batch
            and min(aval.shape[-2:]) >= _LEAST_LENGTH
            and prod(left[axis] for axis in contracted) <= _LARGEST_HEAD
            and _size(eqn.outvars[0]) in softmaxes
        ):
            found.setdefault(
                _size(eqn.outvars[0]),
                {
                    "type": aval.str_short(short_dtypes=True),
                    "bytes": size_of(aval),
                    "line": _line(eqn),
                    "lines": {},
                },
            )
    for eqn in eqns:
        for var in (*eqn.invars, *eqn.outvars):
            if _size(var) in found:
                found[_size(var)]["lines"][_line(eqn, own=False)] = None
    return [{**one, "lines": list(filter(None, one["lines"]))} for one in found.values()][
        :_MOST_LISTED
    ]


def _size(var: Any) -> tuple[int, int]:
    """Return elements and last extent of a value, which do not depend on the layout of heads."""
    shape = getattr(var.aval, "shape", ())
    return prod(shape), shape[-1] if shape else 0


def _line(eqn: Any, *, own: bool = True) -> str:
    """Return the innermost line outside of jax that made an equation; the user's if `own`."""
    from jax._src import source_info_util

    frames_of: Any = source_info_util.user_frames
    try:
        frames = list(frames_of(eqn.source_info.traceback))
    except AttributeError:  # older versions of jax take the whole of it
        frames = list(frames_of(eqn.source_info))
    users = [frame for frame in frames if "site-packages" not in frame.file_name] if own else []
    return next((f"{one.file_name}:{one.start_line}" for one in users or frames), "")


def _is_of_host(arg: Any) -> bool:
    """Return whether an argument is a numpy array, which every call copies to the devices."""
    import numpy as np

    # Newer versions of jax pass on a description instead of the array itself.
    return isinstance(arg, np.ndarray) or bool(getattr(arg, "is_np_array", False))


def _changes(program: Any) -> list[dict[str, str]]:
    """Return state that the program returns with another type than it takes.

    The next call then has arguments of other types, so jax compiles the step a second time.
    """
    jaxpr, outs = program.params["jaxpr"], program.params["out_shardings"]
    paths = getattr(jaxpr.jaxpr.debug_info, "result_paths", None)
    paths = [str(path) for path in paths] if isinstance(paths, (tuple, list)) else []
    if program.kind not in ("training step", "optimizer update") or len(paths) != len(outs):
        return []
    on_mesh = any(one is not None and devices_of(one) > 1 for one in program.in_shardings)
    found = []
    for number, place in _same_places(program, paths):
        before, after = jaxpr.in_avals[number], jaxpr.out_avals[place]
        own, stated = program.in_shardings[number], outs[place]
        change = None
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            change = before.str_short(short_dtypes=True), after.str_short(short_dtypes=True)
        elif before.weak_type != after.weak_type:
            kinds = ("a typed array", "a Python number")
            change = kinds[before.weak_type], kinds[after.weak_type]
        elif own is None and on_mesh and before.shape:
            change = "on one device, not placed on the mesh", "on the devices of the mesh"
        elif own is not None and not is_unspecified(stated) and _axes(own) != _axes(stated):
            change = f"sharded over {_axes(own)}", f"sharded over {_axes(stated)}"
        if change is not None:
            name = program.argument_names[number]
            found.append({"argument": name, "before": change[0], "after": change[1]})
    return found


def _axes(sharding: Any) -> str:
    """Return the mesh axes of each dimension, without axes of one device."""
    spec, mesh = getattr(sharding, "spec", None), getattr(sharding, "mesh", None)
    if spec is None or mesh is None:
        return "no axes"
    parts = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
    named = [[axis for axis in part if mesh.shape.get(axis, 1) > 1] for part in parts]
    while named and not named[-1]:
        named.pop()
    return str([" and ".join(part) or None for part in named]) if named else "no axes"


def _same_places(program: Any, paths: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of arguments and results at the same place of the same pytree."""
    given, returned = _by_root(program.argument_names, _ARGUMENT), _by_root(paths, _RESULT)
    whole = {path.removeprefix("result"): place for place, path in enumerate(paths)}
    used = set()
    for argument in given.values():
        for root, result in (*returned.items(), ("result", whole)):
            if root in used or list(argument) != list(result):
                continue
            if list(argument) == [""] and program.partner.get(result[""]) != argument[""]:
                continue
            if list(argument) == [""] and not program.params["jaxpr"].in_avals[argument[""]].shape:
                continue  # a number that comes back may be any number, such as a loss
            used.add(root)
            for rest, number in argument.items():
                yield number, result[rest]
            break


def _by_root(names: list[str], pattern: re.Pattern[str]) -> dict[str, dict[str, int]]:
    """Return numbers by path below each root: {"params": {"['w']": 0}}."""
    found: dict[str, dict[str, int]] = {}
    for number, name in enumerate(names):
        matched = pattern.fullmatch(name)
        if matched is not None:
            found.setdefault(matched[1], {})[matched[2]] = number
    return found


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
    """Return whether the user's environment has flatbuffers, which `jax.export` needs."""
    return importlib.util.find_spec("flatbuffers") is not None


def _copies(sharding: Any, mesh: Any) -> int:
    """Return on how many devices the same part of an argument is placed."""
    if mesh is None:
        return 1
    used = set()
    for part in getattr(sharding, "spec", ()) or ():
        used.update((part,) if isinstance(part, str) else part or ())
    return prod(size for axis, size in mesh.shape.items() if axis not in used)
