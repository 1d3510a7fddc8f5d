"""Watch a loop of your own: steps, loss and TFLOP/s, Prometheus, and an alert that says why."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import time

import jax

from tpukit import TPUMonitor

WIDTH, BATCH, STEPS = 256, 64, 20


@jax.jit
def train_step(weights, batch):
    loss, slope = jax.value_and_grad(lambda one: ((batch @ one - batch) ** 2).mean())(weights)
    return weights - 10.0 * slope, loss


weights = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / WIDTH
batch = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
flops = 3 * 2 * BATCH * WIDTH * WIDTH  # forward once, backward twice
monitor = TPUMonitor(update_frequency_seconds=0.2, enable_prometheus=True, prometheus_port=0)
monitor.set_alert("step_time_s", ">", 0.03, lambda alert: print(f"alert: {alert}"), clear=0.02)
with monitor:
    print(f"scrape it at {monitor.prometheus_url}")
    for _ in range(STEPS):
        weights, loss = train_step(weights, batch)
        monitor.record_step(loss=float(loss), flops=flops, samples=BATCH)
        time.sleep(0.05)  # what a slow input pipeline would do
    time.sleep(0.3)  # one more round
    metrics = monitor.get_current_metrics()
print(f"step {metrics['step']:.0f}: loss {metrics['loss']:.3f}, {metrics['step_time_s']:.3f} s")
print(f"TFLOP/s {metrics['current_tflops']:.4f}, chips busy {metrics['utilization']:.1%}")
print(f"chips busy is missing because {metrics['utilization'].reason}")
