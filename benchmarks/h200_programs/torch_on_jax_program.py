"""The same torch module through `TPUBackend.train_step`: torch's code, our compiler and kernels."""

import json
import sys
import time

import jax
import numpy as np
import torch
from initial_weights import weights_of
from shapes import SHAPES
from torch_module import Model, start_from

from tpukit.torch import KernelPyTorchConfig, TPUBackend


def main(name, tokens_path, warm):
    s = SHAPES[name]
    torch.manual_seed(0)
    model = Model(s)
    start_from(model, weights_of(name))
    backend = TPUBackend(KernelPyTorchConfig(gradient_checkpointing=False))
    model = backend.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    step = backend.train_step(model, None, optimizer)
    data = np.load(tokens_path).astype(np.int32)
    losses = []
    for number, rows in enumerate(data):
        if number == warm:
            backend.synchronize()
            began = time.perf_counter()
        batch = torch.from_numpy(rows)
        losses.append(step((batch[:, :-1].contiguous(), batch[:, 1:].contiguous())))
    backend.synchronize()
    step_s = (time.perf_counter() - began) / (len(data) - warm)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    report = {"step_s": step_s, "peak_bytes": peak, "losses": [x.item() for x in losses]}
    print("REPORT " + json.dumps(report))


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
