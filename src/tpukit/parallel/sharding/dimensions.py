"""The meaning of each parameter dimension, from the model's labels or from its names.

Strategies do not read names: they look for "the heads" or "the vocabulary". A label that comes with
the model (linen `nn.Partitioned`, an nnx `Param(..., dims=(...))`) always wins; the table below
covers the names of published models; shapes alone decide the rest.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# The vocabulary shared by parameters and activations. `router` is the logits side of an expert
# router: as long as `expert`, and never sharded, because every device scores every expert.
DIMENSIONS: Final[tuple[str, ...]] = (
    "batch", "sequence", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "expert",
    "capacity", "router", "layers",
)  # fmt: skip

Dims = tuple[str | None, ...]


@dataclass(frozen=True)
class Parameter:
    """One array of a model as a strategy sees it.

    Attributes:
        path: Names from the root to the array, joined by "/".
        shape: Its global shape.
        itemsize: Bytes per element.
        dims: The meaning of each dimension; None where it is unknown.
        guessed: True when `dims` are inferred from the shape alone.
        units: Indivisible units of each dimension; its size unless several elements belong
            together, as the `head_dim` elements of one head do.
        axis_labels: Mesh axis names that came with the array, for each dimension.
        is_weight: False for counters and random keys, which no strategy shards.
    """

    path: str
    shape: tuple[int, ...]
    itemsize: int
    dims: Dims
    units: tuple[int, ...]
    guessed: bool = False
    axis_labels: Dims = ()
    is_weight: bool = True


_GENERIC_LEAF = re.compile(r"kernel|weights?|w|bias|b|scale|gamma|beta|embedding|value")
_BIAS = re.compile(r"bias|b")
_STACK = re.compile(
    r"((decoder|encoder|transformer|hidden)_)?(layers?|blocks?|stack)|h|scan(ned)?|repeat"
)
_EXPERTS = re.compile(r"(moe_|routed_)?experts?(_weights)?")
_IN_MOE = re.compile(r".*moe.*|experts?|mixture.*")
_IN_ATTENTION = re.compile(r".*att(entio)?n.*|mha")
_IS_POSITION = re.compile(r"(wpe|pos(ition)?(al)?_?embed.*)")

# Module name -> its function. Column modules shard their outputs, row modules their inputs.
_MODULES: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    ("router", re.compile(r"router|gate_logits|expert_router")),
    ("kv", re.compile(r"w[kv]|[kv]|key|value|[kv]_proj|to_[kv]|(key|value)_proj")),
    (
        "query",
        re.compile(r"wq|q|query|q_proj|to_q|query_proj|w?qkv(_proj)?|c_attn|query_key_value"),
    ),
    (
        "up",
        re.compile(
            r"gate|up|in|(gate|up|in|gate_up|up_gate)_proj|w1|w3|wi(_\d)?|w_(gate|up|in)|fc_?1|fc_in"
            r"|c_fc|linear_?1|lin_?1|dense_h_to_4h|intermediate|gate_up"
        ),
    ),
    (
        "down",
        re.compile(
            r"o|wo|out|(o|out|c|down)_proj|to_out|down|w2|w_(down|out)|fc_?2|fc_out|linear_?2|lin_?2"
            r"|dense_4h_to_h"
        ),
    ),
    (
        "embed",
        re.compile(r"(token_|tok_|word_|input_)?embed(der|ding|dings|s|_tokens)?|wte|shared"),
    ),
    ("head", re.compile(r"(lm_|output_|logits_)?head|unembed(ding|der)?|logits(_dense)?|output")),
)


def infer_dims(path: str, shape: tuple[int, ...], *, stacked: bool = False) -> tuple[Dims, bool]:
    """Return the meaning of each dimension of a parameter, and whether it is only a guess.

    Args:
        path: The parameter's path.
        shape: Its shape.
        stacked: Its first dimension counts layers.
    """
    words = [word.lower() for word in path.split("/")]
    leading: list[str | None] = ["layers"] if stacked and shape else []
    own_shape = shape[len(leading) :]
    leaf = words[-1]
    owner = words[-2] if len(words) > 1 and _GENERIC_LEAF.fullmatch(leaf) else leaf
    in_experts = _holds_all_experts(words)
    in_moe = any(_IN_MOE.fullmatch(word) for word in words[:-1])
    matrix_rank = 1 if _BIAS.fullmatch(leaf) else 2
    if (in_experts or in_moe) and len(own_shape) == matrix_rank + 1:
        leading.append("expert")
        own_shape = own_shape[1:]
    kind = next((kind for kind, names in _MODULES if names.fullmatch(owner)), None)
    if kind == "up" and owner == "gate" and in_moe and not in_experts and "expert" not in leading:
        kind = "router"  # Mixtral calls its router "gate"
    if _IS_POSITION.fullmatch(owner):
        kind = None
    in_attention = any(_IN_ATTENTION.fullmatch(word) for word in words[:-1])
    own = _own_dims(kind, leaf, owner, own_shape, in_attention)
    if own is not None:
        return (*leading, *own), False
    guess = _guess_from_shape(leaf, own_shape)
    return (*leading, *guess), any(dim is not None for dim in guess)


def find_stacks(shapes: Mapping[str, tuple[int, ...]], *, hints: Sequence[str] = ()) -> set[str]:
    """Return the paths whose first dimension counts layers.

    A stack is a container such as `layers` without numbered children, whose arrays all agree on
    their first dimension, or whose parts are each such a stack, one per kind of layer. Pass weights
    only, because counters and random keys would disagree.

    Args:
        shapes: Shape of every parameter by path.
        hints: Regular expressions for paths known to be stacked.
    """
    stacked = {path for path in shapes if any(re.search(hint, path) for hint in hints)}
    members: dict[tuple[str, ...], list[str]] = {}
    for path in shapes:
        words = tuple(path.split("/"))
        for end, word in enumerate(words[:-1], start=1):
            if _STACK.fullmatch(word.lower()) and not words[end].isdigit():
                members.setdefault(words[:end], []).append(path)

    def is_stack(paths: Sequence[str]) -> bool:
        ranks = [len(shapes[path]) for path in paths]
        # A stacked vector is 2-D and a stacked matrix 3-D; fewer dimensions mean plain arrays.
        return min(ranks) >= 2 and max(ranks) >= 3 and len({shapes[path][0] for path in paths}) == 1

    def is_kind(paths: Sequence[str]) -> bool:
        # A full layer has vectors too; a lone 3-D array may be a matrix of separate heads.
        return is_stack(paths) and min(len(shapes[path]) for path in paths) == 2

    for container, paths in members.items():
        parts: dict[str, list[str]] = {}
        for path in paths:
            parts.setdefault(path.split("/")[len(container)], []).append(path)
        if is_stack(paths) or all(is_kind(part) for part in parts.values()):
            stacked.update(paths)
    return stacked


def _holds_all_experts(words: Sequence[str]) -> bool:
    """Whether the path has a word such as `experts` that is not followed by an expert's number."""
    return any(
        _EXPERTS.fullmatch(word) and not following.isdigit()
        for word, following in itertools.pairwise(words)
    )


def _own_dims(
    kind: str | None, leaf: str, owner: str, shape: tuple[int, ...], in_attention: bool
) -> Dims | None:
    """Return the dimensions of one layer's parameter in a module of a known kind, or None."""
    rank = len(shape)
    if rank == 0:
        return ()
    if kind is None:
        return ("embed",) if rank == 1 else None
    transposed = leaf in ("weight", "weights")  # equinox and torch store (out, in)
    if kind == "embed":
        return ("vocab", "embed") if rank == 2 else None
    if kind == "head":
        return _head_dims(leaf, owner, shape, transposed)
    if kind == "down":
        inner = "heads" if in_attention else "mlp"
        by_rank: dict[int, Dims] = {
            1: ("embed",),
            2: (inner, "embed"),
            3: ("heads", "head_dim", "embed"),
        }
    else:
        outer = {"kv": "kv_heads", "query": "heads", "up": "mlp", "router": "router"}[kind]
        heads = kind in ("kv", "query")
        by_rank = {1: (outer,), 2: ("embed", outer)}
        if heads:
            by_rank |= {3: ("embed", outer, "head_dim"), 4: ("embed", None, outer, "head_dim")}
        if heads and rank == 2 and _BIAS.fullmatch(leaf):
            return (outer, "head_dim")
    dims = by_rank.get(rank)
    return dims[::-1] if dims and transposed and rank == 2 else dims


def _head_dims(leaf: str, owner: str, shape: tuple[int, ...], transposed: bool) -> Dims | None:
    if len(shape) == 1:
        return ("vocab",) if _BIAS.fullmatch(leaf) else None
    if len(shape) != 2:
        return None
    # A bare array does not tell its orientation; the vocabulary is the longer side.
    vocab_first = shape[0] > shape[1] if leaf == owner else transposed
    return ("vocab", "embed") if vocab_first else ("embed", "vocab")


def _guess_from_shape(leaf: str, shape: tuple[int, ...]) -> Dims:
    """Guess that a widening matrix is the first half of an MLP, a narrowing one the second."""
    if len(shape) != 2 or shape[0] == shape[1] or _BIAS.fullmatch(leaf):
        return (None,) * len(shape)
    return ("embed", "mlp") if shape[0] < shape[1] else ("mlp", "embed")
