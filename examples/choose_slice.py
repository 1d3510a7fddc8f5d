"""Plan a training run: slices, meshes and batches by money and days, and the job to train."""

import tempfile
from pathlib import Path

import tpukit

found = tpukit.plan(
    "llama3.1-8b",
    tokens="100e9",
    deadline="30d",
    on="v6e-64,v6e-128,v6e-256,v5p-128",
    verify=0,  # by arithmetic alone; verify=3 lets the TPU compiler confirm the best three
)
for choice in found.choices:
    print(
        f"{choice.slice!s:10} {choice.mesh} batch {choice.batch_size}: "
        f"{choice.days:.1f} days, ${choice.usd.require('a plan'):,.0f} ({choice.usd.origin})"
    )
best = found.best
assert best is not None
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "job.yaml"
    found.to_yaml(path)
    print(path.read_text())
    # The job's mesh says "the rest", so that the same file can be asked about another slice.
    print(tpukit.Job.from_yaml(path, on="v6e-32").mesh_sizes)
