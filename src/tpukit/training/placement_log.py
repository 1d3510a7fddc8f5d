"""Where each array of a run lies, written to its folder."""

from pathlib import Path
from typing import Any

import jax

from ..hardware.figure import format_quantity
from ..runtime.files import write_text

NAME = "placement.txt"


def write_placement(state: Any, folder: Path) -> Path:
    """Write one line an array: path, shape, split over the mesh, devices, bytes on each."""
    lines: list[str] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        shard = leaf.addressable_shards[0].data
        shape = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        split = getattr(leaf.sharding, "spec", leaf.sharding)
        kind = getattr(leaf.sharding, "memory_kind", None) or "device"
        size = format_quantity(shard.nbytes, "B")
        count = len(leaf.sharding.device_set)
        lines.append(
            f"{jax.tree_util.keystr(path)}  {shape}  {split}  {count} devices, {size} each, {kind}"
        )
    target = folder / NAME
    write_text(target, "\n".join(lines) + "\n")
    return target
