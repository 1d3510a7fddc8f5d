"""The trainer learns, resumes to the same numbers, and refuses what belongs to another run."""

import json
import math
import os
import re
import signal
import subprocess
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpukit.errors import (
    ConfigError,
    TPUCheckpointError,
    TPUModelError,
    TPUValidationError,
    TrainingDiverged,
    XLARuntimeError,
)
from tpukit.job import Job, TrainingSettings
from tpukit.job.config import TPUConfig
from tpukit.models.presets import get_preset
from tpukit.records import read_metrics
from tpukit.step.workload import Workload
from tpukit.training import TPUTrainer

pytestmark = pytest.mark.usefixtures("compile_quickly")
SHAPE = {"batch_size": 8, "sequence_length": 16}


def by_hand(tokens, steps, *, seed=0):
    """The same training as a bare loop of its parts: what the trainer must agree with."""
    from tpukit.job.train import TrainingSettings
    from tpukit.step import build_optimizer
    from tpukit.training import open_data

    from .conftest import apply, init

    settings = TrainingSettings(learning_rate=0.1, steps=steps)
    optimizer = build_optimizer(settings.optimizer_spec(), settings.learning_rate_schedule())
    params = init(jax.random.key(seed))
    state = optimizer.init(params)
    stream = open_data(tokens, seed=seed, **SHAPE).stream()
    losses = []

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            logits = apply(params, batch)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(steps):
        params, state, value = step(params, state, next(stream))
        losses.append(float(value))
    stream.close()
    return losses


def test_agrees_with_a_loop_written_by_hand(table_trainer, tokens):
    result = table_trainer().train(tokens, 12, **SHAPE)
    assert result.losses == pytest.approx(by_hand(tokens, 12), abs=1e-5)
    assert result.losses[-1] < result.losses[0] - 0.3
    assert (result.steps, result.first_step, result.stopped) == (12, 1, "done")
    assert len(result.step_times_s) == 12
    assert result.checkpoint_path is None
    assert 0 < result.goodput.share < 1
    assert result.mfu.value is None
    assert result.mfu.reason


def test_resumes_to_the_same_numbers(table_trainer, tokens, tmp_path):
    whole = table_trainer(run_dir=str(tmp_path / "whole")).train(tokens, 12, **SHAPE)
    schedule = {"schedule": "constant", "checkpoint_every": 4}
    flat = table_trainer(run_dir=str(tmp_path / "flat"), **schedule).train(tokens, 12, **SHAPE)
    first = table_trainer(**schedule).train(tokens, 6, **SHAPE)
    second = table_trainer(**schedule).train(tokens, 12, **SHAPE)
    assert second.resumed_from == 6
    assert (*first.losses, *second.losses) == flat.losses  # to the bit
    assert flat.losses != whole.losses  # another schedule is another run
    records = read_metrics(second.run_dir)
    assert [record["step"] for record in records] == list(range(1, 13))
    assert [record["loss"] for record in records] == list(flat.losses)
    assert second.checkpoint_path.endswith("checkpoints/12")
    nothing_left = table_trainer(**schedule).train(tokens, 12, **SHAPE)
    assert nothing_left.losses == ()


def test_eight_devices_train_like_one(table_trainer, tokens, tmp_path):
    one = table_trainer().train(tokens, 6, **SHAPE)
    eight = table_trainer(
        devices=jax.devices(), mesh_shape={"data": 2, "fsdp": 4}, run_dir=str(tmp_path / "eight")
    ).train(tokens, 6, **SHAPE)
    assert eight.losses == pytest.approx(one.losses, abs=1e-5)
    assert eight.throughput.chips == 8
    per_chip = table_trainer(devices=jax.devices(), run_dir=str(tmp_path / "per_chip"))
    assert per_chip.train(tokens, 6, 1, 16).losses == pytest.approx(one.losses, abs=1e-5)
    usual = table_trainer(devices=jax.devices()[:2], run_dir=str(tmp_path / "usual"))
    assert usual.train(train_data=tokens, num_steps=1, batch_size_per_chip=1).losses
    assert (usual.workload.examples, usual.workload.sequence_length) == (2, 2048)


def test_sequences_split_over_devices_train_and_are_evaluated_like_one(tokens, tmp_path):
    np.save(tmp_path / "tokens.npy", tokens)

    def run(name, **mesh):
        settings = TrainingSettings(
            run_dir=str(tmp_path / name), eval_data=str(tmp_path / "tokens.npy"), checkpoint_every=0
        )
        trainer = TPUTrainer(
            model=get_preset("tiny", n_layers=1, vocab_size=32),
            use_bf16=False,
            mesh_shape=mesh,
            devices=jax.devices()[: math.prod(mesh.values())],
            settings=settings,
            progress=False,
        )
        return trainer.train(tokens, 3, **SHAPE)

    one, ring = run("one", fsdp=1), run("ring", fsdp=2, context=4)
    assert ring.losses == pytest.approx(one.losses, abs=1e-5)
    assert ring.evaluations[-1].loss == pytest.approx(one.evaluations[-1].loss, abs=1e-5)


def test_accumulates_microbatches(table_trainer, tokens, tmp_path):
    whole = table_trainer().train(tokens, 4, **SHAPE)
    pieces = table_trainer(microbatches=4, run_dir=str(tmp_path / "pieces"))
    assert pieces.train(tokens, 4, **SHAPE).losses == pytest.approx(whole.losses, abs=1e-5)


def test_trains_a_reference_transformer_from_a_plan(tmp_path, tokens):
    np.save(tmp_path / "tokens.npy", tokens)
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {preset: tiny, n_layers: 1, vocab_size: 32}\n"
        "batch_size: 8\nsequence_length: 16\non: v6e-8\nmesh: {fsdp: 4, tensor: 2}\n"
        f"train:\n  data: {tmp_path}\n  steps: 3\n  learning_rate: 1e-2\n  z_loss: 1e-4\n"
        f"  run_dir: {tmp_path / 'run'}\n  checkpoint_every: 0\n  peak_tflops: 0.1\n"
    )
    trainer = TPUTrainer.from_job(Job.from_yaml(path), devices=jax.devices()[:2], progress=False)
    assert dict(trainer.mesh.shape) == {"fsdp": 1, "tensor": 2}
    result = trainer.train()
    assert result.losses[-1] < result.losses[0]
    step = result.step_time_s.value
    flops = trainer.workload.config.flops_per_token(16).total * 8 * 16
    assert result.mfu.value == pytest.approx(flops / step / 0.2e12)
    assert "not checked yet" in result.predicted_step_s.reason
    log = (tmp_path / "run" / "train.log").read_text()
    assert "8 devices of v6e-8, fsdp=4,tensor=2; here are 2: fsdp=1,tensor=2" in log
    assert result.to_dict()["mfu"]["origin"] == "user"  # a measured step over the peak given


def test_own_models_compute_in_bf16_when_asked(table_trainer, tokens):
    seen = {}

    def apply_and_look(params, batch):
        seen["dtype"] = params["table"].dtype
        return params["table"][batch["inputs"]]

    from .conftest import init

    trainer = table_trainer(model=(init, apply_and_look), use_bf16=True)
    trainer.train(tokens, 1, **SHAPE)
    assert seen["dtype"] == jnp.bfloat16
    assert trainer.state.params["table"].dtype == jnp.float32


def test_iterables_of_batches_and_the_end_of_data(table_trainer):
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=(4, 3)), "y": rng.normal(size=(4, 1))} for _ in range(5)]

    def init(rng):
        return {"w": jnp.zeros((3, 1))}

    def apply(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    trainer = table_trainer(model=(init, apply), epochs=1)
    result = trainer.train(iter(batches), 100)
    assert (result.steps, result.stopped) == (5, "data ended")
    assert result.losses[0] == pytest.approx(np.mean(batches[0]["y"] ** 2), rel=1e-6)
    assert result.tokens_per_s_per_chip.value is None


class CompileCounter:
    """A hook that counts what is compiled between the first step and the end."""

    def __init__(self):
        self.names = []

    def note(self, event, _, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            self.names.append(about)

    def on_start(self, run_dir, identity):
        jax.monitoring.register_event_duration_secs_listener(self.note)

    def on_record(self, record):
        pass

    def on_end(self, result):
        jax.monitoring.unregister_event_duration_listener(self.note)


def test_nothing_is_compiled_between_steps(table_trainer, tokens):
    counter = CompileCounter()
    jax.clear_caches()
    table_trainer(own_hooks=[counter]).train(tokens, 5, **SHAPE)
    assert counter.names == []


def test_waiting_for_slow_data_is_an_input_stall(table_trainer, tokens):
    def slowly():
        for number in range(6):
            time.sleep(
                0.2
            )  # far longer than a step, which goes on beside it, on a busy machine too
            yield tokens[number * 136 : (number + 1) * 136].reshape(8, 17)

    result = table_trainer().train(slowly, 6)
    stalled = result.goodput.spent_s["input_stall"]
    assert 0.2 < stalled <= result.input_wait_s + 0.001
    assert result.input_wait_s >= 0.25  # the first batch is drawn while nothing runs yet
    assert result.tokens_per_s_per_chip.value < 8 * 16 / 0.05


def test_the_prediction_of_an_earlier_check_is_shown(table_trainer, monkeypatch):
    from tpukit.training import preparation

    plan = Job(model="tiny", on="v6e-8", batch_size=8, sequence_length=16)
    assert "not checked yet" in preparation.predicted_step(plan).reason
    assert "names no slice" in preparation.predicted_step(plan.replace(on=None)).reason

    class Compiled:
        fits = True

        def predict(self, **_):
            return types.SimpleNamespace(step_time_s=0.25)

    monkeypatch.setattr(preparation, "known_compile", lambda job: Compiled())
    found = preparation.predicted_step(plan)
    assert (found.value, found.origin) == (0.25, "model")
    Compiled.fits = False
    assert "does not fit" in preparation.predicted_step(plan).reason


def linen_model():
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            x = linen.Embed(32, 8)(tokens)
            return linen.Dense(32)(linen.BatchNorm(use_running_average=False)(x))

    return Net()


def nnx_model():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.head = nnx.Linear(8, 32, rngs=rngs)

        def __call__(self, tokens):
            return self.head(self.norm(self.embed(tokens)))

    return lambda rngs: Net(rngs)


def equinox_model():
    import equinox

    class Net(equinox.Module):
        embed: equinox.nn.Embedding
        head: equinox.nn.Linear

        def __call__(self, tokens):
            return jax.vmap(lambda token: self.head(self.embed(token)))(tokens)

    keys = jax.random.split(jax.random.key(0))
    embed = equinox.nn.Embedding(32, 8, key=keys[0])
    return Net(embed, equinox.nn.Linear(8, 32, key=keys[1]))


@pytest.mark.parametrize("make", [linen_model, nnx_model, equinox_model])
def test_anyones_model_resumes_with_what_it_carries(table_trainer, tokens, make, tmp_path):
    saved = {"checkpoint_every": 3, "schedule": "constant"}
    whole = table_trainer(model=make(), run_dir=str(tmp_path / "whole"), **saved)
    expected = whole.train(tokens, 5, **SHAPE)
    first = table_trainer(model=make(), **saved).train(tokens, 3, **SHAPE)
    trainer = table_trainer(model=make(), **saved)
    second = trainer.train(tokens, 5, **SHAPE)
    assert (*first.losses, *second.losses) == expected.losses  # to the bit
    for found, truth in zip(
        jax.tree.leaves(trainer.state), jax.tree.leaves(whole.state), strict=True
    ):
        np.testing.assert_array_equal(found, truth)


def bad_batches(at):
    """Batches of which number `at` makes the loss NaN."""
    for number in range(100):
        yield {"x": np.full((4, 2), np.nan if number == at else 1.0, np.float32)}


def slope_model():
    def init(rng):
        return {"w": jnp.ones((2,))}

    return init, lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)


@pytest.mark.parametrize("policy", ["stop", "rollback", "skip", "ignore"])
def test_bad_losses(table_trainer, policy):
    trainer = table_trainer(
        model=slope_model(), checkpoint_every=3, on_bad_loss=policy, schedule="constant"
    )
    if policy == "stop":
        with pytest.raises(TrainingDiverged, match=r"step 5: the loss is nan; step 3 is saved"):
            trainer.train(lambda: bad_batches(4), 8)
        return
    result = trainer.train(lambda: bad_batches(4), 8)
    finite = np.isfinite(result.losses)
    assert len(result.losses) == 8
    assert result.rollbacks == (1 if policy == "rollback" else 0)
    expected = {"rollback": [True] * 8, "skip": [True] * 4 + [False] + [True] * 3}
    assert finite.tolist() == expected.get(policy, [True] * 4 + [False] * 4)
    records = read_metrics(result.run_dir)
    assert [record["step"] for record in records] == list(range(1, 9))
    if policy == "rollback":
        assert result.goodput.spent_s["lost"] > 0
    else:
        assert records[4]["loss"] is None
        assert records[4]["not_finite"]["loss"] == "nan"


def test_debugging_mode_stops_at_the_operation(table_trainer):
    trainer = table_trainer(model=slope_model())
    with (
        TPUConfig().enable_debugging_mode(),
        pytest.raises(XLARuntimeError, match=r"step 3: invalid value \(nan\).*test_trainer.py:"),
    ):
        trainer.train(lambda: bad_batches(2), 8)
    assert not jax.config.jax_debug_nans


def softmax_model():
    def init(rng):
        return {"w": jnp.full((2, 1), 1e30)}

    return init, lambda params, batch: (jax.nn.softmax(batch["x"]) @ params["w"]).sum() * 1e10


def test_debugging_mode_lets_a_softmax_be_and_names_what_is_inf(table_trainer, tmp_path):
    batches = [{"x": np.ones((4, 2), np.float32)}]
    with (
        TPUConfig().enable_debugging_mode(),
        pytest.raises(XLARuntimeError, match=r"step 1: invalid value \(inf\) in the step's loss"),
    ):
        table_trainer(model=softmax_model()).train(batches, 2)
    assert "XLA compilation" in (tmp_path / "run" / "compiles.log").read_text()


def test_a_batch_of_another_shape_is_named(table_trainer, tmp_path):
    batches = [{"x": np.ones((4, 2), np.float32)}] * 2 + [{"x": np.ones((4, 3), np.float32)}]
    init = slope_model()[0]

    def apply(params, batch):
        return jnp.mean((batch["x"][:, :2] @ params["w"]) ** 2)

    expected = re.escape("batch['x'] changed from float32[4,2] to float32[4,3]")
    with pytest.raises(TPUValidationError, match=expected):
        table_trainer(model=(init, apply)).train(batches, 3)
    allowed = table_trainer(
        model=(init, apply), on_recompile="allow", run_dir=str(tmp_path / "allowed")
    ).train(batches, 4)
    assert len(allowed.losses) == 4
    assert [str(change) for change in allowed.recompiles] == [expected.replace("\\", "")]


def test_evaluates_on_the_same_batches(table_trainer, tokens):
    trainer = table_trainer(eval_every=3, eval_batches=2)
    result = trainer.train(tokens, 5, eval_data=tokens[:2000], **SHAPE)
    assert [evaluation.step for evaluation in result.evaluations] == [3, 5]
    table = np.asarray(trainer.state.params["table"], np.float64)
    losses = []
    for row in range(16):
        example = tokens[row * 16 : row * 16 + 17].astype(int)
        logits = table[example[:-1]]
        normaliser = np.log(np.exp(logits).sum(-1))
        losses.extend(normaliser - logits[np.arange(16), example[1:]])
    assert result.evaluations[-1].loss == pytest.approx(np.mean(losses), abs=1e-5)
    assert result.evaluations[-1].weight == 256


def test_refuses_what_is_wrong_and_overwrites_nothing(table_trainer, tokens, tmp_path):
    saved = {"checkpoint_every": 4}
    table_trainer(**saved).train(tokens, 4, **SHAPE)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(TPUValidationError, match="another run: batch_size was 8, is 4"):
        table_trainer(**saved).train(tokens, 8, batch_size=4, sequence_length=16)
    with pytest.raises(TPUValidationError, match="seed was 0, is 1"):
        table_trainer(seed=1, **saved).train(tokens, 8, **SHAPE)
    with pytest.raises(TPUValidationError, match="another run: the data differ"):
        table_trainer(**saved).train(tokens[:4000], 8, **SHAPE)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    other = table_trainer(
        model=slope_model(),
        run_dir=str(tmp_path / "other"),
        checkpoint_dir=str(tmp_path / "run" / "checkpoints"),
        **saved,
    )
    with pytest.raises(TPUCheckpointError, match="of another model"):
        other.train(lambda: bad_batches(99), 8)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "thesis.txt").write_text("years of work")
    with pytest.raises(TPUValidationError, match="contains files but no run"):
        table_trainer(run_dir=str(tmp_path / "files")).train(tokens, 1, **SHAPE)


class SecondRun:
    """Starts the same run once more, in the middle of it."""

    def __init__(self, start):
        self.start, self.refusal = start, ""

    def on_start(self, run_dir, identity):
        self.folder = run_dir

    def on_record(self, record):
        if record["step"] == 3:
            before = {path: path.read_bytes() for path in self.files()}
            with pytest.raises(TPUValidationError) as refused:
                self.start()
            self.refusal = str(refused.value)
            assert {path: path.read_bytes() for path in self.files()} == before

    def on_end(self, result):
        pass

    def files(self):
        return [path for path in self.folder.rglob("*") if path.is_file()]


def test_a_second_run_on_the_directory_of_a_living_one_is_refused(table_trainer, tokens, tmp_path):
    second = SecondRun(lambda: table_trainer().train(tokens, 8, **SHAPE))
    table_trainer(own_hooks=[second]).train(tokens, 8, **SHAPE)
    assert f"is being written by process {os.getpid()} of " in second.refusal
    assert " s ago; end that run, or choose another run_dir." in second.refusal
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [*range(1, 9)]
    table_trainer().train(tokens, 8, **SHAPE)  # the lock ended with the run


def test_the_way_out_where_every_checkpoint_is_damaged(table_trainer, tokens, tmp_path):
    first = table_trainer(checkpoint_every=2).train(tokens, 4, **SHAPE)
    for record in (tmp_path / "run" / "checkpoints").glob("*/tpukit/*.json"):
        record.write_text("{}")
    with pytest.raises(TPUCheckpointError, match="No checkpoint in") as refused:
        table_trainer(checkpoint_every=2).train(tokens, 4, **SHAPE)
    command = str(refused.value).rsplit(": ", 1)[1]
    assert command.startswith("mv ")
    subprocess.run(command, shell=True, check=True)
    again = table_trainer(checkpoint_every=2).train(tokens, 4, **SHAPE)
    assert (again.resumed_from, again.losses) == (None, first.losses)


def test_a_run_goes_on_with_another_recipe(table_trainer, tokens, tmp_path):
    table_trainer(checkpoint_every=4).train(tokens, 4, **SHAPE)
    changed = {"learning_rate": 0.01, "clip_norm": None, "on_bad_loss": "skip"}
    trainer = table_trainer(checkpoint_every=4, microbatches=2, **changed)
    result = trainer.train(tokens, 8, **SHAPE)
    assert (result.resumed_from, result.steps) == (4, 8)
    assert read_metrics(tmp_path / "run")[4]["learning_rate"] < 0.01
    log = (tmp_path / "run" / "train.log").read_text()
    for change in (
        "learning_rate was 0.1, is 0.01",
        "clip_norm was 1.0, is None",
        "on_bad_loss was stop, is skip",
        "microbatches was 1, is 2",
    ):
        assert f"from here on: {change}" in log
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["clip_norm"] is None


def test_a_run_that_never_took_a_step_keeps_no_folder(table_trainer, tokens, tmp_path):
    work = Workload("tiny", batch_size=8, sequence_length=16)
    with pytest.raises(TPUValidationError, match="vocabulary"):
        table_trainer(model=work).train(tokens.astype(np.int32) + 300, 1)
    assert (tmp_path / "run" / "run.json").exists()
    assert table_trainer().train(tokens, 2, **SHAPE).steps == 2
    again = table_trainer().train(tokens, 3, **SHAPE)  # without checkpoints
    assert again.first_step == 1
    assert "no checkpoint: beginning at step 1" in (tmp_path / "run" / "train.log").read_text()


def test_refuses_incomplete_orders(table_trainer, tokens):
    with pytest.raises(TPUModelError, match="needs a model"):
        TPUTrainer()
    with pytest.raises(ConfigError, match="how many steps"):
        table_trainer().train(tokens, **SHAPE)
    with pytest.raises(ConfigError, match="no data"):
        table_trainer().train(None, 1, **SHAPE)
    with pytest.raises(ConfigError, match="num_steps is -1; give a whole number"):
        table_trainer().train(tokens, -1, **SHAPE)
    with pytest.raises(ConfigError, match="batch_size_per_chip is 0; give a whole number"):
        table_trainer().train(tokens, 1, 0)
    with pytest.raises(ConfigError, match="learning_rate is a setting"):
        TPUTrainer(model="tiny", learning_rate=0.1)
    with pytest.raises(ConfigError, match=r"no argument 'remaat'\. Did you mean 'remat'"):
        TPUTrainer(model="tiny", remaat="full")
    with pytest.raises(
        TPUValidationError, match=r"a list yielded 5, which is not a batch.*np.array"
    ):
        table_trainer().train([5, 6, 7], 1, **SHAPE)
    with pytest.raises(ConfigError, match="give one"):
        table_trainer().train(tokens, 1, 4, 16, batch_size=4)
    work = Workload("tiny", batch_size=8, sequence_length=16)
    with pytest.raises(TPUValidationError, match="vocabulary"):
        table_trainer(model=work).train(tokens.astype(np.int32) + 300, 1)
    with pytest.raises(ConfigError, match=r"no hook is called 'tensorbord'.*Did you mean"):
        table_trainer(hooks="tensorbord").train(tokens, 1, **SHAPE)


def test_run_directory_says_what_the_run_is(table_trainer, tokens, tmp_path):
    table_trainer(hooks="tensorboard").train(tokens, 2, **SHAPE)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["identity"]["batch_size"] == 8
    assert about["settings"]["learning_rate"] == 0.1
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    record = read_metrics(tmp_path / "run")[0]
    assert record["learning_rate"] == pytest.approx(0.1)
    assert record["step_time_s"] > 0


def test_a_notice_that_comes_while_the_step_compiles_ends_the_run_as_any_other(
    table_trainer, tokens
):
    from .conftest import apply, init

    told = []

    def told_while_traced(params, batch):
        if not told and callable(signal.getsignal(signal.SIGTERM)):  # or it would end the tests
            told.append(os.kill(os.getpid(), signal.SIGTERM))
        return apply(params, batch)

    def run():
        trainer = table_trainer(model=(init, told_while_traced), checkpoint_every=2)
        return trainer.train(tokens, 4, **SHAPE)

    stopped = run()
    assert told
    assert (stopped.stopped, stopped.steps, stopped.checkpoint_path) == ("preempted", 0, None)
    finished = run()
    assert (finished.stopped, finished.resumed_from) == ("done", None)
    np.testing.assert_allclose(finished.losses, by_hand(tokens, 4), rtol=1e-6)
