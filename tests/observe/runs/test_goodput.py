"""Goodput across restarts, against a simulated job that knows where each of its seconds went."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.observe.runs import Run
from tpukit.observe.runs.goodput import CAUSES, goodput_of
from tpukit.records.attempts import AttemptRecorder, attempts_of, close_killed
from tpukit.records.events import Event, EventsFile, read_events
from tpukit.records.host_steps import HostSteps, steps_file
from tpukit.records.ledger import Ledger
from tpukit.records.names import EVENTS_FILE

STALL_S, SAVE_S = 0.1, 0.7


class Job:
    """A job that trains, saves, rolls back, is killed and begins again; times are made up.

    It writes what the trainer writes, and keeps its own books second by second.
    """

    def __init__(self, folder, seed):
        self.folder, self.random = folder, random.Random(seed)
        self.now, self.saved, self.attempt = 1000.0, 0, 0
        self.step_of, self.truth = {}, dict.fromkeys([*CAUSES, "productive"], 0.0)
        self.lost_steps = 0
        (folder / "run.json").write_text("{}")

    def write(self, event, **data):
        with (self.folder / EVENTS_FILE).open("a") as file:
            file.write(json.dumps(Event(self.now, event, data).to_dict()) + "\n")

    def spend(self, what, seconds, *, say=True):
        self.now += seconds
        self.truth[what] += seconds
        if say:
            self.write("spent", what=what, seconds=seconds)

    def mark(self, event, **data):
        kept = sum(took for step, (took, _) in self.step_of.items() if step in self.own)
        self.write(event, step=self.step, wall_s=self.now - self.began, productive_s=kept, **data)

    def lose(self, after):
        for step in [step for step in self.step_of if step > after]:
            took, _ = self.step_of.pop(step)
            self.truth["lost"] += took
            self.lost_steps += 1
            self.own.discard(step)
            yield took

    def start(self):
        if self.attempt:
            self.spend("restart", self.random.uniform(1, 50), say=False)
        file = EventsFile(self.folder / EVENTS_FILE)
        assert close_killed(self.folder, file) == self.attempt
        file.close()
        self.began, self.own, self.step = self.now, set(), self.saved
        for _ in self.lose(self.saved) if self.attempt else ():
            pass
        self.write("attempt started", attempt=self.attempt, step=self.saved)
        self.attempt += 1
        self.spend("compile", self.random.uniform(1, 9))
        self.spend("other", self.random.uniform(0, 2), say=False)

    def train(self, steps):
        for _ in range(steps):
            took = self.random.uniform(0.5, 2)
            self.step += 1
            self.now += took + STALL_S
            self.truth["productive"] += took
            self.truth["input_stall"] += STALL_S
            self.step_of[self.step] = took, self.now
            self.own.add(self.step)
            self.unsaid += STALL_S
            line = {"time": self.now, "step": self.step, "step_time_s": took + STALL_S}
            steps_file(self.folder, 0).parent.mkdir(parents=True, exist_ok=True)
            with steps_file(self.folder, 0).open("a") as file:
                file.write(json.dumps({**line, "input_stall_s": STALL_S}) + "\n")

    unsaid = 0.0

    def say_stalls(self):
        if self.unsaid:
            self.write("spent", what="input_stall", seconds=self.unsaid)
        self.unsaid = 0.0

    def save(self):
        self.spend("checkpoint", SAVE_S)
        self.saved = self.step
        self.say_stalls()
        self.mark("saved")

    def progress(self):
        self.say_stalls()
        self.mark("progress")

    def roll_back(self):
        before = self.step
        self.say_stalls()
        lost = sum(self.lose(self.saved))
        self.step = self.saved
        self.write("spent", what="lost", seconds=lost)
        self.mark("rolled back", lost_steps=before - self.step)

    def end(self, reason):
        self.say_stalls()
        self.mark("attempt ended", reason=reason)

    def kill(self):
        self.unsaid = 0.0  # the next attempt finds it in the host's records


moves = st.lists(
    st.lists(
        st.one_of(
            st.integers(1, 6).map(lambda steps: ("train", steps)),
            st.sampled_from([("save",), ("progress",), ("roll_back",)]),
        ),
        max_size=8,
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80, deadline=None)
@given(attempts=moves, endings=st.lists(st.booleans(), min_size=5, max_size=5), seed=st.integers())
def test_the_parts_are_where_the_job_spent_its_time(tmp_path_factory, attempts, endings, seed):
    job = Job(tmp_path_factory.mktemp("run"), seed)
    for number, (moves_, dies) in enumerate(zip(attempts, endings, strict=False)):
        job.start()
        begins_at = job.step
        for name, *arguments in moves_:
            # A roll-back behind the attempt's own beginning would take back another's steps.
            if name != "roll_back" or job.saved >= begins_at:
                getattr(job, name)(*arguments)
        if number < len(attempts) - 1:
            job.kill() if dies else (job.save(), job.end("preempted"))
    found = Run(job.folder).goodput()
    truth = dict(job.truth)
    # What the last attempt did since it last wrote anything, nobody can know.
    said = [event.time for event in read_events(job.folder / EVENTS_FILE)]
    unseen = job.now - max(*said, *(when for _, when in job.step_of.values()), 0.0)
    productive = truth.pop("productive") - truth["lost"]
    assert found.total.productive_s == pytest.approx(productive)
    assert found.lost_steps == job.lost_steps
    for cause, seconds in truth.items():
        if cause not in ("other", "restart"):
            assert found.badput_s.get(cause, 0.0) == pytest.approx(seconds, abs=1e-6), cause
    both = found.badput_s.get("other", 0.0) + found.badput_s.get("restart", 0.0)
    assert both == pytest.approx(truth["other"] + truth["restart"] - unseen, abs=1e-5)
    assert found.total.wall_s == pytest.approx(
        found.total.productive_s + sum(found.badput_s.values())
    )
    assert 0 <= found.share <= 1
    assert found.attempts == len(attempts)


events = st.lists(
    st.builds(
        Event,
        st.floats(-1e9, 1e10),
        st.sampled_from(
            ["attempt started", "spent", "progress", "saved", "rolled back", "attempt ended", "x"]
        ),
        st.fixed_dictionaries(
            {},
            optional={
                "step": st.integers(0, 100),
                "what": st.sampled_from([*CAUSES, "my own"]),
                "seconds": st.floats(-10, 1e6),
                "wall_s": st.floats(0, 1e6),
                "productive_s": st.floats(-10, 1e6),
                "lost_steps": st.integers(-3, 9),
            },
        ),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(events=events)
def test_the_parts_add_up_whatever_the_clock_did(events):
    found = goodput_of(attempts_of(events))
    parts = found.total.productive_s + sum(found.badput_s.values())
    assert found.total.wall_s == pytest.approx(parts)
    assert found.total.productive_s >= 0
    assert all(seconds >= 0 for seconds in found.badput_s.values())
    assert found.lost_steps >= 0
    assert sum(one["seconds"] for one in found.to_dict()["badput"]) + found.total.productive_s == (
        pytest.approx(found.total.wall_s)
    )


def test_a_run_killed_twice_at_the_same_step_loses_both_tries(tmp_path):
    lines = [
        Event(0.0, "attempt started", {"step": 0}),
        Event(10.0, "saved", {"step": 5, "wall_s": 10.0, "productive_s": 10.0}),
        Event(14.0, "progress", {"step": 7, "wall_s": 14.0, "productive_s": 14.0}),
        Event(20.0, "attempt started", {"step": 5}),
        Event(26.0, "progress", {"step": 8, "wall_s": 6.0, "productive_s": 6.0}),
        Event(30.0, "attempt started", {"step": 5}),
        Event(33.0, "attempt ended", {"step": 6, "wall_s": 3.0, "productive_s": 2.0}),
    ]
    found = goodput_of(attempts_of(lines))
    assert found.total.productive_s == 12.0
    assert found.badput_s == {"lost": 10.0, "restart": 10.0, "other": 1.0}
    assert found.lost_steps == 5
    assert found.total.wall_s == 33.0


def test_a_checkpoint_that_was_lost_takes_back_steps_of_older_attempts():
    lines = [
        Event(0.0, "attempt started", {"step": 0}),
        Event(10.0, "attempt ended", {"step": 10, "wall_s": 10.0, "productive_s": 10.0}),
        Event(10.0, "attempt started", {"step": 10}),
        Event(20.0, "attempt ended", {"step": 20, "wall_s": 10.0, "productive_s": 10.0}),
        Event(20.0, "attempt started", {"step": 4}),
    ]
    found = goodput_of(attempts_of(lines))
    assert found.total.productive_s == pytest.approx(4.0)
    assert found.lost_steps == 16


def test_names_are_those_of_ml_goodput(tmp_path):
    lines = [
        Event(0.0, "attempt started", {"step": 0}),
        Event(3.0, "spent", {"what": "compile", "seconds": 3.0}),
        Event(4.0, "attempt ended", {"step": 1, "wall_s": 4.0, "productive_s": 1.0}),
    ]
    found = goodput_of(attempts_of(lines))
    (only,) = found.to_dict()["badput"]
    assert (only["ml_goodput_name"], only["seconds"]) == ("PROGRAM_STARTUP", 3.0)
    assert found.share == 0.25


def test_a_line_cut_short_by_a_kill_costs_only_itself(tmp_path):
    path = tmp_path / EVENTS_FILE
    path.write_text('{"time": 1.0, "event": "attempt started", "step": 0}\n{"time": 2.0, "ev')
    file = EventsFile(path)
    file.write("saved", step=3)
    file.close()
    assert [event.event for event in read_events(path)] == ["attempt started", "saved"]


@pytest.mark.parametrize("jump_s", [950_000.0, -950_000.0])
def test_a_clock_that_is_set_changes_no_goodput(tmp_path, monkeypatch, jump_s):
    """Two attempts of real seconds; the clock jumps while the first trains and between both."""
    ahead = [0.0]
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + ahead[0])
    began = time.monotonic()
    for attempt in range(2):
        ledger = Ledger()
        recorder = AttemptRecorder(tmp_path, process=0, ledger=ledger)
        recorder.start(step=2 * attempt)
        for step in (2 * attempt + 1, 2 * attempt + 2):
            time.sleep(0.2)
            took = ledger.completed(step, stalled_s=0.0)
            seconds = dict.fromkeys(["input_s", "input_stall_s", "checkpoint_s", "dispatch_s"], 0.0)
            recorder.stepped(step, step_time_s=took, **seconds)
            recorder.saved(step)
            ahead[0] += jump_s
        recorder.end("done") if attempt else recorder.happened("note", text="killed after this")
        recorder.close()
    took_s = time.monotonic() - began
    (tmp_path / "run.json").write_text("{}")
    found = Run(tmp_path).goodput()
    assert found.attempts == 2
    assert 0.8 <= found.total.wall_s <= took_s + 1.0
    assert found.share > 0.5


def test_a_full_disk_costs_events_and_not_the_run(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    file = EventsFile(path)
    for step in range(3):
        file.write("saved", step=step)
    file.close()
    assert [
        record.getMessage()
        for record in caplog.records
        if "cannot be written yet" in record.getMessage()
    ]
    assert len(caplog.records) == 1  # once, not at every step
    steps = HostSteps(tmp_path / "none", 0)
    (tmp_path / "none").write_text("a file where a folder should be")
    figures = dict.fromkeys(["input_s", "input_stall_s", "checkpoint_s", "dispatch_s"], 0.0)
    steps.add(1, step_time_s=0.1, **figures)
    steps.close()
