"""Changes to a module: bfloat16 compute, and fused attention and norms."""

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..annotations import PyTree
from ..models.adapters.torch_module.environment import torch_trees

if TYPE_CHECKING:
    import torch


def narrow_linear_layers(module: "torch.nn.Module") -> list[str]:
    """Let every `nn.Linear` in a module compute in bfloat16; return their names."""
    import torch

    layers = [
        (name, inner)
        for name, inner in module.named_modules()
        if isinstance(inner, torch.nn.Linear) and inner.weight.dtype == torch.float32
    ]
    for _, inner in layers:
        prepend_base(inner, NarrowLayer)
    return [name or type(module).__name__ for name, _ in layers]


def narrow_everything(module: "torch.nn.Module") -> None:
    """Let a module compute in bfloat16; float32 outputs stay float32.

    Buffers keep their dtype, because running statistics and position tables need the precision.
    """
    prepend_base(module, NarrowLayer)


def prepend_base(module: "torch.nn.Module", base: type) -> None:
    """Give a module a subclass of the same name whose first base is `base`.

    State dicts, `isinstance` and attributes stay unchanged.
    """
    kind = type(module)
    module.__class__ = type(kind.__name__, (base, kind), {"__module__": kind.__module__})


class NarrowLayer:
    """A base for modules that compute in bfloat16 on float32 weights."""

    def forward(self, *arguments: Any, **options: Any) -> PyTree:
        """Run the module's forward on bfloat16 inputs and weights."""
        import torch

        arguments, options = _cast((arguments, options), torch.float32, torch.bfloat16)
        with _parameters_cast(self, torch.bfloat16):
            outputs = super().forward(*arguments, **options)  # pyright: ignore[reportAttributeAccessIssue]  of the user's class
        return _cast(outputs, torch.bfloat16, torch.float32)


def _cast(tree: PyTree, source: Any, target: Any) -> PyTree:
    import torch

    def cast(tensor: "torch.Tensor") -> "torch.Tensor":
        return tensor.to(target) if tensor.dtype == source else tensor

    return torch_trees().tree_map_only(torch.Tensor, cast, tree)


@contextmanager
def _parameters_cast(module: Any, dtype: Any) -> Generator[None]:
    """Replace a module's float32 parameters by cast ones in the block; gradients still flow."""
    import torch

    kept = [(inner, dict(inner._parameters)) for inner in module.modules()]
    try:
        for inner, own in kept:
            for name, parameter in own.items():
                if parameter is not None and parameter.dtype == torch.float32:
                    inner._parameters[name] = parameter.to(dtype)
            _update_flat_weights(inner)
        yield
    finally:
        for inner, own in kept:
            inner._parameters.update(own)
            _update_flat_weights(inner)


def _update_flat_weights(module: Any) -> None:
    """Update the list of weights that recurrent layers keep beside their parameters."""
    names = getattr(module, "_flat_weights_names", None)
    if names is not None:
        module._flat_weights = [getattr(module, name, None) for name in names]


# Usual names of the parts of an attention layer.
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
class ObservedCall:
    """A submodule, with its inputs and output in the sample run."""

    name: str
    module: Any
    inputs: tuple[PyTree, ...]
    output: PyTree


def fuse(module: "torch.nn.Module", run: Callable[[Any], Any]) -> list[str]:
    """Replace hand-written attention and norms by fused kernels; return a sentence for each.

    A submodule is replaced only if the fused form gives the same numbers on its inputs in a run on
    the sample; its name alone decides nothing.

    Args:
        module: The module, changed in place.
        run: Calls the module on the sample.
    """
    changes = _by_setting(module, run)
    for call in _observed_calls(module, run):
        for fused in (_fused_norm(call), _fused_attention(call)):
            if fused is not None:
                function, what = fused
                prepend_base(call.module, _with_forward(function))
                changes.append(f"{call.name} ({type(call.module).__name__}) runs as {what}.")
                break
    return changes


def _with_forward(function: Fused) -> type:
    """Return a base class with this function as its forward."""
    return type("Fused", (), {"forward": lambda self, x: function(self, x)})


def _by_setting(module: "torch.nn.Module", run: Callable[[Any], Any]) -> list[str]:
    """Switch a Hugging Face model from eager attention to the fused function."""
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


def _observed_calls(module: "torch.nn.Module", run: Callable[[Any], Any]) -> list[ObservedCall]:
    """Run the sample; return the last call of each submodule with one tensor in and one out."""
    import torch

    calls: dict[str, ObservedCall] = {}
    hooks: list[Any] = []

    def watch(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(inner: Any, inputs: PyTree, output: PyTree) -> None:
            single = len(inputs) == 1 and isinstance(inputs[0], torch.Tensor)
            if single and isinstance(output, torch.Tensor) and inputs[0].dtype == torch.float32:
                calls[name] = ObservedCall(name, inner, inputs, output)

        return hook

    for name, inner in module.named_modules():
        # torch's own layers have fused lowerings already.
        if name and not type(inner).__module__.startswith("torch."):
            hooks.append(inner.register_forward_hook(watch(name)))
    try:
        run(module)
    finally:
        for hook in hooks:
            hook.remove()
    return list(calls.values())


def _fused_norm(call: ObservedCall) -> tuple[Fused, str] | None:
    """Return a fused RMS norm, with its weight or 1 + its weight."""
    import torch.nn.functional as functional

    module, (x,) = call.module, call.inputs
    own = dict(module.named_parameters())
    eps = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    if len(own) != 1 or any(True for _ in module.children()) or not isinstance(eps, float):
        return None
    ((name, weight),) = own.items()
    if weight.shape != x.shape[-1:]:
        return None

    def plain(layer: Any, x: Any) -> PyTree:
        scale = getattr(layer, name)
        return functional.rms_norm(x, scale.shape, scale, eps)

    def shifted(layer: Any, x: Any) -> PyTree:
        scale = getattr(layer, name)
        return functional.rms_norm(x, scale.shape, 1 + scale, eps)

    for fused, what in ((plain, "rms_norm"), (shifted, "rms_norm with 1 + its weight")):
        if _same(fused(module, x), call.output):
            return fused, what
    return None


def _fused_attention(call: ObservedCall) -> tuple[Fused, str] | None:
    """Return fused self-attention, causal or not, if the submodules have usual names."""
    import torch.nn.functional as functional

    module, (x,) = call.module, call.inputs
    known = {name for name, _ in module.named_children()}
    joined = next((name for name in _JOINED if name in known), "")
    separate = next((names for names in _SEPARATE if {*names} <= known), ())
    last = next((name for name in _LAST if name in known), "")
    counts = [getattr(module, name, None) for name in _COUNTS]
    heads = next((count for count in counts if isinstance(count, int)), None)
    has_one_input = len(inspect.signature(type(module).forward).parameters) == 2
    drops = any(getattr(part, "p", 0) for part in module.modules())
    if x.dim() != 3 or heads is None or not last or not (joined or separate):
        return None
    if not has_one_input or drops:
        return None

    def attended(layer: Any, x: Any, *, causal: bool) -> PyTree:
        if separate:
            parts = [getattr(layer, name)(x) for name in separate]
        else:
            parts = getattr(layer, joined)(x).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        result = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return getattr(layer, last)(result.transpose(1, 2).flatten(2))

    for causal in (True, False):
        fused = partial(attended, causal=causal)
        try:
            same = _same(fused(module, x), call.output)
        except RuntimeError:  # shapes do not match, so it is not attention
            return None
        if same:
            return fused, f"{'causal ' if causal else ''}scaled_dot_product_attention"
    return None


def _same(actual: PyTree, expected: PyTree) -> bool:
    return largest_difference(actual, expected) <= _CLOSE


def largest_difference(actual: PyTree, expected: PyTree) -> float:
    """Return the largest difference of two results, relative to each tensor's largest number."""
    import torch

    trees = torch_trees()
    pairs = zip(trees.tree_leaves(actual), trees.tree_leaves(expected), strict=True)
    worst = 0.0
    for left, right in pairs:
        if not isinstance(right, torch.Tensor) or not isinstance(left, torch.Tensor):
            continue
        if left.shape != right.shape:
            return float("inf")
        if right.numel() and right.is_floating_point():
            scale = max(right.abs().max().item(), 1e-6)
            difference = (left.double() - right.double()).abs().max().item() / scale
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst
