from pathlib import Path

from tpukit.training.saving import SaveTimes


def due(times, steps, step_s):
    return [step for step in range(1, steps + 1) if times.is_due(step, {1: step_s})]


def test_steps_count_where_no_seconds_are_given():
    assert due(SaveTimes(4, None, first=0), 12, 1.0) == [4, 8, 12]
    assert due(SaveTimes(0, None, first=0), 12, 1.0) == []
    assert due(SaveTimes(0, 2.0, first=0), 12, 1.0) == []  # no checkpoints is no checkpoints


def test_seconds_become_steps_once_it_is_known_how_long_they_take():
    assert due(SaveTimes(500, 2.0, first=0), 12, 0.5) == [7, 11]
    assert due(SaveTimes(500, 0.1, first=0), 6, 0.5) == [4, 5, 6]  # no more than each step
    times = SaveTimes(500, 2.0, first=0)
    slow = {step: 0.5 if step < 8 else 1.0 for step in range(1, 30)}
    seen = {}
    for step in range(1, 30):
        seen[step] = slow[step]
        if times.is_due(step, {step: slow[step]}):
            seen[step] = "saved"
    assert [step for step, what in seen.items() if what == "saved"][:4] == [7, 11, 13, 15]


def test_a_run_saves_by_the_clock(table_trainer, tokens, tmp_path):
    trainer = table_trainer(
        run_dir=str(tmp_path / "run"),
        checkpoint_every=500,
        checkpoint_seconds=1e-6,
        keep_checkpoints=20,
    )
    trainer.train(tokens, 6, batch_size=8, sequence_length=16)
    folder = Path(tmp_path / "run" / "checkpoints")
    saved = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    assert saved == [4, 5, 6]
