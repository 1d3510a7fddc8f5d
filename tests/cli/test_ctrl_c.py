"""Ctrl-C at any moment of every command: exit code 130, one line, no child, no half-made file."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from command_line import every_command

from tpukit.exit_codes import ExitCode

PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from tpukit.cli.main import run; run()"
)
FUNCTION = "import jax.numpy as jnp\ndef product(x):\n    return jnp.tanh(x @ x).sum()\n"
# What is typed after each command, and how long that takes at least; a short one is interrupted
# while it is still being imported.
TYPED = {
    "cache clear": ("", 0.3),
    "cache show": ("", 0.3),
    "check": ("llama3.2-1b --on v6e-4 --batch-size 16", 25),
    "compile": ("own.py:product --on v6e-4 --arg f32[512,512]", 6),
    "config check": ("job.yaml", 0.4),
    "config show": ("job.yaml", 0.4),
    "dashboard": (". --port 0", 3),
    "data inspect": ("corpus.jsonl --tokenizer bytes", 5),
    "data prepare": ("corpus.jsonl -o out --tokenizer bytes", 5),
    "doctor": ("--deep", 2),
    "export": ("run exported", 4),
    "flags check": ("--xla_tpu_rwb_fusion=false --on v6e", 10),
    "flags explain": ("xla_tpu_rwb_fusion", 8),
    "flags list": ("--refresh", 15),
    "flags tune": ("llama3.2-1b --on v6e-4 --batch-size 16", 40),
    "generate": ("run --prompt abc", 8),
    "kernel bench": ("flash_attention --on v6e,v5p", 20),
    "kernel list": ("", 2),
    "kernel tune": ("quantized_matmul --on v6e --dry-run", 20),
    "launch": ("job.yaml --provider local", 20),
    "mcp": ("", 3),
    "plan": ("llama3.1-8b --tokens 1e11 --on v6e,v5p", 40),
    "pods attach": ("run --provider local", 0.4),
    "pods cost": ("", 0.4),
    "pods down": ("run", 0.4),
    "pods emulate": ("gcp", 4),
    "pods forget": ("run", 0.4),
    "pods lint": ("job.yaml", 0.4),
    "pods logs": ("run", 0.4),
    "pods ls": ("", 0.4),
    "pods preflight": ("--on v6e-1 --provider local", 0.5),
    "pods ssh": ("run", 0.4),
    "pods up": ("pod --on v6e-1 --provider local", 0.6),
    "presets": ("", 0.4),
    "prices": ("", 0.4),
    "profile": ("run", 0.4),
    "quantize": ("run --calibration short.jsonl --tokenizer bytes --format int4", 8),
    "rehearse": ("--steps 30", 60),
    "report diff": ("report.json report.json", 0.4),
    "report html": ("report.json", 0.4),
    "report perfetto": ("report.json", 0.4),
    "slice": ("v5p-128", 0.4),
    "slices": ("v6e", 0.4),
    "top": ("", 0.5),
    "train": ("job.yaml --steps 1000000 --run-dir second", 20),
}
IMPORTED_SOON = ("check", "plan", "train", "data prepare")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("commands")
    (made / "own.py").write_text(FUNCTION)
    with (made / "corpus.jsonl").open("w") as corpus:
        for number in range(400_000):
            corpus.write(json.dumps({"text": f"line {number} of a text, {number * number}"}) + "\n")
    (made / "report.json").write_text("{}")
    (made / "short.jsonl").write_text('{"text": "a text that is short"}\n' * 500)
    (made / "job.yaml").write_text(
        "model: {preset: tiny, vocab_size: 257}\nbatch_size: 8\nsequence_length: 64\n"
        "on: v6e-1\nmesh: fsdp=1\n"
        "train: {data: short.jsonl, tokenizer: bytes, steps: 2, run_dir: run}\n"
    )
    return made


@pytest.fixture(scope="module")
def trained(folder):
    environment = {**os.environ, "XLA_FLAGS": ""}
    subprocess.run(
        [sys.executable, "-c", PROGRAM, "train", "job.yaml"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
    )


def test_no_command_is_forgotten():
    assert set(TYPED) == set(every_command())


def interrupt(command, folder, after_s, seed):
    """Press Ctrl-C once; return the seconds until the end, or None where it had ended before."""
    place = Path(tempfile.mkdtemp(prefix=f"{command.replace(' ', '-')}-{seed}-", dir=folder))
    (place / "temporary").mkdir()
    environment = {
        **os.environ,
        "XLA_FLAGS": "",
        "PRESSED_IN": str(place),
        "TMPDIR": str(place / "temporary"),
        "TPUKIT_CACHE_DIR": str(place / "cache"),
        "TPUKIT_STATE_DIR": str(place / "state"),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *command.split(), *TYPED[command][0].split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        while process.poll() is None and psutil.Process(process.pid).num_threads() < 2:
            time.sleep(0.005)  # Python itself is starting, and knows nothing of tpukit yet
        time.sleep(after_s)
        if process.poll() is not None:
            return None
        os.killpg(process.pid, signal.SIGINT)
        pressed = time.monotonic()
        _, errors = process.communicate(timeout=60)
        took = time.monotonic() - pressed
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    about = f"{command} after {after_s:.2f} s, exit {process.returncode}: {errors}"
    at_its_end = process.returncode == -signal.SIGINT and "Traceback" not in errors
    if process.returncode == 0 or at_its_end:  # it was over, but for the interpreter's own end
        return None
    assert process.returncode == ExitCode.INTERRUPTED, about
    assert "Traceback" not in errors, about
    # A run of training says more: which step it saved, and how to go on.
    assert errors.endswith("interrupted\n") or "stopped after step" in errors, about
    assert sum("interrupted" in line.lower() for line in errors.splitlines()) <= 1, about
    assert not list((place / "temporary").iterdir()), about
    assert not [path for path in folder.glob("*") if ".partial" in path.name], about
    alive = [one for one in psutil.process_iter() if _pressed_in(one) == str(place)]
    left = psutil.wait_procs(alive, timeout=2)[1]
    # One that has ended and whom nobody has asked how is not running.
    assert not [one for one in left if _runs(one)], about
    return took


def _runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _pressed_in(process):
    try:
        return process.environ().get("PRESSED_IN")
    except psutil.Error:
        return None


@pytest.mark.parametrize("command", IMPORTED_SOON)
def test_while_it_is_imported(command, folder):
    interrupt(command, folder, random.Random(command).uniform(0, 1), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "seed"),
    # A short command is caught while it is imported, whenever that is: once is enough.
    [(one, seed) for one, (_, longest) in TYPED.items() for seed in range(1 + (longest > 1))],
)
def test_at_any_moment(command, seed, folder, trained):
    longest = TYPED[command][1]
    took = interrupt(command, folder, random.Random(f"{command} {seed}").uniform(0, longest), seed)
    # The promise itself, so the one place where a test looks at a clock.
    assert took is None or took < 2
