"""How far the planner's arithmetic is from published steps, with no compile.

One rule of it, that gathers of fsdp are not hidden, was chosen by looking at these rows; everything
else comes from the catalog and from single ops.
"""

import statistics
from pathlib import Path

import numpy as np
from claims import Claim, report
from published_rows import NotExpressible, load_rows, published_step_s, read_parallelism, read_remat

from tpukit.errors import SliceError
from tpukit.hardware import Slice
from tpukit.models.presets import get_preset, list_presets
from tpukit.planner.candidates import REMATS, Candidates, Layout
from tpukit.planner.model_shape import shape_of
from tpukit.planner.scoring import score
from tpukit.planner.torus import place_axes

RESULTS = Path(__file__).parent / "data" / "published_results.json"


def modelled_step_s(row: dict) -> tuple[float, float]:
    """The step of a published row by the model, and as measured.

    Raises:
        NotExpressible: The model knows no such model, mesh or remat.
    """
    if row["model"] not in list_presets():
        raise NotExpressible("no such preset")
    hardware, batch = row["hardware"], row["batch"]
    shape = hardware["topology"].split(" x ")[-1]
    target = Slice.of(hardware["gen"], topology=shape, num_slices=hardware["slices"])
    mesh, across = read_parallelism(row["parallelism"], target)
    sizes = dict(mesh)
    for axis, cut in zip(mesh, across or (1,) * len(mesh), strict=True):
        sizes[axis] //= cut
    remat = read_remat(row["remat"])
    if remat not in REMATS:  # which tensors are kept is finer than the model looks
        remat = "offload" if "offload" in remat else "full"
    quantized = row["quantization"] or ""
    precision = 1 if "int8" in quantized else 2 if quantized else 0
    length, examples = int(batch["seq_len"]), int(batch["global_seqs"])
    ways = sizes.get("data", 1) * sizes.get("fsdp", 1) * target.num_slices
    values = (0, examples / ways, 1, REMATS.index(remat), precision, 0)
    layout = Layout(target, sizes, place_axes(target, sizes))
    candidates = Candidates((layout,), *(np.asarray([value]) for value in values))
    config = get_preset(row["model"])
    found = score(
        shape_of(config),
        candidates,
        sequence_length=length,
        attention_flops_per_token=config.flops_per_token(length).attention,
    )
    return float(found.step_time_s[0]), published_step_s(row, examples * length, target)


def main() -> None:
    """Print every row, then the errors."""
    errors = []
    for row in load_rows(RESULTS):
        try:
            modelled, measured = modelled_step_s(row)
        except (NotExpressible, SliceError):
            continue
        error = modelled / measured - 1
        errors.append(abs(error))
        print(f"{row['id']:<40} measured {measured:8.2f} s  model {modelled:8.2f} s  {error:+.1%}")
    report(
        Claim("published rows", len(errors), ""),
        Claim("median error", statistics.median(errors) * 100, "%", at_most=15),
        Claim("mean error", statistics.mean(errors) * 100, "%", at_most=15),
    )


if __name__ == "__main__":
    main()
