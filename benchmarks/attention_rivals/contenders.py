"""The attention kernels compared, each as a function of (B, S, H, D) arrays at given blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash
from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash
from tokamax._src.ops.experimental.tpu.splash_attention import (
    splash_attention_kernel as tokamax_kernel,
)
from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as tokamax_mask

from attention_rivals.cases import Case
from tpukit.kernels.ops.flash_attention.specs import OP
from tpukit.kernels.registry.op import PALLAS_TPU

Attention = Callable[[Any, Any, Any], Any]
OURS = "tpukit"


@dataclass(frozen=True)
class Sizes:
    """Blocks of a contender: queries, keys held, keys of one tile, and a switch of tokamax's."""

    q: int
    kv: int
    compute: int
    scheduler: bool = False

    def __str__(self) -> str:
        return f"{self.q}/{self.kv}/{self.compute}{' sched' if self.scheduler else ''}"


# For the pass that is not timed.
ANY = Sizes(512, 512, 512)


@dataclass(frozen=True)
class Family:
    """One implementation.

    Attributes:
        make: `f(case, forward sizes, backward sizes)` -> the function, or None if it cannot.
        grid: Where the search for its blocks begins.
        has_scheduler: Whether `Sizes.scheduler` means something to it.
        square: Whether all its blocks are one size, as its users set them.
    """

    name: str
    make: Callable[[Case, Sizes, Sizes], Attention | None]
    grid: tuple[Sizes, ...]
    has_scheduler: bool = False
    square: bool = False


def ours(case: Case) -> Attention:
    """With the blocks that dispatch takes."""
    return partial(OP.implementations[PALLAS_TPU], causal=True, window=case.window)


def flash_of_jax(case: Case, forward: Sizes, backward: Sizes) -> Attention | None:
    """It has neither windows nor groups: keys of a group are repeated, as its users must."""
    if case.window is not None:
        return None
    sizes = jax_flash.BlockSizes(
        block_q=forward.q,
        block_k_major=forward.kv,
        block_k=forward.compute,
        block_b=1,
        block_q_major_dkv=backward.q,
        block_k_major_dkv=backward.kv,
        block_k_dkv=backward.compute,
        block_q_dkv=backward.q,
        block_k_major_dq=backward.kv,
        block_k_dq=backward.compute,
        block_q_dq=backward.q,
    )

    def attend(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(x, case.group, axis=2) for x in (k, v))
        by_head = [x.swapaxes(1, 2) for x in (q, k, v)]
        out = jax_flash.flash_attention(
            *by_head, causal=True, sm_scale=case.width**-0.5, block_sizes=sizes
        )
        return out.swapaxes(1, 2)

    return attend


def splash_of_jax(case: Case, forward: Sizes, backward: Sizes) -> Attention:
    """With its fused backward kernel."""
    masks = jax_splash.MultiHeadMask([_mask(jax_splash, case)] * case.group)
    sizes = jax_splash.BlockSizes(**_splash_sizes(forward, backward), use_fused_bwd_kernel=True)
    kernel = jax_splash.make_splash_mqa_single_device(masks, block_sizes=sizes)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.swapaxes(1, 2) for x in (q * case.width**-0.5, k, v))
        grouped = q.reshape(q.shape[0], case.kv_heads, case.group, *q.shape[2:])
        out = jax.vmap(jax.vmap(kernel))(grouped, k, v)
        return out.reshape(q.shape).swapaxes(1, 2)

    return attend


def splash_of_tokamax(case: Case, forward: Sizes, backward: Sizes) -> Attention:
    """Its scheduler switch is one for both passes."""
    config = tokamax_kernel.SplashConfig(
        **_splash_sizes(forward, backward),
        use_experimental_scheduler=forward.scheduler or backward.scheduler,
    )
    # Outside of any trace, so that its tables and its grid are constants.
    mask = _mask(tokamax_mask, case)
    kernel = tokamax_kernel.make_splash_mha(mask, config=config, q_seq_shards=1)

    def attend(q: Any, k: Any, v: Any) -> Any:
        by_head = [x[0].swapaxes(0, 1) for x in (q * case.width**-0.5, k, v)]
        return kernel(*by_head).swapaxes(0, 1)[None]

    return attend


def _mask(library: Any, case: Case) -> Any:
    shape = (case.tokens, case.tokens)
    if case.window is None:
        return library.CausalMask(shape)
    return library.LocalMask(shape, window_size=(case.window - 1, 0), offset=0)


def _splash_sizes(forward: Sizes, backward: Sizes) -> dict[str, int]:
    return {
        "block_q": forward.q,
        "block_kv": forward.kv,
        "block_kv_compute": forward.compute,
        "block_q_dkv": backward.q,
        "block_kv_dkv": backward.kv,
        "block_kv_dkv_compute": backward.compute,
    }


RIVALS = (
    Family(
        "tokamax",
        splash_of_tokamax,
        (
            Sizes(1024, 1024, 512, True),
            Sizes(1024, 1024, 512),
            Sizes(1024, 1024, 1024),
        ),
        has_scheduler=True,
    ),
    Family(
        "jax splash",
        splash_of_jax,
        (Sizes(1024, 1024, 512), Sizes(1024, 1024, 1024), Sizes(2048, 2048, 1024)),
    ),
    Family("jax flash", flash_of_jax, (Sizes(1024, 1024, 1024), Sizes(512, 512, 512)), square=True),
)
