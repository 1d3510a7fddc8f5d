"""What is checked is what is trained: one program, to the fingerprint, for any setting of a job."""

from functools import cache

import jax
import numpy as np
import pytest

from tpukit.checker.compiling import lower_job
from tpukit.compiler.program.lowered import lower_program
from tpukit.hardware.target import target_chip
from tpukit.job import Job
from tpukit.step import Workload
from tpukit.training import TPUTrainer
from tpukit.training import session as sessions

# On one worker: what `check` lowers of a job is lowered once for all tests.
pytestmark = pytest.mark.xdist_group("one_step")

MODEL = {"preset": "tiny", "n_layers": 2, "vocab_size": 512}
BASE = Job(
    model=MODEL,
    on="v6e-8",
    batch_size=8,
    sequence_length=16,
    train={"steps": 5, "checkpoint_every": 0},
)
# One setting each.
CHANGES = {
    "nothing": {},
    "lion": {"train.optimizer": "lion"},
    "adafactor": {"train.optimizer": "adafactor"},
    "sgd": {"train.optimizer": "sgd"},
    "moments in bfloat16": {"train.moment_dtype": "bfloat16"},
    "moments in int8": {"train.moment_dtype": "int8"},
    "no clipping": {"train.clip_norm": None},
    "every weight decays": {"train.no_decay": []},
    "z-loss": {"train.z_loss": 1e-4},
    "documents": {"train.packing": "documents"},
    "bfloat16": {"train.precision": "bfloat16"},
    "int8": {"train.precision": "int8"},
    "parameters in bfloat16": {"train.param_dtype": "bfloat16"},
    "a linear schedule": {"train.schedule": "linear", "train.warmup_steps": 2},
    "skipping bad steps": {"train.on_bad_loss": "skip"},
    "another seed": {"train.seed": 3},
    "micro-batches": {"batch_size": 16, "microbatches": 2},
    "remat": {"remat": "minimal"},
    "tensor parallel": {"mesh": {"fsdp": 4, "tensor": 2}},
    "a ring": {"mesh": {"fsdp": 2, "context": 4}},
    "a pipeline": {"mesh": {"stage": 2, "fsdp": 4}, "batch_size": 16, "microbatches": 4},
    "loss in chunks": {"loss_chunks": 2},
    "xla's attention": {"attention": "xla"},
}
# This model draws no random numbers, and so short a sequence has XLA's attention anyway.
SAME_PROGRAM = ("another seed", "xla's attention")


class Stopped(Exception):
    """The trainer's program is known: nothing needs to run."""


@pytest.fixture
def trainer_s_program(tmp_path, monkeypatch):
    """(job) -> the jitted step and the arguments that the trainer is about to compile."""
    documents = [np.arange(1 + n % 12, dtype=np.uint16) for n in range(400)]
    caught = []

    def catch(work, mesh, **how):
        caught.append((work.jit_train_step(mesh), work.abstract_args(mesh)))
        raise Stopped

    monkeypatch.setattr(sessions, "StepProgram", catch)

    def find(job):
        data = np.arange(4000, dtype=np.uint16) % 64
        if job.train.packing == "documents":
            data = prepared_documents(tmp_path, documents)
        trainer = TPUTrainer.from_job(
            job.replace({"train.run_dir": str(tmp_path / "run")}), progress=False
        )
        with pytest.raises(Stopped):
            trainer.train(data)
        return caught.pop()

    return find


def prepared_documents(folder, documents):
    from tpukit.training.data.prepare import prepare_tokens

    text = folder / "documents.txt"
    text.write_text("\n".join("a" * len(one) for one in documents))
    target = folder / "documents"
    prepare_tokens(text, target, tokenizer="bytes")
    return str(target)


def fingerprint_for(job, step, arguments):
    with target_chip(job.slice.chip.name):
        return lower_program(step, *arguments, donate_argnums=(0,)).fingerprint


@cache
def checked_fingerprint(name):
    return lower_job(BASE.replace(CHANGES[name]), remember=False).program.fingerprint


@pytest.mark.parametrize("name", CHANGES)
def test_the_trainer_lowers_the_program_that_check_lowers(name, trainer_s_program):
    job = BASE.replace(CHANGES[name])
    assert checked_fingerprint(name) == fingerprint_for(job, *trainer_s_program(job))


def test_a_setting_that_decides_the_program_changes_it():
    seen = {name: checked_fingerprint(name) for name in CHANGES if name not in SAME_PROGRAM}
    assert len(set(seen.values())) == len(seen)


def test_what_does_not_decide_the_program_leaves_it_alone():
    for change in ({"train.log_every": 7}, {"train.num_workers": 1}, {"launch.zone": "a"}):
        other = BASE.replace(change)
        assert lower_job(other, remember=False).program.fingerprint == checked_fingerprint(
            "nothing"
        )
        assert other.key == BASE.key


def test_a_workload_of_python_s_own_is_one_program_too(trainer_s_program):
    def init(rng):
        return {"table": jax.random.normal(rng, (64, 64))}

    def apply(params, batch):
        return params["table"][batch["inputs"]]

    work = Workload((init, apply), batch_size=8, sequence_length=16)
    job = Job(model=work, on="v6e-8", train={"steps": 5, "checkpoint_every": 0})
    checked = lower_job(job).program.fingerprint
    assert checked == fingerprint_for(job, *trainer_s_program(job))
