"""Pods that meet at every step, in eight bits, or seldom (DiLoCo): the loss of each, side by side.

Four pods of two virtual devices train the preset `tiny` on tokens of a random Markov chain, whose
entropy no model can go below. All see the same batches and the same number of steps; the loss is
that of held-out tokens with what the pods have in common at the end. What a pod sends to others in
a step is beside it. Meetings take the outer step of DiLoCo's paper (Nesterov's momentum), or just
the mean of the pods.

Usage: python benchmarks/pods_diloco.py [--steps 300] [--meet-every 10 50]
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from claims import Claim, report

from tpukit.models.adapters import Variables
from tpukit.pods import MultiPodManager, PodConfig
from tpukit.step.parts import StepSettings
from tpukit.step.update import loss_and_gradients
from tpukit.step.workload import Workload

PODS, BATCH, LENGTH = 4, 8, 32
ZONES = ("us-central1-a", "us-central1-b", "europe-west4-a", "asia-east1-c")
RATE = 3e-3


class Tokens:
    """Sequences of a Markov chain with a few likely successors for each token."""

    def __init__(self, vocabulary, seed=0):
        rng = np.random.default_rng(seed)
        weights = rng.gamma(0.1, size=(vocabulary, vocabulary)) + 1e-6
        self._chances = weights / weights.sum(1, keepdims=True)
        steady = np.full(vocabulary, 1 / vocabulary)
        for _ in range(200):
            steady = steady @ self._chances
        self.entropy = -(steady[:, None] * self._chances * np.log(self._chances)).sum()
        self._reach = self._chances.cumsum(1)

    def batch(self, *seed):
        rng = np.random.default_rng(seed)
        rows = np.empty((BATCH, LENGTH + 1), np.int32)
        rows[:, 0] = rng.integers(len(self._reach), size=BATCH)
        for at in range(LENGTH):
            drawn = rng.random((BATCH, 1))
            rows[:, at + 1] = (
                (self._reach[rows[:, at]] < drawn).sum(1).clip(max=len(self._reach) - 1)
            )
        return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--meet-every", type=int, nargs="*", default=[10, 50])
    options = options.parse_args()
    work = Workload("tiny", batch_size=BATCH, sequence_length=LENGTH)
    tokens = Tokens(work.config.vocab_size)
    start = work.adapter.init(jax.random.key(0))
    settings = StepSettings(
        adapter=work.adapter,
        loss=None,
        execution=work.execution,
        microbatches=1,
        pipeline_schedule=work.pipeline_schedule,
        strategy=work.strategy,
        grad_norm=False,
        mesh=None,
    )

    @jax.jit
    def learn(params, batch):
        variables = Variables(params, start.model_state)
        found = loss_and_gradients(settings, variables, batch, jax.random.key(0))
        return found.loss, found.gradients

    def train(manager):
        configs = [PodConfig(tpu_type="v6e-8", zones=(zone,)) for zone in ZONES]
        pods = manager.with_optimizer(optax.adam(RATE)).with_pods(configs).build()
        pods.distribute_model(start.params)
        sent = 0.0
        for step in range(options.steps):
            own = jax.device_get(pods.own_parameters)
            gradients = [
                learn(jax.tree.map(lambda leaf, pod=pod: leaf[pod], own), tokens.batch(step, pod))[
                    1
                ]
                for pod in range(PODS)
            ]
            result = pods.step_synchronized(jax.device_get(gradients)).result()
            met = manager.strategy != "local_steps" or (step + 1) % manager.local_steps == 0
            sent += result.sent.value if met else 0.0
        params = jax.device_get(pods.parameters)
        losses = [float(learn(params, tokens.batch(10**6, n))[0]) for n in range(32)]
        return float(np.mean(losses)), sent / options.steps

    runs = {
        "every step": MultiPodManager(),
        "every step, 8 bits": MultiPodManager().with_compression(),
        **{
            f"every {every} steps, {words}": MultiPodManager().with_local_steps(every, outer=outer)
            for every in options.meet_every
            for words, outer in (("momentum", None), ("the mean", optax.sgd(1.0)))
        },
    }
    found = {name: train(manager) for name, manager in runs.items()}
    synchronous, _ = found["every step"]
    print(f"{options.steps} steps of {PODS} pods; entropy of the data {tokens.entropy:.4f}")
    for name, (loss, sent) in found.items():
        report(
            Claim(f"{name}: held-out loss", loss, "nats"),
            Claim(f"{name}: over the synchronous one", loss - synchronous, "nats"),
            Claim(f"{name}: sent by a pod in a step", sent / 1e3, "kB"),
        )


if __name__ == "__main__":
    main()
