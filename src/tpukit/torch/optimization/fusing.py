"""Attention and norms that people wrote by hand, sent to our kernels.

A module is replaced only where the fused form gives the same numbers on what the module was called
with in a run on the sample; what it is called decides nothing by itself.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from .casting import put_in_front
from .measuring import largest_difference

# What people call the parts of an attention layer.
_JOINED = ("c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj", "query_key_value", "to_qkv")
_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
)
_LAST = ("c_proj", "o_proj", "out_proj", "proj", "out", "wo", "to_out", "W_o")
_COUNTS = ("n_head", "num_heads", "n_heads", "heads", "num_attention_heads")
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_CLOSE = 1e-4


# (module, its one input) -> its output
Fused = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Seen:
    """A module inside, and what went in and came out when the sample ran."""

    name: str
    module: Any
    inputs: tuple[Any, ...]
    output: Any


def fuse(module: Any, run: Callable[[Any], Any]) -> list[str]:
    """Replace what can be fused, and say each in a sentence.

    Args:
        module: Changed in place.
        run: Calls it on the sample.
    """
    said = _by_setting(module, run)
    for seen in _watched(module, run):
        for fused in (_fused_norm(seen), _fused_attention(seen)):
            if fused is not None:
                function, what = fused
                put_in_front(seen.module, _with_forward(function))
                said.append(f"{seen.name} ({type(seen.module).__name__}) runs as {what}.")
                break
    return said


def _with_forward(function: Fused) -> type:
    """Return a base for a class whose forward is this function of the module and its input."""
    return type("Fused", (), {"forward": lambda self, x: function(self, x)})


def _by_setting(module: Any, run: Callable[[Any], Any]) -> list[str]:
    """Switch a Hugging Face model from attention written out to the fused function."""
    setting = getattr(getattr(module, "config", None), "_attn_implementation", None)
    switch = getattr(module, "set_attn_implementation", None)
    if setting != "eager" or switch is None:
        return []
    before = run(module)
    switch("sdpa")
    if _same(run(module), before):
        return ["Attention runs as scaled_dot_product_attention (attn_implementation 'sdpa')."]
    switch("eager")
    return []


def _watched(module: Any, run: Callable[[Any], Any]) -> list[Seen]:
    """Run the sample, and return the modules that take one tensor and give one, as called last."""
    import torch

    found: dict[str, Seen] = {}
    hooks: list[Any] = []

    def watch(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(inner: Any, inputs: Any, output: Any) -> None:
            single = len(inputs) == 1 and isinstance(inputs[0], torch.Tensor)
            if single and isinstance(output, torch.Tensor) and inputs[0].dtype == torch.float32:
                found[name] = Seen(name, inner, inputs, output)

        return hook

    for name, inner in module.named_modules():
        # torch's own layers have their lowerings already.
        if name and not type(inner).__module__.startswith("torch."):
            hooks.append(inner.register_forward_hook(watch(name)))
    try:
        run(module)
    finally:
        for hook in hooks:
            hook.remove()
    return list(found.values())


def _fused_norm(seen: Seen) -> tuple[Fused, str] | None:
    """Return a root-mean-square norm in the fused form, with its weight or one plus it."""
    import torch.nn.functional as functional

    module, (x,) = seen.module, seen.inputs
    own = dict(module.named_parameters())
    eps = next((getattr(module, one) for one in _EPSILONS if hasattr(module, one)), None)
    if len(own) != 1 or any(True for _ in module.children()) or not isinstance(eps, float):
        return None
    ((name, weight),) = own.items()
    if weight.shape != x.shape[-1:]:
        return None

    def plain(layer: Any, x: Any) -> Any:
        scale = getattr(layer, name)
        return functional.rms_norm(x, scale.shape, scale, eps)

    def shifted(layer: Any, x: Any) -> Any:
        scale = getattr(layer, name)
        return functional.rms_norm(x, scale.shape, 1 + scale, eps)

    for fused, what in ((plain, "rms_norm"), (shifted, "rms_norm with 1 + its weight")):
        if _same(fused(module, x), seen.output):
            return fused, what
    return None


def _fused_attention(seen: Seen) -> tuple[Fused, str] | None:
    """Return self-attention in the fused form, causal or not, where the parts have known names."""
    import torch.nn.functional as functional

    module, (x,) = seen.module, seen.inputs
    known = {name for name, _ in module.named_children()}
    joined = next((name for name in _JOINED if name in known), "")
    separate = next((names for names in _SEPARATE if {*names} <= known), ())
    last = next((name for name in _LAST if name in known), "")
    counts = [getattr(module, name, None) for name in _COUNTS]
    heads = next((count for count in counts if isinstance(count, int)), None)
    alone = len(inspect.signature(type(module).forward).parameters) == 2
    drops = any(getattr(one, "p", 0) for one in module.modules())
    if x.dim() != 3 or heads is None or not last or not (joined or separate):
        return None
    if not alone or drops:
        return None

    def attended(layer: Any, x: Any, *, causal: bool) -> Any:
        if separate:
            parts = [getattr(layer, name)(x) for name in separate]
        else:
            parts = getattr(layer, joined)(x).chunk(3, -1)
        query, key, value = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in parts)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return getattr(layer, last)(found.transpose(1, 2).flatten(2))

    for causal in (True, False):
        fused = partial(attended, causal=causal)
        try:
            same = _same(fused(module, x), seen.output)
        except RuntimeError:  # shapes that do not go together: parts of something else
            return None
        if same:
            return fused, f"{'causal ' if causal else ''}scaled_dot_product_attention"
    return None


def _same(found: Any, expected: Any) -> bool:
    return largest_difference(found, expected) <= _CLOSE
