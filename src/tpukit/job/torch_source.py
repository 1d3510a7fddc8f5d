"""A PyTorch model that a job names as `torch:module:function`.

The word before the name says that the builder makes an `nn.Module`. So it can be called on torch's
meta device wherever shapes are enough, and a model of any size takes no memory there.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import TPUModelError

logger = logging.getLogger(__name__)

PREFIX = "torch:"
MEAN_LOSS = (
    "the builder gives inputs and no loss, so the step's loss is the mean of the model's first "
    "output; give 'labels' or 'targets' with the inputs, or return a Workload with loss=…"
)


def is_torch_source(name: str) -> bool:
    """Whether a name is "torch:module:function"; "torch:f" is a function of torch itself."""
    return name.startswith(PREFIX) and ":" in name.removeprefix(PREFIX)


def build_torch_model(name: str, build: Callable[[], object], *, values: bool) -> Any:
    """Call a builder, and return its module or a `Workload` on the inputs that came with it.

    Args:
        name: What the builder goes by.
        build: Returns a module, a pair of module and sample inputs, or a `Workload`.
        values: Whether the model needs its values; without them it is built on the meta device.

    Raises:
        TPUModelError: It returns something else.
    """
    made = build() if values else _on_meta(name, build)
    if _is_module(made) or _is_module_workload(made):
        return made
    if isinstance(made, tuple) and len(made) == 2 and _is_module(made[0]):  # pyright: ignore[reportUnknownArgumentType]  anything
        module, inputs = made  # pyright: ignore[reportUnknownVariableType]
        return _workload(name, module, inputs)
    raise TPUModelError(
        f"'{name}' returned {_kind(made)}; --torch takes a function that returns an nn.Module, "
        "a pair (module, sample_inputs), or a Workload of one."
    )


def mean_of_first_output(outputs: Any, batch: Mapping[str, Any]) -> Any:
    """Return the mean of a model's first output: a loss that reaches everything behind it."""
    import jax
    import jax.numpy as jnp

    del batch
    first = next(
        leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.inexact)
    )
    return jnp.mean(first.astype(jnp.float32))


def _on_meta(name: str, build: Callable[[], object]) -> object:
    """Build without memory, or plainly where the builder needs values to do its work."""
    from ..models.adapters.torch_module.environment import require_torch

    torch = require_torch(f"--torch {name}")
    try:
        with torch.device("meta"):
            return build()
    except Exception as error:  # noqa: BLE001  the second try tells what is wrong with it
        said = " ".join(str(error).split())
        logger.info("%s needs values to be built (%s: %s)", name, type(error).__name__, said)
        return build()


def _workload(name: str, module: Any, inputs: Any) -> Any:
    """Return the step of a module on batches like its sample inputs."""
    import inspect

    from ..models.adapters.torch_module.arrays import shape_of
    from ..step.workload import Workload

    if isinstance(inputs, Mapping):
        tensors: dict[str, Any] = dict(inputs)  # pyright: ignore[reportUnknownArgumentType]  anything
    else:
        given: list[Any] = list(inputs) if isinstance(inputs, tuple | list) else [inputs]  # pyright: ignore[reportUnknownArgumentType]  anything
        names = list(inspect.signature(module.forward).parameters)
        tensors = {
            names[number] if number < len(names) else f"input_{number}": one
            for number, one in enumerate(given)
        }
    for key, one in tensors.items():
        if not hasattr(one, "dtype") or not getattr(one, "ndim", 0):
            raise TPUModelError(
                f"'{name}' gives {key} as {_kind(one)}; sample inputs are tensors whose first "
                "dimension is the batch, as one, a tuple or a dictionary by name."
            )
    batch = {key: shape_of(one) for key, one in tensors.items()}
    called_with = tuple(key for key in batch if key != "targets") or tuple(batch)
    has_loss = bool({"targets", "labels"} & batch.keys())
    length = _length(tensors)
    return Workload(
        module,
        batch=batch,
        inputs=called_with,
        loss=None if has_loss else mean_of_first_output,
        sequence_length=length,
    )


def _length(tensors: Mapping[str, Any]) -> int | None:
    """Return the tokens of an example, where the first input is (batch, tokens) of numbers."""
    first = next(iter(tensors.values()))
    is_tokens = first.ndim == 2 and not first.dtype.is_floating_point
    return int(first.shape[1]) if is_tokens else None


def _is_module(made: object) -> bool:
    from ..frameworks import is_instance_of

    return is_instance_of(made, "torch.nn")


def _is_module_workload(made: object) -> bool:
    inner = getattr(made, "model", None)
    return hasattr(made, "jit_train_step") and (
        _is_module(inner) or type(inner).__name__ == "TorchModel"
    )


def _kind(made: object) -> str:
    if made is None:
        return "None"
    name = type(made).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"
