"""The step time that an earlier `tpukit check` of the same plan predicted; nothing is compiled."""

from ..compiler.aot import load_compiled
from ..compiler.cache import CompileCache
from ..compiler.program.facts import ProgramFacts
from ..errors import TPUError
from ..hardware import Figure
from ..job import Plan


def predicted_step(plan: Plan | None) -> Figure:
    """Seconds of a step by the timeline of the last check of `plan`, or why there are none."""
    if plan is None:
        return Figure.missing("s", "training without a plan")
    if plan.slice is None:
        return Figure.missing("s", "the plan names no slice")
    cache = CompileCache.default()
    link = cache.load_json(f"job-{plan.key}")
    found = None if link is None else load_compiled(cache, link["key"], until="schedule")
    if link is None or found is None:
        return Figure.missing("s", f"not checked yet: tpukit check … --on {plan.slice}")
    compiled = found.seen_as(ProgramFacts.from_dict(link["facts"]), plan.target)
    if not compiled.fits:
        return Figure.missing("s", f"the check says that it does not fit on {plan.slice}")
    try:
        prediction = compiled.predict(
            tokens_per_step=plan.tokens_per_step,
            model_flops=plan.model_flops,
            compile_kernels=False,  # the check did; training does not wait for a compiler
        )
    except TPUError as error:
        return Figure.missing("s", str(error))
    source = f"timeline of an offline compile for {plan.slice}"
    return Figure(prediction.step_time_s, "s", "model", source)
