"""Write a transformer as Hugging Face weights, read it back into shards, compare to the bit."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import tempfile

import jax
import numpy as np

from tpukit.models import export_huggingface, import_huggingface
from tpukit.parallel import create_mesh
from tpukit.step import Workload

work = Workload("tiny", batch_size=8, sequence_length=32, strategy="fsdp+megatron")
params = work.init(jax.random.key(0)).params
mesh = create_mesh(mesh_shape=(4, 2), axis_names=("fsdp", "model"))
with tempfile.TemporaryDirectory() as folder:
    for file in export_huggingface(params, work.config, folder):
        print(f"wrote {file.name}, {file.stat().st_size:,} bytes")
    model = import_huggingface(folder, shardings=work.layout(mesh).shardings)
jax.tree.map(np.testing.assert_array_equal, params, model.params)
kernel = model.params["layers"]["self_attention"]["q_proj"]["kernel"]
print(f"read back equal; q_proj is {kernel.shape}, split as {kernel.sharding.spec}")
