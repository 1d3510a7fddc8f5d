"""Which part of which Hugging Face tensor is which part of which parameter."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..transformer.config import TransformerConfig
from ..transformer.shapes import (
    kinds_of_stacks,
    layer_shapes,
    parameter_shapes,
    prediction_shapes,
)


@dataclass(frozen=True)
class Slot:
    """Where a layer's parameter lies in a checkpoint.

    Attributes:
        name: The tensor, without the layer's prefix; `{expert}` stands for an expert's number,
            where each has a tensor of its own.
        transposed: Whether its last two dimensions are the other way round, as torch's are.
        axis: The dimension of the stored tensor along which it holds several parameters.
        part: Which entries of that dimension are this one's, in our order; None for all.
        of: How many entries that dimension has in all; 0 where it holds nothing else.
        middle: Whether the tensor has a dimension of one before its last, as convolutions have.
    """

    name: str
    transposed: bool = False
    axis: int = 0
    part: np.ndarray | slice | None = None
    of: int = 0
    middle: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole tensor, given that of the parameter."""
        stored = list(shape)
        if self.transposed:
            stored[-2:] = stored[:-3:-1]
        if self.middle:
            stored.insert(-1, 1)
        if self.of:
            stored[self.axis] = self.of
        return tuple(stored)

    def read(self, tensor: np.ndarray) -> np.ndarray:
        """The parameter out of the tensor."""
        part = tensor if self.part is None else _take(tensor, self.part, self.axis)
        part = part[..., 0, :] if self.middle else part
        return np.swapaxes(part, -1, -2) if self.transposed else part

    def write(self, tensor: np.ndarray, parameter: np.ndarray) -> None:
        """Put the parameter into the tensor."""
        part = np.swapaxes(parameter, -1, -2) if self.transposed else parameter
        part = np.expand_dims(part, -2) if self.middle else part
        where: list[slice | np.ndarray] = [slice(None)] * tensor.ndim
        if self.part is not None:
            where[self.axis] = self.part
        tensor[tuple(where)] = part


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a checkpoint, or a part of one: row `index` of the parameter at `path`."""

    name: str
    path: str
    shape: tuple[int, ...]
    slot: Slot
    index: tuple[int, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return self.slot.stored_shape(self.shape)


# Parameters of no layer -> tensor, and whether it is transposed.
_OUTSIDE = {
    "embed/embedding": Slot("embed_tokens.weight"),
    "final_norm/scale": Slot("norm.weight"),
    "per_layer/embed/embedding": Slot("embed_tokens_per_layer.weight"),
    "per_layer/proj/kernel": Slot("per_layer_model_projection.weight", transposed=True),
    "per_layer/norm/scale": Slot("per_layer_projection_norm.weight"),
}
_HEAD = Slot("lm_head.weight", transposed=True)
# What each depth of multi-token prediction has a copy of in a file.
_COPIED = {
    "embed/embedding": Slot("embed_tokens.weight"),
    "lm_head/kernel": Slot("shared_head.head.weight", transposed=True),
}


@dataclass(frozen=True)
class LayerSlots:
    """Where everything of the layers lies in a checkpoint.

    Attributes:
        kinds: For each kind of layer, where each of its parameters lies.
        prediction: What a depth of multi-token prediction has beside its layer.
    """

    kinds: Mapping[str, Mapping[str, Slot]]
    prediction: Mapping[str, Slot]


def entries(
    config: TransformerConfig, slots: LayerSlots, *, prefix: str, head: str, copies: bool = False
) -> Iterator[TensorEntry]:
    """Every tensor of the checkpoint, grouped by parameter so that one can be filled at a time.

    Args:
        config: The transformer.
        slots: Where everything of the layers lies.
        prefix: What the names of all tensors but the unembedding's start with.
        head: What the unembedding's starts with.
        copies: Whether parameters that a file holds several times are given as often.
    """
    shapes = parameter_shapes(config)
    for path, slot in _OUTSIDE.items():
        if path in shapes:
            yield TensorEntry(name=prefix + slot.name, path=path, shape=shapes[path], slot=slot)
    if "lm_head/kernel" in shapes:
        name, shape = head + _HEAD.name, shapes["lm_head/kernel"]
        yield TensorEntry(name=name, path="lm_head/kernel", shape=shape, slot=_HEAD)
    for stack, kinds in kinds_of_stacks(config).items():
        numbers = [n for n, kind in enumerate(config.layer_order) if kind in kinds]
        for path, shape in layer_shapes(config.kinds[kinds[0]], config.d_model).items():
            whole = "/".join(filter(None, ("layers", stack, path)))
            for row, number in enumerate(numbers):
                slot = slots.kinds[config.layer_order[number]][path]
                before = f"{prefix}layers.{number}."
                yield from _of_layer(before, whole, shape, slot, row)
    yield from _of_predictions(config, slots, prefix, shapes, copies=copies)


def _of_predictions(
    config: TransformerConfig,
    slots: LayerSlots,
    prefix: str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    copies: bool,
) -> Iterator[TensorEntry]:
    """Tensors of multi-token prediction, whose depths are numbered on from the last layer."""
    if not config.mtp_layers:
        return
    numbers = [config.n_layers + depth for depth in range(config.mtp_layers)]
    of_block = slots.kinds[config.layer_order[-1]]
    for path, shape in prediction_shapes(config).items():
        block = path.startswith("block/")
        slot = of_block[path.removeprefix("block/")] if block else slots.prediction[path]
        for row, number in enumerate(numbers):
            before = f"{prefix}layers.{number}."
            yield from _of_layer(before, f"mtp/layers/{path}", shape, slot, row)
    for path, slot in _COPIED.items() if copies else ():
        for number in numbers if path in shapes else ():
            name = f"{prefix}layers.{number}.{slot.name}"
            yield TensorEntry(name=name, path=path, shape=shapes[path], slot=slot)


def _of_layer(
    before: str, path: str, shape: tuple[int, ...], slot: Slot, row: int
) -> Iterator[TensorEntry]:
    if "{expert}" not in slot.name:
        yield TensorEntry(name=before + slot.name, path=path, shape=shape, slot=slot, index=(row,))
        return
    for expert in range(shape[0]):
        one = dataclasses.replace(slot, name=slot.name.format(expert=expert))
        yield TensorEntry(
            name=before + one.name, path=path, shape=shape[1:], slot=one, index=(row, expert)
        )


def halves_of_pairs(width: int, *, heads: int = 1, before: int = 0, after: int = 0) -> np.ndarray:
    """Where our channels lie in heads whose rotated channels are stored as neighbours.

    Rotary positions turn pairs of channels. Stored pairwise they are neighbours; here the first of
    all pairs come before the second of all, which a chip turns without moving channels around.

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
    """Where each part lies in a dimension of equal blocks, each of which holds all parts."""
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
