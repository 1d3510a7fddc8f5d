"""A scored candidate as a choice with its job."""

import math
from typing import Any

from ...hardware.formats import spelled_as
from ...job.job import Job
from ...models.transformer.config import OPERANDS
from ...step.optimizer.spec import OptimizerSpec
from ..cost.money import SPOT, Costs, Market
from ..search.candidates import PRECISIONS
from ..search.scoring import Scores
from ..search.subject import Subject
from .choice import Choice

# On slices of few chips the compiler cuts products with gathered weights into pieces and adds these
# up through HBM: llama3.1-8b on v6e-16 takes 4.13 s a step then, and 2.90 s in whole products.
_WHOLE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


def optimizer_settings(optimizer: OptimizerSpec) -> dict[str, Any]:
    """Keys of a job's `train:` section that ask for the optimizer; none that are as by default."""
    usual = OptimizerSpec()
    name = {} if optimizer.name == usual.name else {"optimizer": optimizer.name}
    dtype = optimizer.moment_dtype
    return {**name, **({} if dtype == usual.moment_dtype else {"moment_dtype": dtype})}


def choice_at(
    index: int, scores: Scores, costs: Costs, *, subject: Subject, market: Market, tokens: float
) -> Choice:
    """The candidate of that index."""
    candidates = scores.candidates
    mesh = candidates.meshes[candidates.mesh[index]]
    on = mesh.slice
    tokens_per_step = int(scores.tokens_per_step[index])
    quote, region = costs.quotes[on]
    precision = PRECISIONS[candidates.precision[index]]
    optimizer = candidates.optimizers[candidates.optimizer[index]]
    remat = candidates.remats[candidates.remat[index]]
    changes = dict(subject.changes)
    if precision != subject.precision:
        changes["matmul"] = spelled_as(precision, OPERANDS) or "dtype"
    job = Job(
        model=subject.name,
        model_changes=changes,
        on=str(on),
        mesh=mesh.joined_sizes,
        dcn_mesh=mesh.dcn_mesh,
        batch_size=int(candidates.examples[index]),
        sequence_length=subject.sequence_length,
        microbatches=int(candidates.microbatches[index]),
        remat=remat,
        options=_WHOLE_PRODUCTS if mesh.sizes.get("tensor", 1) == 1 else {},
        train={**optimizer_settings(optimizer), "steps": math.ceil(tokens / tokens_per_step)},
    )
    return Choice(
        slice=on,
        mesh=mesh.joined_sizes,
        batch_size=job.examples,
        microbatches=job.microbatches,
        remat=remat,
        precision=precision,
        optimizer=optimizer,
        job=job,
        memory={name: float(value[index]) for name, value in scores.memory.to_dict().items()},
        usable_bytes=float(scores.usable_bytes[index]),
        modelled_step_s=float(scores.step_time_s[index]),
        seconds_by_cause=scores.step.at(index),
        tokens_per_step=tokens_per_step,
        model_flops=subject.flops_per_token * tokens_per_step,
        usd_per_chip_hour=quote,
        region=region,
        preemption=market.preemption if market.tier == SPOT else None,
        save_s=float(costs.save_s[index]),
    ).corrected(1.0)
