"""Decoders of two small layers, of every kind of layer there is, and parameters for them."""

import jax

from tpukit.models import get_preset
from tpukit.step import Workload

LATENT = {"kv_rank": 8, "q_rank": 12, "nope_dim": 8, "rope_dim": 4, "v_dim": 8}
DELTA = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8}


def small(preset="tiny", **changes):
    """A decoder in float32, of two layers of width 32."""
    sizes = {"n_layers": 2, "d_model": 32, "d_ff": 32, "vocab_size": 64, "head_dim": 8}
    return get_preset(preset, dtype="float32", param_dtype="float32", **{**sizes, **changes})


def windowed(tokens):
    """One layer with a window, one without."""
    kinds = {"local": {"sliding_window": tokens}, "global": {}}
    return small(layer_kinds=kinds, layer_pattern="local, global")


def latent(preset="tiny", **changes):
    """Latent attention in both layers."""
    return small(preset, head_dim=12, latent=LATENT, **changes)


def linear(**full):
    """One layer of linear attention, and one full one with these settings."""
    kinds = {"linear": {"delta": DELTA}, "full": full}
    return small(layer_pattern="linear, full", layer_kinds=kinds)


def params_of(config):
    """Its parameters, always the same."""
    work = Workload(config, batch_size=1, sequence_length=8)
    return jax.jit(work.init)(jax.random.key(1)).params
