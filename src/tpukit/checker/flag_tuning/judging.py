"""What the compiler's answer to a set of options is worth, and whether it beats another."""

from collections.abc import Sequence
from dataclasses import replace

from ...compiler.compiled import CompiledStep
from ...errors import TPUError
from .trials import FlagTrial

# Predicted times nearer than this count as equal: no search can tell them apart.
SMALLEST_GAIN = 0.005
SMALLEST_SAVING = 0.01  # of memory, where the time is equal


def judge(answer: CompiledStep | TPUError, trial: FlagTrial) -> FlagTrial:
    """A trial with what the compiler said of it, and the step predicted from that."""
    if isinstance(answer, TPUError):
        return replace(trial, refusal=str(answer))
    try:
        found = replace(trial, fits=answer.fits, total_bytes=answer.memory.total_bytes)
        if not answer.fits:
            return replace(found, no_prediction="a program that does not fit takes no step")
        prediction = answer.predict()
    except TPUError as error:
        return replace(trial, refusal=str(error))
    return replace(found, step_time_s=prediction.step_time_s, caveats=prediction.caveats)


def in_one_step(parts: Sequence[FlagTrial], calls: Sequence[int]) -> FlagTrial:
    """Return the trial of a whole step: times add up, and the largest program has to fit."""
    if len(parts) == 1 and calls[0] == 1:
        return parts[0]
    refused = next((one for one in parts if one.refusal), None)
    if refused is not None:
        return refused
    times = [
        None if one.step_time_s is None else one.step_time_s * count
        for one, count in zip(parts, calls, strict=True)
    ]
    known = [time for time in times if time is not None]
    return replace(
        parts[0],
        fits=all(one.fits for one in parts),
        step_time_s=sum(known) if len(known) == len(times) else None,
        no_prediction=next((one.no_prediction for one in parts if one.no_prediction), ""),
        total_bytes=max(one.total_bytes or 0 for one in parts),
        caveats=tuple(dict.fromkeys(caveat for one in parts for caveat in one.caveats)),
    )


def is_better(trial: FlagTrial, than: FlagTrial) -> bool:
    """Whether a trial is worth keeping: it fits, is faster, or is smaller at the same time."""
    # What the prediction cannot see counts as nothing there, which would look like a gain.
    if trial.refusal or len(trial.caveats) > len(than.caveats):
        return False
    if bool(trial.fits) != bool(than.fits):
        return bool(trial.fits)
    smaller = (trial.total_bytes or 0) < (1 - SMALLEST_SAVING) * (than.total_bytes or 0)
    if trial.step_time_s is None or than.step_time_s is None:
        return smaller
    if trial.step_time_s < (1 - SMALLEST_GAIN) * than.step_time_s:
        return True
    return smaller and trial.step_time_s <= than.step_time_s
