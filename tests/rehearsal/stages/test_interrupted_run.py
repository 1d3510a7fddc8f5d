"""The arithmetic of an interrupted run, against a run that is played step by step."""

import random
import statistics

import pytest

from tpukit.rehearsal.stages.preempt import InterruptedRun


def play(run, kill_after):
    """Walk through a run: seconds, and steps done again, where it is killed after one step."""
    seconds, saved, step, again, killed = run.ready_s, 0, 0, 0, False
    while step < run.steps:
        step += 1
        seconds += run.step_s
        if step % run.every == 0:
            saved = step
            seconds += run.save_s
        if step == kill_after and not killed:
            killed = True
            again += step - saved
            step = saved
            seconds += run.start_s
    return seconds, again


def test_it_is_the_mean_of_all_kills():
    run = InterruptedRun(
        steps=60, step_s=0.5, ready_s=3, start_s=5, save_s=0.0, every=6, noticed=0, killed=1
    )
    # Every step of every interval between saves is as likely as any other.
    walks = [play(run, after) for after in range(1, 61)]
    assert run.redone_steps == statistics.fmean(again for _, again in walks)
    assert run.wall_s == pytest.approx(statistics.fmean(seconds for seconds, _ in walks))


def test_a_notice_costs_a_start_and_a_save_but_no_step():
    calm = {"steps": 40, "step_s": 0.1, "ready_s": 2, "start_s": 4, "save_s": 0.5, "every": 10}
    without = InterruptedRun(**calm, noticed=0, killed=0)
    noticed = InterruptedRun(**calm, noticed=1, killed=0)
    assert without.wall_s == pytest.approx(2 + 4 + 4 * 0.5)
    assert noticed.wall_s - without.wall_s == pytest.approx(4 + 0.5)
    assert noticed.redone_steps == 0


def test_goodput_falls_with_every_interruption():
    seed = random.Random(0)
    for _ in range(50):
        run = {name: seed.uniform(0.1, 5) for name in ("step_s", "ready_s", "start_s", "save_s")}
        shares = [
            InterruptedRun(**run, steps=50, every=5, noticed=n, killed=k).goodput.value
            for n, k in ((0, 0), (1, 0), (1, 1), (2, 2))
        ]
        assert shares == sorted(shares, reverse=True)
        assert 0 < shares[-1] < shares[0] < 1
