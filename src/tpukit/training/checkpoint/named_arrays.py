"""Conversion of pytrees to named arrays and back, and the differences of two pytrees."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import Sharding
from jax.tree_util import SequenceKey

from ...annotations import PyTree
from ...errors import TPUCheckpointError
from ...parallel.sharding.trees import join_path, open_model

# Kinds of leaves before they are written: arrays, typed random keys, and plain numbers.
ARRAY, KEY = "array", "key"
NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}
MOST_NAMED = 3


@dataclass(frozen=True)
class LeafShape:
    """The description of one array of a checkpoint.

    Attributes:
        name: Its path in the tree, words joined by "/".
        words: The path word by word; an integer is an index of a list.
        shape: Its dimensions; for a random key, without those of the key data.
        dtype: Its element type, as numpy or jax name it.
        kind: "array", "key" (a typed random key), or the Python type of a plain number.
    """

    name: str
    words: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: str
    kind: str

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements, so that it is not written."""
        return 0 in self.shape

    @property
    def n_bytes(self) -> int:
        """Size of its elements; a random key counts as 4 bytes."""
        item = 4 if self.kind == KEY else jnp.dtype(self.dtype).itemsize
        return math.prod(self.shape) * item

    @property
    def description(self) -> str:
        """Shape and element type as text."""
        return f"{self.shape} {self.dtype}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "LeafShape":
        """Build from the output of `to_dict`."""
        return cls(
            name=saved["name"],
            words=tuple(saved["words"]),
            shape=tuple(saved["shape"]),
            dtype=saved["dtype"],
            kind=saved["kind"],
        )


def describe_tree(tree: PyTree, *, item: str) -> list[LeafShape]:
    """Return a description of every leaf of a tree, in the order of `jax.tree.leaves`.

    Raises:
        TPUCheckpointError: A leaf is neither array nor number, or two leaves share a name.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(open_model(tree).tree)
    described = [_describe(path, leaf, item) for path, leaf in leaves]
    names: set[str] = set()
    for leaf in described:
        if leaf.name in names:
            raise TPUCheckpointError(
                f"Two arrays of '{item}' are both called '{leaf.name}'; rename keys that "
                "contain a '/' or are numbers as text, because they look like nested keys."
            )
        names.add(leaf.name)
    return described


def arrays_of(tree: PyTree, *, item: str) -> dict[str, Any]:
    """Return the leaves of a tree by name, each as the array that is written."""
    values = jax.tree.leaves(open_model(tree).tree)
    shapes = describe_tree(tree, item=item)
    return {
        shape.name: _writable(value)
        for shape, value in zip(shapes, values, strict=True)
        if not shape.is_empty
    }


def shardings_of(tree: PyTree, *, item: str) -> dict[str, Sharding | None]:
    """Return the shardings of a tree's leaves by name; None is host memory."""
    values = jax.tree.leaves(open_model(tree).tree)
    shapes = describe_tree(tree, item=item)
    return {
        shape.name: getattr(value, "sharding", None)
        for shape, value in zip(shapes, values, strict=True)
    }


def tree_like(like: PyTree, arrays: Mapping[str, Any], *, item: str) -> PyTree:
    """Return the tree `like` with its leaves replaced by `arrays` of the same names."""
    opened = open_model(like)
    shapes = describe_tree(like, item=item)
    structure = jax.tree.structure(opened.tree)
    return opened.close(jax.tree.unflatten(structure, [arrays[shape.name] for shape in shapes]))


def nested(shapes: Sequence[LeafShape], arrays: Mapping[str, Any]) -> Any:
    """Return the arrays as nested dicts and lists."""
    if [shape.words for shape in shapes] == [()]:
        return arrays[shapes[0].name]
    tree: dict[Any, Any] = {}
    for shape in shapes:
        branch = tree
        for word in shape.words[:-1]:
            branch = branch.setdefault(word, {})
        branch[shape.words[-1]] = arrays[shape.name]
    return _with_lists(tree)


def restored_leaf(shape: LeafShape, value: Any) -> Any:
    """Convert an array that was read to the kind of leaf that was written."""
    if shape.kind == KEY:
        return jax.random.wrap_key_data(value, impl=key_implementation(shape.dtype))
    if shape.kind in NUMBERS:
        return NUMBERS[shape.kind](value)
    return value


def key_implementation(dtype: str) -> str:
    """Return the generator of a random key's element type, e.g. of "key<fry>"."""
    tag = dtype.removeprefix("key<").removesuffix(">")
    known = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
    if tag not in known:
        raise TPUCheckpointError(
            f"The checkpoint contains random keys of type '{dtype}', but only those of "
            f"{', '.join(known.values())} can be restored; save jax.random.key_data(key) instead."
        )
    return known[tag]


def is_key(value: Any) -> bool:
    """Return whether a leaf is a typed random key."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _describe(path: Sequence[Any], leaf: Any, item: str) -> LeafShape:
    name = join_path(path)
    words = tuple(
        entry.idx if isinstance(entry, SequenceKey) else join_path([entry]) for entry in path
    )
    kind = KEY if is_key(leaf) else ARRAY
    if not hasattr(leaf, "dtype"):
        kind = type(leaf).__name__
        if kind not in NUMBERS:
            raise TPUCheckpointError(
                f"'{item}' contains a {kind} at '{name or item}', but a checkpoint contains only "
                "arrays and numbers; remove it from the tree, or pass it in metadata=."
            )
        leaf = np.asarray(leaf)
    dtype = str(leaf.dtype)
    if kind == KEY:
        key_implementation(dtype)  # refuse a key that could not be restored
    elif not _is_storable(dtype):
        raise TPUCheckpointError(
            f"'{item}' contains {dtype} at '{name or item}', which the storage format does not "
            "support; save it as a wider type (uint8) and convert it back after restoring."
        )
    return LeafShape(name or item, words, tuple(leaf.shape), dtype, kind)


def _is_storable(dtype: str) -> bool:
    try:
        tensorstore.dtype(dtype)
    except (TypeError, ValueError):
        return False
    return True


def _writable(value: Any) -> Any:
    if is_key(value):
        value = jax.random.key_data(value)
    # An array that each process has on its own is written by one of them, from host memory.
    if not isinstance(value, jax.Array) or (jax.process_count() > 1 and value.is_fully_addressable):
        return np.array(value)  # a copy, because its owner may change it during the write
    return value


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    inner = {word: _with_lists(branch) for word, branch in tree.items()}
    if inner and all(isinstance(word, int) for word in inner):
        return [inner[index] for index in sorted(inner)]
    return inner


def difference(
    saved: Mapping[str, Sequence[LeafShape]], wanted: Mapping[str, Sequence[LeafShape]]
) -> str | None:
    """Return how the saved arrays differ from the wanted ones, or None if they do not.

    Only the items in `wanted` count; a checkpoint may contain more.
    """
    findings: list[str] = []
    for item, shapes in wanted.items():
        if item not in saved:
            return f"it has no '{item}', only {', '.join(saved) or 'nothing'}"
        findings += _differences(item, saved[item], shapes)
    if not findings:
        return None
    shown = "; ".join(findings[:MOST_NAMED])
    left = len(findings) - MOST_NAMED
    return f"{shown}; and {left} more" if left > 0 else shown


def _differences(item: str, saved: Sequence[LeafShape], wanted: Sequence[LeafShape]) -> list[str]:
    there = {shape.name: shape for shape in saved}
    here = {shape.name: shape for shape in wanted}
    findings: list[str] = []
    for name in [*here, *(name for name in there if name not in here)]:
        path = item if name == item else f"{item}/{name}"
        if name not in there:
            findings.append(f"{path} {here[name].description} is missing in the checkpoint")
        elif name not in here:
            findings.append(f"{path} {there[name].description} is only in the checkpoint")
        elif (there[name].shape, there[name].dtype) != (here[name].shape, here[name].dtype):
            findings.append(
                f"{path} is {there[name].description} in the checkpoint and "
                f"{here[name].description} here"
            )
    return findings
