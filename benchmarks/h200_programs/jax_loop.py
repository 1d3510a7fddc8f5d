"""A bare loop over a jax step, timed from the first batch after those that warm it up."""

import json
import time

import jax


def run_and_report(step, state, batches, warm):
    """Take a step for each batch and print what the comparison reads.

    Args:
        step: (state, batch) -> (state, loss).
        state: Donated to the first step.
        batches: On the host or the device.
        warm: Steps that are not timed.
    """
    losses = []
    for number, batch in enumerate(batches):
        if number == warm:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state, loss = step(state, batch)
        losses.append(loss)
    jax.block_until_ready(state)
    step_s = (time.perf_counter() - began) / (len(losses) - warm)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    report = {"step_s": step_s, "peak_bytes": peak, "losses": [float(x) for x in losses]}
    print("REPORT " + json.dumps(report))
