"""The default way to split a tensor of a given shape, as plain names without jax."""

from collections.abc import Sequence


def spec_for_shape(
    shape: Sequence[int], axis_names: Sequence[str] = ("data", "model")
) -> tuple[str | None, ...]:
    """Return the mesh axis for each dimension: the first axis on the first, the second on the last.

    A vector takes the first axis, a scalar none; with one axis name only the first dimension is
    split. `PartitionSpec(*spec_for_shape(shape))` is what jax takes.
    """
    names = tuple(axis_names)
    rank = len(shape)
    entries: list[str | None] = [None] * rank
    if rank and names:
        entries[0] = names[0]
    if rank > 1 and len(names) > 1:
        entries[-1] = names[1]
    return tuple(entries)
