"""Limits of a plan that nobody stated: tokens in a step, and chips where only a budget is given.

More tokens in a step, or more chips, always make the arithmetic faster. Published work on critical
batch sizes and the slices that zones list say where that stops being a plan.
"""

from functools import cache

import numpy as np

from ...hardware import list_slices
from ..cost.model_shape import ModelShape
from .candidates import GENERATIONS

# Kaplan et al. 2020 (arXiv:2001.08361): the loss of a model trained on so many tokens, equation
# 1.5 with table 2, and the critical batch size at that loss, figure 10.
KAPLAN = "Kaplan et al. 2020, arXiv:2001.08361"
_PARAMETERS_C, _PARAMETERS_POWER = 6.4e13, 0.076
_TOKENS_C, _TOKENS_POWER = 1.8e13, 0.103
_BATCH_TOKENS, _LOSS_POWER = 2.1e8, 4.8
# Brown et al. 2020 (arXiv:2005.14165), table 2.1: the steps of GPT-3's smallest models.
LEAST_BATCH_TOKENS = 2**19
# Llama 3 405B ended with steps of 16 M tokens (arXiv:2407.21783).
LARGEST_BATCH_TOKENS = 16 * 2**20
# Google Cloud documentation, /tpu/docs/plan-tpus: capacity is reserved for a run for 90 days at
# most; for longer there are contracts of a year.
LONGEST_RESERVATION_DAYS = 90.0


def critical_batch_tokens(shape: ModelShape, tokens: float) -> float:
    """Return the tokens in a step beyond which larger steps hardly save any of them.

    Args:
        shape: The model; its embeddings do not count, as in the published fit.
        tokens: Tokens to train on.
    """
    parameters = shape.parameters - shape.outside_parameters
    of_size = (_PARAMETERS_C / parameters) ** (_PARAMETERS_POWER / _TOKENS_POWER)
    loss = (of_size + _TOKENS_C / tokens) ** _TOKENS_POWER
    critical = _BATCH_TOKENS / loss**_LOSS_POWER
    return float(np.clip(critical, LEAST_BATCH_TOKENS, LARGEST_BATCH_TOKENS))


@cache
def pod_chips() -> int:
    """Return the chips of the largest slice that zones list of every generation (v5e, v6e)."""
    return min(max(one.chips for one in list_slices(name)) for name in GENERATIONS)


def usual_chips(chips: np.ndarray, days: np.ndarray) -> int:
    """Return the most chips for a run with a budget and no deadline.

    That is a pod, and twice as many as often as nothing on fewer chips ends while capacity can be
    reserved.

    Args:
        chips: Of each candidate that is affordable.
        days: The time that each takes.
    """
    most = pod_chips()
    while (chips > most).any() and not (days[chips <= most] <= LONGEST_RESERVATION_DAYS).any():
        most *= 2
    return most
