"""The torch side: torch.compile, SDPA, fused AdamW, float32 masters under bfloat16 autocast."""

import json
import os
import sys
import time

# jax makes the weights in this process; what it allocated for that goes back to the device.
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"

import numpy as np
import torch
from initial_weights import weights_of
from shapes import SHAPES
from torch_module import Model, start_from


def main(name, tokens_path, warm):
    s = SHAPES[name]
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Model(s)
    start_from(model, weights_of(name))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    step_model = torch.compile(model)
    data = np.load(tokens_path)
    losses = []
    for step, rows in enumerate(data):
        if step == warm:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
        batch = torch.from_numpy(rows.astype(np.int64)).pin_memory().to("cuda", non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = step_model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - began) / (len(data) - warm)
    peak = torch.cuda.max_memory_allocated()
    report = {"step_s": step_s, "peak_bytes": peak, "losses": [float(x) for x in losses]}
    print("REPORT " + json.dumps(report))


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
