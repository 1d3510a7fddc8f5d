"""A rehearsal's result as it comes out, with numbers that are known and any text of a user's."""

from pathlib import Path
from types import SimpleNamespace

from tpukit.hardware import Slice
from tpukit.hardware.figure import Figure
from tpukit.job import Job
from tpukit.models.generation import Generation, TextPart
from tpukit.observe.runs.goodput import RunGoodput
from tpukit.pods.causes import Cause, Ending
from tpukit.pods.cost import CostReport
from tpukit.pods.supervision.journal import Attempt, losses
from tpukit.pods.supervision.supervisor import Outcome
from tpukit.records.ledger import Goodput
from tpukit.rehearsal.result import RehearsalResult
from tpukit.rehearsal.stage import Moment, Played
from tpukit.rehearsal.stages.check import Check, RefusedJob
from tpukit.rehearsal.stages.launch import CalmRun, LaunchedRun
from tpukit.rehearsal.stages.monitor import Monitor
from tpukit.rehearsal.stages.preempt import InterruptedRun, Preempt, Resume
from tpukit.rehearsal.stages.quantize import Generate
from tpukit.rehearsal.stand_in import StandIn

BEGAN = 1_790_000_000.0
JOB = Job(model="tiny", on="v6e-4", batch_size=8, sequence_length=64, train={"steps": 6})


def attempt(number, steps, ending, evidence=""):
    at = BEGAN + 10 * number
    return Attempt(
        number=number,
        pod=f"run-a{number}",
        zone="us-east5-b",
        slice="v6e-4",
        asked_at=at,
        started_at=at + 1,
        first_step=steps[0],
        first_step_at=at + 4,
        last_step=steps[-1],
        last_step_at=at + 6,
        ended_at=at + 7,
        ending=Ending(ending, evidence=evidence),
    )


def launched(name, attempts, text=""):
    records = tuple(
        {"step": step, "loss": 6.0 - step / 4, "step_time_s": 0.5, "weight": 512.0}
        for step in range(1, 7)
    )
    return LaunchedRun(
        name=name,
        job=JOB,
        folder=Path("nowhere"),
        outcome=Outcome(
            job=name,
            ending=attempts[-1].ending,
            reason=text,
            attempts=tuple(attempts),
            losses=tuple(losses(attempts)),
        ),
        cost=CostReport(()),
        records=records,
        goodput=RunGoodput(
            Goodput(wall_s=26.0, productive_s=3.0, spent_s={"restart": 8.0, "compile": 15.0}),
            len(attempts),
            1,
        ),
        began=BEGAN + 12,
        checkpoint_bytes=1000,
    )


def memory(total, text="activations"):
    return SimpleNamespace(
        total_bytes=total,
        usable_bytes=1 << 30,
        purposes={"parameters": 1 << 20, text: total - (1 << 20)},
        slice=Slice.parse("v6e-4"),
    )


def checked(total, text="activations"):
    return SimpleNamespace(
        memory=memory(total, text),
        prediction=SimpleNamespace(step_time_s=0.002),
        host_memory=SimpleNamespace(saving=Figure(900, "B", "model", "arithmetic")),
        fits=total <= 1 << 30,
        to_dict=dict,
    )


def findings(text="x"):
    """Return what stages found, with a text wherever one of a user's can be."""
    calm = launched("undisturbed", [attempt(1, (1, 6), Cause.DONE)], text)
    taken = launched(
        "preempted",
        [
            attempt(1, (1, 2), Cause.SPOT, text),
            attempt(2, (3, 5), Cause.SPOT, text),
            attempt(3, (5, 6), Cause.DONE),
        ],
        text,
    )
    check = Check(
        checked(1 << 29),
        RefusedJob(
            JOB, memory(1 << 31), text, SimpleNamespace(text=text, to_dict=dict), checked(1 << 28)
        ),
        checked(1 << 25),
    )
    model = InterruptedRun(
        steps=6, step_s=0.5, ready_s=3, start_s=4, save_s=0.1, every=2, noticed=1, killed=1
    )
    generation = Generation(
        tokens=((1, 2),),
        ended=("length",),
        prompt_lengths=(4,),
        compile_s=1.0,
        prompt_s=0.1,
        decode_s=0.2,
        decode_steps=1,
    )
    spoken = TextPart(new=text, text=text, generation=generation)
    return {
        "check": check,
        "launch": CalmRun(calm, check, Figure(5.5, "nats", "model", "ln"), text),
        "preempt": Preempt(taken, model, ()),
        "resume": Resume(calm.losses, taken.losses),
        "monitor": Monitor(
            SimpleNamespace(to_dict=dict), taken.goodput, 3, 0.5, float(1 << 30), 2, text
        ),
        "generate": Generate(text, spoken, spoken),
    }


def sample_rehearsal(text="x", **changes):
    played = [
        Played(
            name=name,
            question=text,
            began=BEGAN + 5 * number,
            seconds=4.0,
            processor_s=2.0,
            finding=finding,
        )
        for number, (name, finding) in enumerate(findings(text).items())
    ]
    played.append(
        Played(
            name="quantize",
            question=text,
            began=BEGAN + 35,
            seconds=1.0,
            processor_s=0.5,
            verdict="failed",
            why=text,
        )
    )
    said = {
        "job": JOB,
        "stand_in": StandIn(JOB, False, (text,)),
        "played": tuple(played),
        "moments": (
            Moment(BEGAN + 12, "preempted", "pod", text),
            Moment(BEGAN + 15, "preempted", "saved", text),
            Moment(BEGAN + 16, "preempted", "preempted", text),
        ),
        "began": BEGAN,
        "seconds": 40.0,
        "emulated": text,
        "folder": Path("runs/rehearsal"),
    }
    return RehearsalResult(**{**said, **changes})
