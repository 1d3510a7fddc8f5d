"""Run directories as `tpukit train` and its monitors leave them, with numbers that are known."""

import json
import math
import random
import time
from pathlib import Path

from tpukit.observe.readings import Reading, Sample

HBM = 31.25 * 2**30
STARTING_S, RESTART_S = 20.0, 6.0


def write_lines(path: Path, records) -> None:
    """Append JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def metric(step, *, began, step_time_s=0.5, seed=0):
    """One line of metrics.jsonl, the same for the same step."""
    noise = random.Random(f"{seed} {step}").gauss(0, 1)
    took = step_time_s * (1 + 0.02 * noise)
    return {
        "step": step,
        "loss": 1.8 + 9.0 / math.sqrt(step + 1) + 0.02 * noise,
        "learning_rate": 3e-4,
        "step_time_s": took,
        "input_stall_s": 0.002,
        "tokens_per_s_per_chip": 4096 / took,
        "mfu": 0.46 / (1 + 0.02 * noise),
        "time": began + step * step_time_s,
    }


def make_run(
    folder: Path,
    *,
    steps=400,
    total_steps=1000,
    slice_name="v6e-16",
    chips=16,
    hosts=4,
    step_time_s=0.5,
    learning_rate=3e-4,
    ended=None,
    began=None,
    slow_chip=(2, 1),
    seed=0,
):
    """Make a run of two attempts with checkpoints, a preemption, a recompile and chip readings."""
    began = time.time() - steps * step_time_s - 30 if began is None else began
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "steps": max(steps, total_steps),
        "learning_rate": learning_rate,
        "optimizer": "adamw",
    }
    document = {
        "format": 1,
        "identity": {"model": "llama3.2-1b", "batch_size": 64, "sequence_length": 4096},
        "recipe": {"learning_rate": learning_rate, "seed": seed},
        "settings": settings,
    }
    (folder / "run.json").write_text(json.dumps(document))
    first = began + STARTING_S

    def origin(step):
        """When step 0 would have been: the second half of the steps comes after a restart."""
        return first if step <= steps // 2 else first + RESTART_S

    write_lines(
        folder / "metrics.jsonl",
        (
            metric(step, began=origin(step), step_time_s=step_time_s, seed=seed)
            for step in range(1, steps + 1)
        ),
    )
    write_lines(
        folder / "events.jsonl",
        _events(began, steps, max(steps, total_steps), step_time_s, slice_name, chips, ended),
    )
    for process in range(hosts):
        host = folder / "hosts" / str(process)
        write_lines(
            host / "readings.jsonl",
            (reading(first + at, process, chips // hosts, slow_chip).to_dict() for at in range(60)),
        )
        write_lines(
            host / "steps.jsonl",
            (host_step(step, origin(step), process, step_time_s) for step in range(1, steps + 1)),
        )
    return folder


def host_step(step, began, process, step_time_s=0.5):
    """One line of a host's steps.jsonl."""
    return {
        "time": began + step * step_time_s,
        "step": step,
        "step_time_s": step_time_s,
        "input_s": 0.3 if process == 2 else 0.004,
        "input_stall_s": 0.1 if process == 2 else 0.002,
        "checkpoint_s": 0.0,
        "dispatch_s": 0.003,
        "host": f"host-{process}",
    }


def reading(at, process, chips, slow_chip=(2, 1)):
    """What a monitor says of one host: one chip of the run is idle much of the time."""
    samples = []
    for chip in range(chips):
        wave = math.sin(at / 7 + chip)
        duty = 0.41 if (process, chip) == slow_chip else 0.96 + 0.02 * wave
        samples += [
            Sample("duty_cycle", duty, chip),
            Sample("tensorcore_utilization", 0.48 + 0.01 * wave, chip),
            Sample("memory_used", HBM * (0.80 + 0.01 * chip + 0.003 * wave), chip),
            Sample("memory_total", HBM, chip),
        ]
    missing = {"power_watts": "TPUs publish none"}
    return Reading(at, f"host-{process}", process, "libtpu grpc", tuple(samples), missing)


def _events(began, steps, total_steps, step_time_s, slice_name, chips, ended):
    first = began + STARTING_S
    about = {
        "total_steps": total_steps,
        "device_kind": "TPU v6 lite",
        "devices": chips,
        "chips": chips,
        "slice": slice_name,
        "mfu_convention": "causal attention counted once, of bf16 peak",
        "flops_per_step": 1e15,
        "predicted_step_s": 0.47,
    }
    half = steps // 2
    yield {"time": began, "event": "attempt started", "attempt": 0, "step": 0, **about}
    yield {"time": began + 4, "event": "spent", "what": "initialise", "seconds": 4.0}
    yield {"time": first, "event": "spent", "what": "compile", "seconds": 16.0}
    yield from _on_the_way(first, 0, half, steps, step_time_s, STARTING_S)
    at = _reached(first, half, step_time_s, STARTING_S)
    yield {**at, "event": "preempted", "signal": "SIGTERM"}
    yield {**at, "event": "attempt ended", "reason": "preempted"}
    again = first + half * step_time_s + RESTART_S
    yield {"time": again, "event": "attempt started", "attempt": 1, "step": half, **about}
    yield {"time": again + 3, "event": "spent", "what": "restore", "seconds": 3.0}
    yield {
        "time": again + 9,
        "event": "recompiled",
        "step": half + 1,
        "change": "inputs was int32[64,4096], is int32[32,4096]",
    }
    yield from _on_the_way(again, half, steps, steps, step_time_s, RESTART_S)
    if ended:
        last = _reached(again, steps - half, step_time_s, RESTART_S)
        yield {**last, "step": steps, "event": "attempt ended", "reason": ended}


def _on_the_way(began, begin, end, steps, step_time_s, before_s):
    """How far an attempt was: said once a minute, and at each of eight saves of the run."""
    minute, save = max(1, int(60 / step_time_s)), max(1, steps // 8)
    for step in range(begin + 1, end):
        if step % minute == 0 or step % save == 0:
            kind = "saved" if step % save == 0 else "progress"
            said = _reached(began, step - begin, step_time_s, before_s)
            yield {**said, "step": step, "event": kind}


def _reached(began, step, step_time_s, before_s):
    productive = step * step_time_s
    return {
        "time": began + productive,
        "step": step,
        "wall_s": productive + before_s,
        "productive_s": productive * 0.97,
    }
