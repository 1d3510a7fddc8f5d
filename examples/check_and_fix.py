"""Ask the TPU compiler whether a job fits, and what would make it fit, on a machine with no TPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import tpukit

# 512 examples of 128 tokens on one chip, nothing recomputed: more than a v5e holds.
job = tpukit.Job(
    model={"preset": "tiny", "d_model": 1024, "d_ff": 4096, "n_layers": 8},
    on="v5e-1",
    batch_size=512,
    sequence_length=128,
    remat="none",
)
result = tpukit.check(job, memory_only=True)
print(f"as it is: {result.memory.verdict}")
for fix in result.fixes.fixes[:3]:
    print(f"proposed: {fix.text} ({fix.cost})")

smaller = tpukit.check(job.replace(result.fixes.fixes[0].changes), memory_only=True)
print(f"with the first: {smaller.memory.verdict}")
