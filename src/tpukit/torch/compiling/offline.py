"""A PyTorch module as a training job for a slice that is not here, for the compiler's verdict."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import TPUModelError, TPUValidationError
from ...hardware import Slice
from ...job.config.spelling import spell_as_job
from ...job.job import Job
from ...job.sections import Hardware
from ...models.adapters.protocol import ModelInputs, Variables
from ...models.adapters.torch_module.adapter import TorchAdapter, TorchModel
from ...models.adapters.torch_module.arrays import shape_of
from ...models.execution import Execution
from ...step.workload import Workload
from ..config import TorchTPUConfig
from .call import as_arguments, forward_signature

# (outputs of the module, tensors of the batch by name) -> a scalar, in torch.
TorchLoss = Callable[[Any, Mapping[str, Any]], Any]


def job_for(
    settings: TorchTPUConfig,
    on: Slice | str,
    model: Any,
    sample_inputs: Any,
    *,
    loss: TorchLoss | None = None,
    changes: Mapping[str, Any],
) -> Job:
    """Return the job of training a module on batches like the sample, with these settings.

    Args:
        settings: Memory limits, precision, remat, flags; its own slice is left aside.
        on: The slice.
        model: The module; one on torch's meta device will do.
        sample_inputs: A tensor, a tuple of arguments or a dict by name, of the whole batch.
        loss: By default the loss that the module itself gives, or the cross-entropy of its logits.
        changes: Keys of the job, before all others.

    Raises:
        TPUValidationError: The sample is not what a batch can be made of.
        TPUModelError: It is not clear what the loss is.
    """
    where = Slice.parse(on) if isinstance(on, str) else on
    sample = _Sample.read(model, sample_inputs)
    whole = TorchModel(model, _forward(sample, loss))
    work = Workload(
        whole, batch=_with_targets(whole, sample.batch), inputs=tuple(sample.batch), loss=None
    )
    asked = {one.path: one.value for one in spell_as_job(_settings_on(settings, where))}
    return Job(model=work).replace({**asked, "on": str(where), **changes})


@dataclass(frozen=True)
class _Sample:
    """Sample inputs apart: shapes of the batch by name, and settings that are part of the program.

    Attributes:
        own: Names of the batch that the module itself is called with; the rest is for the loss.
    """

    batch: dict[str, jax.ShapeDtypeStruct]
    settings: dict[str, Any]
    own: tuple[str, ...]
    signature: inspect.Signature

    @classmethod
    def read(cls, model: Any, sample_inputs: Any) -> "_Sample":
        import torch

        arguments, named = as_arguments(sample_inputs)
        signature = forward_signature(model)
        known = signature.parameters
        own = {name: one for name, one in named.items() if name in known}
        try:
            bound = signature.bind_partial(*arguments, **own)
        except TypeError as error:
            raise TPUValidationError(
                f"{type(model).__name__} takes no such inputs: {error}."
            ) from None
        every = {**named, **bound.arguments}
        tensors = {name: one for name, one in every.items() if isinstance(one, torch.Tensor)}
        odd = [name for name, one in every.items() if isinstance(one, tuple | list | Mapping)]
        if odd or not tensors:
            raise TPUValidationError(
                f"a batch is made of tensors by name, and the sample has "
                f"{odd[0] + ', which holds several' if odd else 'none'}; give a tensor, a tuple "
                "of tensors, or a dict of them."
            )
        settings = {name: one for name, one in every.items() if name not in tensors}
        return cls(
            {name: shape_of(one) for name, one in tensors.items()},
            settings,
            tuple(name for name in tensors if name in known),
            signature,
        )


def _forward(sample: _Sample, loss: TorchLoss | None) -> Callable[[Any, Mapping[str, Any]], Any]:
    def forward(module: Any, batch: Mapping[str, Any]) -> Any:
        given = {name: batch[name] for name in sample.own}
        # Not read from the module here: with checkpoints its forward is another function.
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
    """Add the targets of logits, where the module gives no loss of its own.

    Raises:
        TPUModelError: The outputs are neither a loss nor logits.
    """
    outputs = _output_shapes(model, batch)
    leaves = jax.tree.leaves(outputs)
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return batch
    logits = leaves[0] if len(leaves) == 1 else None
    if logits is None or logits.ndim < 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        shapes = ", ".join(f"{one.dtype}{list(one.shape)}" for one in leaves)
        raise TPUModelError(
            f"{type(model.module).__name__} gives {shapes}, which is neither a loss nor logits; "
            "say how it is trained: compile_for(…, loss=lambda outputs, batch: …)."
        )
    if "targets" in batch:
        return batch
    return {**batch, "targets": jax.ShapeDtypeStruct(logits.shape[:-1], jnp.int32)}


def _output_shapes(model: TorchModel, batch: dict[str, jax.ShapeDtypeStruct]) -> Any:
    adapter = TorchAdapter(model, ModelInputs(tuple(batch), batch))
    variables = Variables(*adapter.state.shapes())

    def run(variables: Variables, batch: Any) -> Any:
        key = jax.random.key(0)
        return adapter.apply(variables, batch, rng=key, execution=Execution()).outputs

    return jax.eval_shape(run, variables, batch)


def _settings_on(settings: TorchTPUConfig, where: Slice) -> Any:
    """Return the settings for a slice's chip, whose own capacity then counts."""
    kept = {
        name: getattr(settings, name)
        for name in settings.model_fields_set
        if name not in Hardware.model_fields and name != "batch_size_per_chip"
    }
    return TorchTPUConfig(**kept, tpu_version=where.chip.name).resolved()
