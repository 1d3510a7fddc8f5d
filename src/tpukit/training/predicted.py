"""The step time that an earlier `tpukit check` of the same job predicted; nothing is compiled."""

from ..checker.compiling import known_compile
from ..errors import TPUError
from ..hardware import Figure
from ..job.job import Job


def predicted_step(job: Job) -> Figure:
    """Return the seconds of a step by the last check of the same job, or why there are none."""
    if job.on is None:
        return Figure.missing("s", "the job names no slice")
    if not isinstance(job.model, str) or job.parts:
        return Figure.missing("s", "the model was given in Python, so no check can be found again")
    compiled = known_compile(job)
    if compiled is None:
        return Figure.missing("s", f"not checked yet: tpukit check … --on {job.on}")
    if not compiled.fits:
        return Figure.missing("s", f"the check says that it does not fit on {job.on}")
    try:
        prediction = compiled.predict(
            tokens_per_step=job.tokens_per_step,
            model_flops=job.model_flops,
            compile_kernels=False,  # the check did; training does not wait for a compiler
        )
    except TPUError as error:
        return Figure.missing("s", str(error))
    source = f"timeline of an offline compile for {job.on}"
    return Figure(prediction.step_time_s, "s", "model", source)
