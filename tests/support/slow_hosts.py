"""Hosts that train together, with noise, one of them slow at something: what each would record."""

import random

from tpukit.observe.readings import Reading, Sample
from tpukit.observe.stragglers import HostRecords
from tpukit.records.host_steps import HostStep

STEP_S = 0.5


class Cluster:
    """Makes records of hosts whose steps end together, unless `synchronous` is False.

    Args:
        hosts: How many.
        steps: That each records.
        noise: Standard deviation of everything, as a share of itself.
        slow: {process: (cause, seconds or score)}.
    """

    def __init__(self, hosts, steps=200, *, noise=0.2, seed=0, slow=None, synchronous=True):
        self.random, self.noise, self.slow = random.Random(seed), noise, slow or {}
        self.synchronous = synchronous
        self.steps = {process: [] for process in range(hosts)}
        self.readings = {process: [] for process in range(hosts)}
        for number in range(1, steps + 1):
            self._step(number)
        for second in range(60):
            self._read(second)

    def records(self):
        return [
            HostRecords(process, self.steps[process], self.readings[process])
            for process in self.steps
        ]

    def about(self, value):
        return value * self.random.lognormvariate(0, self.noise)

    def extra(self, process, cause):
        found, amount = self.slow.get(process, ("", 0.0))
        return amount if found == cause else 0.0

    def _step(self, number):
        own = {}
        for process in self.steps:
            stall = self.about(0.02) + self.extra(process, "input")
            compute = self.about(STEP_S) if not self.synchronous else STEP_S
            compute += self.extra(process, "chip")
            dispatch = self.about(0.01) + self.extra(process, "host")
            saved = self.about(0.3) + self.extra(process, "checkpoint") if number % 10 == 0 else 0.0
            own[process] = stall, compute, dispatch, saved
        longest = max(stall + compute for stall, compute, _, _ in own.values())
        for process, (stall, compute, dispatch, saved) in own.items():
            took = (longest if self.synchronous else stall + compute) * self.random.uniform(1, 1.01)
            self.steps[process].append(
                HostStep(
                    1000.0 + number,
                    number,
                    took,
                    input_s=stall * 1.1,
                    input_stall_s=stall,
                    checkpoint_s=saved,
                    dispatch_s=dispatch,
                    host=f"host-{process}",
                )
            )

    def _read(self, second):
        for process in self.readings:
            samples = []
            for chip in range(4):
                slow_chip = chip == 2
                throttled = self.extra(process, "throttle") if slow_chip else 0.0
                samples.append(Sample("throttle_score", throttled, chip))
                health = self.extra(process, "link") if slow_chip else 0.0
                if self.random.random() < 0.1:
                    health = max(health, float(self.random.randint(1, 5)))  # it passes
                samples.append(Sample("ici_link_health", health, chip, {"link": "x"}))
                duty = min(1.0, self.about(0.9)) - self.extra(process, "idle")
                samples.append(Sample("duty_cycle", duty, chip))
                used = self.about(0.4) - self.extra(process, "weak")
                samples.append(Sample("tensorcore_utilization", used, chip))
            latency = self.about(0.002) + self.extra(process, "dcn")
            for quantile, factor in (("0.5", 1), ("0.999", 20)):
                label = {"quantile": quantile}
                samples.append(Sample("dcn_latency_seconds", latency * factor, labels=label))
            waits = self.about(0.1) - self.extra(process, "last")
            samples.append(Sample("collective_latency_seconds", waits, labels={"quantile": "0.5"}))
            reading = Reading(
                1000.0 + second, f"host-{process}", process, "libtpu grpc", tuple(samples)
            )
            self.readings[process].append(reading)
