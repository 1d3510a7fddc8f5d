"""Memory verdicts against published runs: what did not fit must not fit, what ran must fit.

Each point is compiled as it was published, read as rows with a step time are (published_rows.py):
its remat, its loss, its optimizer, the format of its weights and gradients, its recipe's flags.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from claims import Claim, report
from published_loss import loss_of_maxtext
from published_recipes import read_options
from published_rows import read_attention, read_loss_chunks, read_model, read_optimizer

from tpukit import Slice, Workload, configure_tpu_environment
from tpukit.compiler import compile_for

DATA = Path(__file__).parent / "data" / "published_results.json"
OFFLOAD = "offload=decoder_layer_input,qkv_proj,out_proj"
TARGET = Slice.parse("v6e-8")
MESH = {"fsdp": 8}

# What each point keeps; one whose model no preset has is missing.
REMATS = {
    "mem-ll8-jax-v6e8-bs7": "full",
    "mem-ll8-jax-v6e8-bs4-saveqkv": "save=qkv_proj",
    "mem-q8-mt-v6e8-2k-bs24": OFFLOAD,
    "mem-q8-jax-v6e8-8k-bs3-saveattn": "save=qkv_proj,context",
    "tri-llama3.1-8b-v6e-8": OFFLOAD,
}
# The Trillium recipe of llama3.1-8b ran on v6e-8; MaxText's own program needs 22.61 GiB.
RECIPE: dict[str, Any] = {
    "id": "tri-llama3.1-8b-v6e-8",
    "model": "llama3.1-8b",
    "seq": 8192,
    "per_device": 3,
    "used_gib": 22.61,
    "source": "/maxtext/",
}


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=DATA)
    points = json.loads(parser.parse_args().results.read_text())["memory_points"]
    cases = [one for one in points if one["id"] in REMATS]
    for point in points:
        if point["id"] not in REMATS:
            print(f"left out {point['id']}: no preset has its architecture")
    agreed, ratios = 0, list[float]()
    for point in [*cases, RECIPE]:
        ran = point is RECIPE
        fits, gib = needs(point)
        agreed += fits == ran
        used = point.get("used_gib") or point.get("cap_gib", 0) + point.get("over_gib", 0)
        ratios.append(gib / used)
        said = f"{'ran' if ran else 'did not fit'} ({used:.2f} GiB)"
        verdict = f"{'fits' if fits else 'does not fit'} ({gib:.2f} GiB, {gib / used:.2f}x)"
        print(f"{point['id']:<34} published {said:<26} ours {verdict}", flush=True)
    report(
        Claim("verdicts that agree", agreed / (len(cases) + 1), "", at_least=1.0),
        Claim("most HBM beside the published program", max(ratios), "x", at_most=1.1),
    )


def needs(point: dict[str, Any]) -> tuple[bool, float]:
    """Whether our program of a point fits, and how much HBM it needs."""
    of_maxtext = "/maxtext/" in point["source"]
    row: dict[str, Any] = {
        **point,
        "framework": "MaxText" if of_maxtext else "",
        "remat": point.get("remat") or "",
        "dims": {},
        "dtype": "",
        "optimizer": "adamw",
        "attention": "splash, fused backward",
        "notes": "",
    }
    work = Workload(
        read_model(row),
        batch_size=8 * int(point["per_device"]),
        sequence_length=int(point["seq"]),
        remat=REMATS[point["id"]],
        optimizer=read_optimizer(row),
        attention=read_attention(row, MESH),
        loss=loss_of_maxtext if of_maxtext else None,
        loss_chunks=read_loss_chunks(row),
    )
    compiled = compile_for(
        work, TARGET, mesh=MESH, until="memory", options=read_options(row, TARGET)
    )
    return compiled.fits, compiled.memory.total_bytes / 2**30


if __name__ == "__main__":
    main()
