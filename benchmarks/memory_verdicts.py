"""Memory verdicts against published runs: what did not fit must not fit, what ran must fit.

The published programs keep all logits, so ours are compiled with the whole loss too; the saving
of the chunked loss is printed beside it.
"""

import argparse
import json
from pathlib import Path

from claims import Claim, report
from published_rows import NO_COLLECTIVE_MATMUL

from tpukit import Workload, configure_tpu_environment
from tpukit.compiler import compile_for

DATA = Path(__file__).parent / "data" / "published_results.json"
OPTIONS = {**NO_COLLECTIVE_MATMUL, "xla_tpu_scoped_vmem_limit_kib": 98304}
OFFLOAD = "offload=decoder_layer_input,qkv_proj,out_proj"
# How each published point is written here; a point that is missing cannot be expressed.
REMAT = {
    "mem-ll8-jax-v6e8-bs7": "full",
    "mem-ll8-jax-v6e8-bs4-saveqkv": "save=qkv_proj",
    "mem-q8-mt-v6e8-2k-bs24": OFFLOAD,
    "mem-q8-jax-v6e8-8k-bs3-saveattn": "save=qkv_proj,context",
}
# The Trillium recipe of llama3.1-8b ran on v6e-8; MaxText's own program needs 22.61 GiB.
RECIPE = {"id": "tri-llama3.1-8b-v6e-8", "model": "llama3.1-8b", "seq": 8192, "per_device": 3}


def main() -> None:
    configure_tpu_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=DATA)
    points = json.loads(parser.parse_args().results.read_text())["memory_points"]
    cases = [(point, REMAT[point["id"]], False) for point in points if point["id"] in REMAT]
    for point in points:
        if point["id"] not in REMAT:
            print(f"left out {point['id']}: no preset has its architecture")
    agreed = 0
    for point, remat, ran in [*cases, (RECIPE, OFFLOAD, True)]:
        whole, chunked = (needs(point, remat, chunks) for chunks in (None, "auto"))
        agreed += whole[0] == ran
        used = point.get("used_gib") or point.get("cap_gib", 0) + point.get("over_gib", 0)
        said = "ran" if ran else f"did not fit ({used:.2f} GiB)"
        verdict = "fits" if whole[0] else "does not fit"
        print(
            f"{point['id']:<34} published {said:<26} ours {verdict} ({whole[1]:.2f} GiB; "
            f"{chunked[1]:.2f} with the chunked loss)"
        )
    report(Claim("verdicts that agree", agreed / (len(cases) + 1), "", at_least=1.0))


def needs(point: dict, remat: str, chunks: str | None) -> tuple[bool, float]:
    """Whether our program of a point fits, and how much HBM it needs."""
    work = Workload(
        point["model"],
        batch_size=8 * int(point["per_device"]),
        sequence_length=int(point["seq"]),
        remat=remat,
        loss_chunks=chunks,
    )
    compiled = compile_for(work, "v6e-8", mesh={"fsdp": 8}, until="memory", options=OPTIONS)
    return compiled.fits, compiled.memory.total_bytes / 2**30


if __name__ == "__main__":
    main()
