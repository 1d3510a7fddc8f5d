"""What a step's jaxpr and arguments show of defects: the places that a report names.

Attention scores that no kernel keeps on the chip, calls into Python, arguments that come from the
host in every step, and state whose type differs between a step's arguments and its results.
"""
# The parts of jax that every program passes through have no public names.
# pyright: reportPrivateUsage=false

import re
from collections.abc import Iterator
from math import prod
from typing import Any

from .callbacks import is_callback
from .layout import devices_of, is_unspecified
from .survey import inner_jaxprs, size_of

_LEAST_LENGTH = 1024  # of a sequence: shorter ones have small scores
_LARGEST_HEAD = 256
_MOST_LISTED = 20
_CALLS = ("jit", "pjit", "custom_jvp_call")  # jax.numpy is made of them
_ARGUMENT = re.compile(r"([A-Za-z_]\w*)(.*)", re.DOTALL)
_RESULT = re.compile(r"(result(?:\[\d+\])?)(.*)", re.DOTALL)


def find_evidence(program: Any) -> dict[str, Any]:
    """Return what was seen in one recorded program, as JSON data."""
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
    """Yield each equation but loops, branches and kernels."""
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
    """Return products of queries and keys that a softmax reads.

    They have batch dimensions, sum over one head, and something of their size is exponentiated.
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
    """Return elements and last extent of a value, which layouts of heads and batch leave alone."""
    shape = getattr(var.aval, "shape", ())
    return prod(shape), shape[-1] if shape else 0


def _line(eqn: Any, *, own: bool = True) -> str:
    """Return the innermost line outside of jax that made an equation; with `own` the user's."""
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
    """Return state that comes back as another type than it went in.

    The next call then has arguments of other types, and jax compiles the step a second time.
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
    """Yield numbers of arguments and of the results at the same place of the same pytree."""
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
