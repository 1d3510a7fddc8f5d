"""A program loaded from a file, called like the function it was compiled from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import TPUModelError, TPUValidationError, did_you_mean
from ...plain_data import JsonObject
from ...shown import Renderable, Shown
from .file import ArraySlot, ExecutableHeader
from .slots import decode_structure

if TYPE_CHECKING:
    import jax

    from ...annotations import PyTree


class ShardedResults(Protocol):
    """Results of one call on all devices; jaxlib publishes no type for them."""

    def disassemble_into_single_device_arrays(self) -> "list[list[jax.Array]]":
        """Return one list per result, with one array per device."""
        ...


class DeviceProgram(Protocol):
    """A program that jaxlib has loaded onto devices; jaxlib publishes no type for it."""

    def execute_sharded(self, arguments: "list[jax.Array]") -> ShardedResults:
        """Run the program on arguments that are already sharded."""
        ...


class LoadedStep(Shown):
    """A compiled program on devices of this process. Arguments that were donated are used up.

    Attributes:
        header: What its file says of it.
        devices: The devices it runs on, in its order.
    """

    def __init__(
        self,
        header: ExecutableHeader,
        executable: DeviceProgram,
        devices: Sequence[Any],
        *,
        like: "PyTree" = None,
    ) -> None:
        import jax

        self.header = header
        self.devices = tuple(devices)
        self._executable = executable
        self._inputs = [self._sharding(slot) if slot.kept else None for slot in header.arguments]
        self._outputs = [self._sharding(slot) for slot in header.results]
        if like is not None:
            self._structure = jax.tree.structure(like)
        elif header.structure is not None:
            self._structure = decode_structure(header.structure)
        else:
            self._structure = jax.tree.structure([0] * len(header.results))
        if self._structure.num_leaves != len(header.results):
            raise TPUValidationError(
                f"like= has {self._structure.num_leaves} leaves, and {header.name} gives "
                f"{len(header.results)} arrays; pass a tree in the structure of its results."
            )

    def __call__(self, *args: "PyTree") -> "PyTree":
        """Run it once.

        Returns:
            The results as the function gave them; in a list where their structure is not known.

        Raises:
            TPUModelError: The arguments are not those it was compiled for.
        """
        import jax

        named = jax.tree_util.tree_flatten_with_path(args)[0]
        self._check([jax.tree_util.keystr(path) for path, _ in named])
        buffers: list[Any] = []
        for slot, sharding, (_, leaf) in zip(
            self.header.arguments, self._inputs, named, strict=True
        ):
            array = jax.numpy.asarray(leaf)
            if (tuple(array.shape), str(array.dtype)) != (slot.shape, slot.dtype):
                raise TPUModelError(
                    f"argument {slot.path} is {array.dtype}{list(array.shape)}, and "
                    f"{self.header.name} was compiled for {slot.dtype}{list(slot.shape)}."
                )
            if sharding is not None:
                buffers.append(jax.device_put(array, sharding))
        pieces = self._executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
        results = [
            jax.make_array_from_single_device_arrays(slot.shape, sharding, parts)
            for slot, sharding, parts in zip(
                self.header.results, self._outputs, pieces, strict=True
            )
        ]
        return jax.tree.unflatten(self._structure, results)

    def __repr__(self) -> str:
        return f"LoadedStep({self.header.name!r} on {self.header.target})"

    def __rich__(self) -> Renderable:
        return self.header

    def to_dict(self) -> JsonObject:
        """Return what its file says of it."""
        return self.header.to_dict()

    def _check(self, paths: list[str]) -> None:
        expected = [slot.path for slot in self.header.arguments]
        if paths == expected:
            return
        strange = [path for path in paths if path not in expected]
        missing = [path for path in expected if path not in paths]
        seen = f"{strange[0]} is none of them" if strange else f"{', '.join(missing[:3])} missing"
        raise TPUModelError(
            f"{self.header.name} takes {len(expected)} arrays and was given {len(paths)}: {seen}."
            + (did_you_mean(strange[0], expected) if strange else "")
        )

    def _sharding(self, slot: ArraySlot) -> Any:
        import numpy as np
        from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

        if slot.spec is None:
            return SingleDeviceSharding(self.devices[0], memory_kind=slot.memory)
        names, sizes = zip(*self.header.mesh_axes, strict=True)
        grid = np.array(self.devices, dtype=object).reshape(sizes)
        mesh = Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
        spec = PartitionSpec(*[entry or None for entry in slot.spec])
        return NamedSharding(mesh, spec, memory_kind=slot.memory)
