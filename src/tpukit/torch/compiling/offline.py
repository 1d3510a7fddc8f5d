"""A PyTorch module as a training job, to be checked for a slice."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...errors import TPUModelError, TPUValidationError
from ...hardware import Slice
from ...job.config import TPUConfig
from ...job.config.spelling import spell_as_job
from ...job.job import Job
from ...job.sections import Hardware
from ...models.adapters.protocol import ModelInputs, Variables
from ...models.adapters.torch_module.adapter import TorchAdapter, TorchModel
from ...models.adapters.torch_module.arrays import shape_of
from ...models.execution import Execution
from ...plain_data import JsonMapping
from ...step.workload import Workload
from ..config import TorchTPUConfig
from .call import as_arguments, forward_signature

if TYPE_CHECKING:
    import torch

# (module outputs, batch tensors by name) -> a scalar, in torch.
TorchLoss = Callable[[Any, Mapping[str, PyTree]], PyTree]


def job_for(
    settings: TorchTPUConfig,
    on: Slice | str,
    model: "torch.nn.Module",
    sample_inputs: PyTree,
    *,
    loss: TorchLoss | None = None,
    changes: JsonMapping,
) -> Job:
    """Return the job that trains a module on batches like the sample.

    Args:
        settings: Memory limits, precision, remat, flags; its own slice is ignored.
        on: The slice.
        model: The module; torch's meta device is allowed.
        sample_inputs: A full batch: a tensor, a tuple of arguments or a dict by name.
        loss: By default the loss that the module returns, or the cross-entropy of its logits.
        changes: Keys of the job, which go before the settings.

    Raises:
        TPUValidationError: The sample is not a batch.
        TPUModelError: The module returns neither a loss nor logits.
    """
    where = Slice.parse(on) if isinstance(on, str) else on
    sample = _Sample.read(model, sample_inputs)
    trained = TorchModel(model, _forward(sample, loss))
    work = Workload(
        trained, batch=_with_targets(trained, sample.batch), inputs=tuple(sample.batch), loss=None
    )
    values = {
        setting.path: setting.value for setting in spell_as_job(_settings_on(settings, where))
    }
    return Job(model=work).replace({**values, "on": str(where), **changes})


@dataclass(frozen=True)
class _Sample:
    """Sample inputs: shapes of the batch by name, and settings that are part of the program.

    Attributes:
        own: Names of the tensors that the module is called with; the rest is for the loss.
    """

    batch: dict[str, jax.ShapeDtypeStruct]
    settings: dict[str, Any]
    own: tuple[str, ...]
    signature: inspect.Signature

    @classmethod
    def read(cls, model: "torch.nn.Module", sample_inputs: PyTree) -> "_Sample":
        import torch

        arguments, named = as_arguments(sample_inputs)
        signature = forward_signature(model)
        known = signature.parameters
        own = {name: value for name, value in named.items() if name in known}
        try:
            bound = signature.bind_partial(*arguments, **own)
        except TypeError as error:
            raise TPUValidationError(
                f"{type(model).__name__} does not accept these inputs: {error}; its forward takes "
                f"{signature}."
            ) from None
        every = {**named, **bound.arguments}
        tensors = {name: value for name, value in every.items() if isinstance(value, torch.Tensor)}
        odd = [name for name, value in every.items() if isinstance(value, tuple | list | Mapping)]
        if odd or not tensors:
            raise TPUValidationError(
                f"a batch is made of tensors by name, but the sample has "
                f"{odd[0] + ', a container of several' if odd else 'none'}; give a tensor, a tuple "
                "of tensors, or a dict of them."
            )
        settings = {name: value for name, value in every.items() if name not in tensors}
        return cls(
            {name: shape_of(tensor) for name, tensor in tensors.items()},
            settings,
            tuple(name for name in tensors if name in known),
            signature,
        )


def _forward(
    sample: _Sample, loss: TorchLoss | None
) -> Callable[[Any, Mapping[str, PyTree]], PyTree]:
    def forward(module: "torch.nn.Module", batch: Mapping[str, PyTree]) -> PyTree:
        given = {name: batch[name] for name in sample.own}
        # Not the module's signature here, because with checkpoints its forward is another function.
        bound = inspect.BoundArguments(
            sample.signature,
            {**given, **sample.settings},  # pyright: ignore[reportArgumentType]  a dict is ordered
        )
        outputs = module(*bound.args, **bound.kwargs)
        return outputs if loss is None else loss(outputs, batch)

    return forward


def _with_targets(
    model: TorchModel, batch: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Add targets for logits, if the module returns no loss.

    Raises:
        TPUModelError: The outputs are neither a loss nor logits.
    """
    outputs = _output_shapes(model, batch)
    leaves = jax.tree.leaves(outputs)
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return batch
    logits = leaves[0] if len(leaves) == 1 else None
    if logits is None or logits.ndim < 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
        raise TPUModelError(
            f"{type(model.module).__name__} returns {shapes}, which is neither a loss nor logits; "
            "give a loss: compile_for(…, loss=lambda outputs, batch: …)."
        )
    if "targets" in batch:
        return batch
    return {**batch, "targets": jax.ShapeDtypeStruct(logits.shape[:-1], jnp.int32)}


def _output_shapes(model: TorchModel, batch: dict[str, jax.ShapeDtypeStruct]) -> Any:
    adapter = TorchAdapter(model, ModelInputs(tuple(batch), batch))
    variables = Variables(*adapter.state.shapes())

    def run(variables: Variables, batch: PyTree) -> PyTree:
        key = jax.random.key(0)
        return adapter.apply(variables, batch, rng=key, execution=Execution()).outputs

    return jax.eval_shape(run, variables, batch)


def _settings_on(settings: TorchTPUConfig, where: Slice) -> TPUConfig:
    """Return the settings for a slice's chip, with that chip's memory."""
    kept = {
        name: getattr(settings, name)
        for name in settings.model_fields_set
        if name not in Hardware.model_fields and name != "batch_size_per_chip"
    }
    return TorchTPUConfig(**kept, tpu_version=where.chip.name).resolved()
