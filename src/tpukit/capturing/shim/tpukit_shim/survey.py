"""The facts of a program from its jaxpr: FLOPs, kernels, meshes, callbacks, updated state.

A training step is identified by its data flow, not by names: it has many FLOPs, and a parameter (an
argument that feeds matmuls) is returned with elementwise changes. Gradients change no argument, and
an optimizer alone has no matmul of that size.
"""

# The parts of jax that every program passes through have no public names.
# pyright: reportPrivateUsage=false
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any


def is_callback(primitive: Any) -> bool:
    """Return whether a primitive calls into Python on the host."""
    return "callback" in primitive.name or primitive.name == "debug_print"


@contextmanager
def without_callbacks() -> Generator[None]:
    """Lower callbacks for TPU to nothing, and drop their order, inside a block."""
    from jax._src import effects
    from jax._src.interpreters import mlir

    rules = mlir._platform_specific_lowerings
    own = rules["tpu"]
    known = {one for table in (mlir._lowerings, *rules.values()) for one in table}
    replaced = {one: own.get(one) for one in known if is_callback(one)}
    ordered = set(effects.ordered_effects._effect_types)
    for primitive in replaced:
        mlir.register_lowering(primitive, _zeros, platform="tpu")
    effects.ordered_effects._effect_types.clear()
    try:
        yield
    finally:
        effects.ordered_effects._effect_types.update(ordered)
        for primitive, rule in replaced.items():
            if rule is None:
                del own[primitive]
            else:
                own[primitive] = rule


def _zeros(ctx: Any, *_: Any, **__: Any) -> Any:
    """Lower a callback to zeros that the compiler cannot fold."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir.dialects import hlo

    zeros = [mlir.full_like_aval(ctx, 0, aval) for aval in ctx.avals_out]
    return list(hlo.OptimizationBarrierOp(zeros).results) if zeros else []


_MOVES = frozenset(
    (
        *("convert_element_type", "reshape", "transpose", "slice", "dynamic_slice", "squeeze"),
        *("broadcast_in_dim", "sharding_constraint", "mesh_cast", "reshard", "copy", "copy_p"),
        *(
            "device_put",
            "reduce_precision",
            "rev",
            "all_gather",
            "pvary",
            "name",
            "bitcast_convert_type",
        ),
    )
)
_PRODUCTS = frozenset(
    (
        *("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"),
        *("gather", "pallas_call", "scaled_matmul_wrapper", "scaled_dot"),
    )
)
_ELEMENTWISE = frozenset(
    (
        *("add", "sub", "mul", "div", "neg", "max", "min", "select_n", "clamp", "add_any", "sign"),
        *("convert_element_type", "sharding_constraint", "optimization_barrier", "copy", "copy_p"),
        *("reshape", "squeeze", "broadcast_in_dim", "expand_dims", "pvary"),
        *("sqrt", "rsqrt", "integer_pow", "square", "exp", "log", "reshard", "mesh_cast", "name"),
    )
)
# What jax writes into the names of equations that `jax.checkpoint` computes a second time.
RECOMPUTED = "rematted_computation"


@dataclass
class Survey:
    """The contents of one jaxpr; jaxprs that it calls count as often as they run.

    Attributes:
        flops: FLOPs of its matmuls and of kernels that state theirs.
        model_flops: FLOPs of its matmuls outside of kernels, without those that `jax.checkpoint`
            computes again.
        recomputed_flops: FLOPs of the matmuls that it computes again.
        open_flops: The part of `flops` in loops without a constant length, counted once.
        needs_tpu: Whether it has a kernel that no CPU runs.
        meshes: Shardings and meshes that it names.
        kernels: Pallas kernels by name, and how often each is called.
        blocks: Grid and block shapes of each kernel's first call, by name.
        open_loops: Loops without a constant length, which are counted once.
        callbacks: Calls from the program into Python on the host.
        remats: Backward passes of functions under `jax.checkpoint`.
    """

    flops: float = 0.0
    model_flops: float = 0.0
    recomputed_flops: float = 0.0
    open_flops: float = 0.0
    needs_tpu: bool = False
    meshes: list[Any] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    open_loops: int = 0
    callbacks: int = 0
    remats: int = 0

    def add(self, other: "Survey", times: int, devices: int = 1, *, again: bool = False) -> None:
        """Add another jaxpr that each of `devices` devices runs `times` times.

        `again` means that it recomputes earlier results.
        """
        self.flops += other.flops * times * devices
        once, more = other.model_flops, other.recomputed_flops
        once, more = (0.0, once + more) if again else (once, more)
        self.model_flops += once * times * devices
        self.recomputed_flops += more * times * devices
        self.open_flops += other.open_flops * times * devices
        self.remats += other.remats
        self.blocks = {**other.blocks, **self.blocks}
        self.needs_tpu = self.needs_tpu or other.needs_tpu
        self.meshes += other.meshes
        self.open_loops += other.open_loops
        self.callbacks += other.callbacks * times
        for name, count in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0) + count * times

    def without_flops(self) -> "Survey":
        """Return the survey without FLOPs, for a branch that is not taken."""
        return replace(self, flops=0.0, model_flops=0.0, recomputed_flops=0.0, open_flops=0.0)


def size_of(aval: Any) -> int:
    """Return the bytes of an array type; 8 for tokens and typed keys."""
    try:
        return prod(aval.shape) * aval.dtype.itemsize
    except (AttributeError, TypeError):
        return 8


def survey(jaxpr: Any, known: dict[int, Survey]) -> Survey:
    """Return the survey of a jaxpr."""
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    found = known[id(jaxpr)] = Survey()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "pallas_call":
            _add_kernel(found, eqn)
            continue
        again = RECOMPUTED in str(eqn.source_info.name_stack)
        found.flops += _flops(eqn)
        if again:
            found.recomputed_flops += _flops(eqn)
        else:
            found.model_flops += _flops(eqn)
        if name in ("sharding_constraint", "mesh_cast", "reshard"):
            found.meshes.append(eqn.params.get("sharding") or eqn.params.get("dst_sharding"))
        elif name == "shard_map":
            found.meshes.append(eqn.params["mesh"])
        elif name == "while":
            found.open_loops += 1
        elif is_callback(eqn.primitive):
            found.callbacks += 1
        elif eqn.params.get("differentiated"):
            found.remats += 1
        times = eqn.params["length"] if name == "scan" else 1
        called = [survey(inner, known) for inner in inner_jaxprs(eqn)]
        if name == "cond":  # one of its branches runs
            most, *others = sorted(called, key=lambda branch: -branch.flops)
            called = [most, *(one.without_flops() for one in others)]
        for inner in called:
            found.add(inner, times, _devices(eqn), again=again)
            if name == "while":
                found.open_flops += inner.flops - inner.open_flops
    return found


def _add_kernel(found: Survey, eqn: Any) -> None:
    found.needs_tpu = found.needs_tpu or not eqn.params.get("interpret")
    found.flops += getattr(eqn.params.get("cost_estimate"), "flops", 0) or 0
    about = eqn.params.get("name_and_src_info")
    source = getattr(eqn.params["jaxpr"].debug_info, "func_src_info", None) or "kernel"  # jax 0.6
    name = str(getattr(about, "name", None) or eqn.params.get("name") or source.split(" ")[0])
    found.kernels[name] = found.kernels.get(name, 0) + 1
    cut = eqn.params.get("grid_mapping")
    shapes = [one.block_shape for one in getattr(cut, "block_mappings", ())]
    grid = [size if isinstance(size, int) else 0 for size in getattr(cut, "grid", ())]
    blocks = [[_block_size(size) for size in shape] for shape in shapes]
    found.blocks.setdefault(name, {"grid": grid, "blocks": blocks})


def _block_size(size: Any) -> int:
    """Return the extent of a block along one dimension; 1 for a squeezed dimension."""
    size = getattr(size, "block_size", size)
    return size if isinstance(size, int) else 1


def _flops(eqn: Any) -> float:
    name = eqn.primitive.name
    if name not in _PRODUCTS or name == "gather":
        return 0.0
    out = prod(eqn.outvars[0].aval.shape)
    left = eqn.invars[0].aval.shape
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * out * prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * out * prod(kernel) / max(kernel[features], 1)
    return 2.0 * out * left[-1]


def _devices(eqn: Any) -> int:
    """Return the number of devices on which an equation runs the jaxprs that it calls."""
    if eqn.primitive.name != "shard_map":
        return 1
    mesh = eqn.params["mesh"]
    return prod(mesh.shape[name] for name in eqn.params.get("manual_axes") or mesh.axis_names)


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yield each jaxpr that an equation calls."""
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


def _calls(eqn: Any) -> Iterator[tuple[Any, int]]:
    """Yield each jaxpr that an equation calls, and where its arguments begin in the equation's."""
    for inner in inner_jaxprs(eqn):
        offset = len(eqn.invars) - len(inner.invars)
        if offset >= 0:
            yield inner, offset


def parameters_of(jaxpr: Any, known: dict[int, set[int]]) -> set[int]:
    """Return the numbers of the arguments that feed matmuls, table look-ups or kernels."""
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    found = known[id(jaxpr)] = set()
    origin = {var: number for number, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        sources = [None if hasattr(var, "val") else origin.get(var) for var in eqn.invars]
        if name in _PRODUCTS:
            fed = sources[:1] if name == "gather" else sources  # not the indices of a look-up
            found.update(number for number in fed if number is not None)
        elif name in _MOVES and sources[0] is not None:
            origin[eqn.outvars[0]] = sources[0]
        elif name == "optimization_barrier":
            for var, number in zip(eqn.outvars, sources, strict=True):
                if number is not None:
                    origin[var] = number
        for inner, offset in _calls(eqn):
            for number in parameters_of(inner, known):
                source = sources[offset + number]
                if source is not None:
                    found.add(source)
    return found


def updates_of(jaxpr: Any, known: dict[tuple[int, int], set[int]]) -> dict[int, set[int]]:
    """Return, for each result, the arguments of its shape that it is computed from elementwise."""
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    numbers = {var: number for number, var in enumerate(jaxpr.invars)}
    found: dict[int, set[int]] = {}
    for place, result in enumerate(jaxpr.outvars):
        key = (id(jaxpr), place)
        if key not in known:
            known[key] = set()
            if not hasattr(result, "val"):
                known[key] = _origins(result, made, numbers, known)
        found[place] = known[key]
    return found


def _origins(
    result: Any,
    made: dict[Any, Any],
    numbers: dict[Any, int],
    known: dict[tuple[int, int], set[int]],
) -> set[int]:
    elements, found, seen = prod(result.aval.shape), set(), {result}
    waiting = [result]
    while waiting:
        var = waiting.pop()
        if var in numbers:
            if var is not result:  # an argument that is passed on is not updated
                found.add(numbers[var])
            continue
        eqn = made.get(var)
        if eqn is None:
            continue
        before: list[Any] = []
        if eqn.primitive.name in _ELEMENTWISE:
            before = list(eqn.invars)
        else:
            place = eqn.outvars.index(var)
            for inner, offset in _calls(eqn):
                if eqn.primitive.name in ("scan", "while") or place >= len(inner.outvars):
                    continue
                before += [eqn.invars[offset + one] for one in updates_of(inner, known)[place]]
        for one in before:
            if not hasattr(one, "val") and one not in seen and prod(one.aval.shape) == elements:
                seen.add(one)
                waiting.append(one)
    return found
