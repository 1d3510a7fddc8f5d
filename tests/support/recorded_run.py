"""A run directory as a trainer and monitors on some hosts would have left it, a second ago."""

import json
import time

from tpukit.observe.readings import Reading, Sample
from tpukit.records.events import EventsFile
from tpukit.records.host_steps import steps_file

CONVENTION = "model FLOPs (causal attention counted once, no recomputation) over bf16 peak"


def chips_reading(at, host, process, *, duty=0.93, chips=4):
    """Return what libtpu would have said."""
    samples = []
    for chip in range(chips):
        samples += [
            Sample("duty_cycle", duty, chip),
            Sample("tensorcore_utilization", 0.42, chip),
            Sample("memory_used", 24 * 2**30, chip),
            Sample("memory_total", 32 * 2**30, chip),
        ]
    samples.append(Sample("dcn_latency_seconds", 0.002, labels={"quantile": "0.5"}))
    samples.append(Sample("dcn_latency_seconds", 9.0, labels={"quantile": "0.999"}))
    missing = {"memory_bandwidth_utilization": "this libtpu does not offer it"}
    return Reading(at, host, process, "libtpu grpc", tuple(samples), missing)


def write_run(folder, hosts=2, *, slow=None, now=None, steps=300, name="host-{}"):
    """Write the run; process `slow` waits for input and its chips for it."""
    now = time.time() - 1 if now is None else now
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text('{"format": 1}')
    began = now - steps - 100
    events = EventsFile(folder / "events.jsonl")
    about = {"total_steps": 1000, "device_kind": "TPU v6 lite", "devices": 4 * hosts}
    about |= {"chips": 4 * hosts, "slice": f"v6e-{4 * hosts}", "mfu_convention": CONVENTION}
    events.write("attempt started", at=began, attempt=0, step=0, predicted_step_s=0.8, **about)
    events.write("spent", at=began + 90, what="compile", seconds=90.0)
    events.write("saved", at=now - 60, step=steps - 60, wall_s=steps + 40, productive_s=200.0)
    events.write("progress", at=now, step=steps, wall_s=steps + 100, productive_s=260.0)
    events.close()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "loss": 10 / step, "step_time_s": 1.0, "mfu": 0.4}
            record |= {"tokens_per_s_per_chip": 12_000.0, "time": now - steps + step}
            file.write(json.dumps(record) + "\n")
    for process in range(hosts):
        stall = 0.3 if process == slow else 0.001
        path = steps_file(folder, process)
        path.parent.mkdir(parents=True)
        with path.open("w") as file:
            for step in range(1, steps + 1):
                line = {"time": now - steps + step, "step": step, "step_time_s": 1.0}
                line |= {"input_s": stall, "input_stall_s": stall, "host": name.format(process)}
                file.write(json.dumps(line) + "\n")
        with (path.parent / "readings.jsonl").open("w") as file:
            for second in range(20):
                duty = 0.55 if process == slow else 0.93 + 0.001 * (process % 5)
                reading = chips_reading(now - 20 + second, name.format(process), process, duty=duty)
                file.write(json.dumps(reading.to_dict()) + "\n")
    return folder
