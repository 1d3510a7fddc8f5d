"""What a dense mask costs flash attention on a TPU: static times with and without one.

    python benchmarks/attention_masks.py [--chips v6e,v5e] [--tokens 4096]

8 bfloat16 heads of 128, from projected (B, S, H * D) arrays to the result in the same form, with
the blocks that dispatch takes. Times are of origin model, as in attention_static.py; a chip whose
kernel cannot be followed says why. Both passes include the copy of the mask that the backward
kernel reads.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from claims import Claim, report

import tpukit

HEADS, WIDTH = 8, 128
KINDS = {"forward": "flash_attention", "both passes": "flash_attention_backward"}
# The shape of a mask for so many tokens, and what else is said.
CASES: dict[str, tuple[Callable[[int], tuple[int, ...]] | None, dict[str, Any]]] = {
    "every key": (None, {}),
    "every key, mask of keys": (lambda n: (1, 1, 1, n), {}),
    "every key, mask of scores": (lambda n: (1, 1, n, n), {}),
    "causal": (None, {"causal": True}),
    "causal, mask of scores": (lambda n: (1, 1, n, n), {"causal": True}),
    "window of 1023 both ways": (None, {"window": 1024}),
}


def attend(q: Any, k: Any, v: Any, *mask: Any, **options: Any) -> Any:
    from tpukit.kernels import flash_attention

    heads = [x.reshape(*x.shape[:2], HEADS, WIDTH) for x in (q, k, v)]
    given = mask[0] if mask else None
    return flash_attention(*heads, mask=given, implementation="pallas_tpu", **options).reshape(
        q.shape
    )


def both_passes(q: Any, k: Any, v: Any, *mask: Any, **options: Any) -> Any:
    out, pull = jax.vjp(lambda *a: attend(*a, *mask, **options), q, k, v)
    return pull(out)


def time_of(case: str, tokens: int, chip: str, direction: str) -> Claim | str:
    from tpukit.errors import TPUError
    from tpukit.kernels.timing import estimate_kernel

    shape, options = CASES[case]
    x = jax.ShapeDtypeStruct((1, tokens, HEADS * WIDTH), jnp.bfloat16)
    mask = [] if shape is None else [jax.ShapeDtypeStruct(shape(tokens), jnp.bool_)]
    function = partial(attend if direction == "forward" else both_passes, **options)
    what = f"{chip} {direction}: {case}"
    try:
        found = estimate_kernel(function, [x, x, x, *mask], chip, kind=KINDS[direction])
    except TPUError as error:
        return f"{what}: {error}"
    if found.time_s is None:
        return f"{what}: {found.reason}"
    return Claim(what, found.time_s * 1e6, "us (model)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", default="v5e,v5p,v6e,7x")
    parser.add_argument("--tokens", type=int, default=4096)
    asked = parser.parse_args()
    tpukit.configure_tpu_environment()
    # Places in the source are part of a kernel, and would make it another one for the cache.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    for chip in asked.chips.split(","):
        for direction in KINDS:
            for case in CASES:
                found = time_of(case, asked.tokens, chip, direction)
                print(found, flush=True) if isinstance(found, str) else report(found)


if __name__ == "__main__":
    main()
