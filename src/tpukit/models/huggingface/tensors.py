"""Where each parameter of a transformer is in a Hugging Face checkpoint."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..transformer.config import TransformerConfig
from ..transformer.layer_config import LayerConfig
from ..transformer.shapes import (
    kinds_of_stacks,
    layer_shapes,
    parameter_shapes,
    prediction_shapes,
)


@dataclass(frozen=True)
class TensorSlice:
    """The checkpoint tensor, or the part of one, that holds a parameter of a layer.

    Attributes:
        name: The tensor's name without the layer's prefix. `{expert}` is replaced by an expert's
            number where each expert has a tensor of its own.
        transposed: Whether the last two dimensions are swapped, as in torch's linear layers.
        axis: The dimension of the tensor along which it holds several parameters.
        part: The entries of that dimension that hold this parameter, in our order; None for all.
        axis_size: The size of that dimension; 0 where the tensor holds only this parameter.
        unit_axis: Whether the tensor has a dimension of size 1 before its last, as convolutions do.
    """

    name: str
    transposed: bool = False
    axis: int = 0
    part: np.ndarray | slice | None = None
    axis_size: int = 0
    unit_axis: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor, given the shape of the parameter."""
        stored = list(shape)
        if self.transposed:
            stored[-2:] = stored[:-3:-1]
        if self.unit_axis:
            stored.insert(-1, 1)
        if self.axis_size:
            stored[self.axis] = self.axis_size
        return tuple(stored)

    def read(self, tensor: np.ndarray) -> np.ndarray:
        """Return the parameter from the tensor."""
        part = tensor if self.part is None else _take(tensor, self.part, self.axis)
        part = part[..., 0, :] if self.unit_axis else part
        return np.swapaxes(part, -1, -2) if self.transposed else part

    def write(self, tensor: np.ndarray, parameter: np.ndarray) -> None:
        """Write the parameter into the tensor, in place."""
        part = np.swapaxes(parameter, -1, -2) if self.transposed else parameter
        part = np.expand_dims(part, -2) if self.unit_axis else part
        where: list[slice | np.ndarray] = [slice(None)] * tensor.ndim
        if self.part is not None:
            where[self.axis] = self.part
        tensor[tuple(where)] = part


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor slice of a checkpoint, which is `parameter[index]` of the parameter at `path`."""

    name: str
    path: str
    shape: tuple[int, ...]
    source: TensorSlice
    index: tuple[int, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return self.source.stored_shape(self.shape)


# Parameters outside of layers.
_OUTSIDE = {
    "embed/embedding": TensorSlice("embed_tokens.weight"),
    "final_norm/scale": TensorSlice("norm.weight"),
    "per_layer/embed/embedding": TensorSlice("embed_tokens_per_layer.weight"),
    "per_layer/proj/kernel": TensorSlice("per_layer_model_projection.weight", transposed=True),
    "per_layer/norm/scale": TensorSlice("per_layer_projection_norm.weight"),
}
_HEAD = TensorSlice("lm_head.weight", transposed=True)
# Parameters of which a file has a copy for each depth of multi-token prediction.
_COPIED = {
    "embed/embedding": TensorSlice("embed_tokens.weight"),
    "lm_head/kernel": TensorSlice("shared_head.head.weight", transposed=True),
}


@dataclass(frozen=True)
class LayerTensors:
    """The checkpoint tensors of all layers.

    Attributes:
        kinds: For each kind of layer, the tensors of its parameters by path.
        prediction: The tensors that a depth of multi-token prediction has beside its layer.
    """

    kinds: Mapping[str, Mapping[str, TensorSlice]]
    prediction: Mapping[str, TensorSlice]


def tensor_entries(
    config: TransformerConfig,
    tensors: LayerTensors,
    *,
    prefix: str,
    head: str,
    copies: bool = False,
) -> Iterator[TensorEntry]:
    """Yield every tensor of the checkpoint, grouped by parameter so that one can be read at a time.

    Args:
        config: The transformer.
        tensors: The tensors of all layers.
        prefix: The prefix of all tensor names except the unembedding's.
        head: The prefix of the unembedding's name.
        copies: Whether to yield the copies that a file has for multi-token prediction.
    """
    shapes = parameter_shapes(config)
    for path, source in _OUTSIDE.items():
        if path in shapes:
            yield TensorEntry(
                name=prefix + source.name, path=path, shape=shapes[path], source=source
            )
    if "lm_head/kernel" in shapes:
        name, shape = head + _HEAD.name, shapes["lm_head/kernel"]
        yield TensorEntry(name=name, path="lm_head/kernel", shape=shape, source=_HEAD)
    for stack, kinds in kinds_of_stacks(config).items():
        numbers = [n for n, kind in enumerate(config.layer_order) if kind in kinds]
        for path, shape in layer_shapes(config.kinds[kinds[0]], config.d_model).items():
            path_in_model = "/".join(filter(None, ("layers", stack, path)))
            for row, number in enumerate(numbers):
                source = tensors.kinds[config.layer_order[number]][path]
                before = f"{prefix}layers.{number}."
                yield from _layer_entries(before, path_in_model, shape, source, row)
    yield from _prediction_entries(config, tensors, prefix, shapes, copies=copies)


def _prediction_entries(
    config: TransformerConfig,
    tensors: LayerTensors,
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    copies: bool,
) -> Iterator[TensorEntry]:
    """Yield tensors of multi-token prediction, whose depths are numbered after the last layer."""
    if not config.mtp_layers:
        return
    numbers = [config.n_layers + depth for depth in range(config.mtp_layers)]
    of_block = tensors.kinds[config.layer_order[-1]]
    for path, shape in prediction_shapes(config).items():
        block = path.startswith("block/")
        source = of_block[path.removeprefix("block/")] if block else tensors.prediction[path]
        for row, number in enumerate(numbers):
            before = f"{prefix}layers.{number}."
            yield from _layer_entries(before, f"mtp/layers/{path}", shape, source, row)
    for path, source in _COPIED.items() if copies else ():
        for number in numbers if path in shapes else ():
            name = f"{prefix}layers.{number}.{source.name}"
            yield TensorEntry(name=name, path=path, shape=shapes[path], source=source)


def _layer_entries(
    before: str, path: str, shape: tuple[int, ...], source: TensorSlice, row: int
) -> Iterator[TensorEntry]:
    if "{expert}" not in source.name:
        yield TensorEntry(
            name=before + source.name, path=path, shape=shape, source=source, index=(row,)
        )
        return
    for expert in range(shape[0]):
        own = dataclasses.replace(source, name=source.name.format(expert=expert))
        yield TensorEntry(
            name=before + own.name, path=path, shape=shape[1:], source=own, index=(row, expert)
        )


def halves_of_pairs(width: int, *, heads: int = 1, before: int = 0, after: int = 0) -> np.ndarray:
    """Return the stored channel of each of ours, in heads that store rotated pairs as neighbours.

    Rotary embeddings rotate pairs of channels. Here the first channels of all pairs come before
    the second ones, so that a chip can rotate them without moving channels around.

    Args:
        width: Rotated channels of a head.
        heads: How many heads there are.
        before: Channels of a head before the rotated ones.
        after: Channels of a head after them.
    """
    rotated = before + np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])
    rest = before + width + np.arange(after)
    head = np.concatenate([np.arange(before), rotated, rest])
    return (np.arange(heads)[:, None] * len(head) + head).reshape(-1)


def in_blocks(blocks: int, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return the indices of each part in a dimension of equal blocks that each hold all parts."""
    block = sum(sizes.values())
    found: dict[str, np.ndarray] = {}
    start = 0
    for name, size in sizes.items():
        own = np.arange(blocks)[:, None] * block + np.arange(start, start + size)
        found[name] = own.reshape(-1)
        start += size
    return found


def _take(tensor: np.ndarray, part: np.ndarray | slice, axis: int) -> np.ndarray:
    where: list[slice | np.ndarray] = [slice(None)] * tensor.ndim
    where[axis] = part
    return tensor[tuple(where)]


_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
# In families with norms after the blocks, the norm before the MLP has another name.
_NORMS_AROUND = {
    "input_norm": "input_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


def usual_tensors(layer: LayerConfig, d_model: int) -> dict[str, TensorSlice]:
    """Return the tensors of a layer under the names of Llama, Qwen, Gemma and OLMo.

    Experts have the names of Qwen and DeepSeek.
    """
    norms = _NORMS_AROUND if layer.post_norms else _NORMS
    tensors: dict[str, TensorSlice] = {}
    for path in layer_shapes(layer, d_model):
        *owners, leaf = path.split("/")
        if owners and owners[0] in norms:
            tensors[path] = TensorSlice(f"{norms[owners[0]]}.weight")
        elif owners[:1] == ["self_attention"]:
            tensors[path] = _linear(["self_attn", *owners[1:]], leaf)
        elif owners[:2] == ["mlp", "experts"] and leaf.endswith("_proj"):
            tensors[path] = TensorSlice(f"mlp.experts.{{expert}}.{leaf}.weight", transposed=True)
        elif owners[:2] == ["mlp", "router"]:
            tensors[path] = _linear(["mlp", "gate"], leaf)
        else:
            tensors[path] = _linear(owners, leaf)
    return tensors


def _linear(owners: list[str], leaf: str) -> TensorSlice:
    names = {"kernel": "weight", "scale": "weight"}
    return TensorSlice(".".join([*owners, names.get(leaf, leaf)]), transposed=leaf == "kernel")
