"""Calls from a program into Python on the host, which no other process can compile.

`jax.debug.print`, `jax.debug.callback`, `io_callback` and `pure_callback` are lowered as if they
returned zeros at once. The report counts the calls, because the prediction has no time for them.
"""
# The parts of jax that every program passes through have no public names.
# pyright: reportPrivateUsage=false

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


def is_callback(primitive: Any) -> bool:
    """Return whether a primitive calls into Python on the host."""
    return "callback" in primitive.name or primitive.name == "debug_print"


@contextmanager
def without_callbacks() -> Generator[None]:
    """Lower callbacks for TPU as nothing, and their order as no order, within a block."""
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
    """Lower a callback to zeros that the compiler does not see through."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir.dialects import hlo

    zeros = [mlir.full_like_aval(ctx, 0, aval) for aval in ctx.avals_out]
    return list(hlo.OptimizationBarrierOp(zeros).results) if zeros else []
