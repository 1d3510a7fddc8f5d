"""Odd things to type: files, numbers and names of every wrong kind, for any option."""

import json
import os
import random
from pathlib import Path

import numpy as np
from command_line import Command, Parameter

from tpukit.checker.report.schema import SCHEMA

# What a command does when everything is right, with little work; anything of it may be replaced.
RIGHT = {
    "cache clear": [],
    "cache show": [],
    "check": ["tiny", "--on", "v6e-4"],
    "compile": ["own.py:f", "--on", "v6e-4", "--arg", "bf16[8,128]"],
    "config check": ["job.yaml"],
    "config show": ["job.yaml"],
    "dashboard": [".", "--port", "0"],
    "data inspect": ["tokens.npy"],
    "data prepare": ["text.jsonl", "--output", "out", "--tokenizer", "bytes"],
    "doctor": [],
    "export": ["run", "exported"],
    "flags check": ["--xla_tpu_rwb_fusion=false"],
    "flags explain": ["xla_tpu_rwb_fusion"],
    "flags list": ["rwb"],
    "flags tune": ["tiny", "--on", "v6e-4", "--budget", "1"],
    "generate": ["run", "--max-new-tokens", "1"],
    "kernel bench": ["rms_norm", "--on", "v6e", "--case", "bfloat16_1024x1024"],
    "kernel list": [],
    "kernel tune": ["rms_norm", "--on", "v6e", "--dry-run", "--seconds", "1"],
    "launch": ["job.yaml", "--provider", "local", "--dry-run"],
    "mcp": [],
    "plan": ["tiny", "--tokens", "1e9", "--on", "v6e-4", "--no-verify"],
    "pods cost": [],
    "pods attach": ["run"],
    "pods down": ["run"],
    "pods forget": ["run"],
    "pods emulate": [],
    "pods lint": ["job.yaml"],
    "pods logs": ["run"],
    "pods ls": [],
    "pods preflight": ["--on", "v6e-1", "--provider", "local"],
    "pods ssh": ["run"],
    "pods up": ["run", "--on", "v6e-1", "--provider", "local"],
    "presets": ["llama"],
    "prices": ["v6e"],
    "profile": ["one_op.xplane.pb"],
    "quantize": ["run", "--calibration", "text.jsonl", "--format", "int8"],
    "rehearse": ["job.yaml", "--dry-run"],
    "report diff": ["report.json", "report.json"],
    "report html": ["report.json"],
    "report perfetto": ["report.json"],
    "slice": ["v6e-4"],
    "slices": ["v6e"],
    "top": ["--once"],
    "train": ["job.yaml"],
}
# An xplane file: one op of 10 us on one TPU.
ONE_OP = (
    b'\nH\x12\r/device:TPU:0\x1a\x16\x08\x01\x12\x07XLA Ops"\t\x08\x01\x10\x00\x18\x80\xad\xe2\x04'
    b'"\x1f\x08\x01\x12\x1b\x08\x01\x12\x17%add.1 = f32[8] add(%a)'
)
# The first three start work of minutes.
# `train --debug` changes jax for the whole process, which here is that of every other test.
NOT_TYPED = {
    "plan": ("verify",),
    "flags list": ("refresh",),
    "doctor": ("deep",),
    "train": ("debug",),
}

NUMBERS = ["0", "-1", "1e30", "nan", "inf", "-inf", "1.5", "", "abc", "9" * 20, "1", "0x10", "٣"]
PATHS = [
    *("", ".", " ", "missing", "missing/deeper", "text.jsonl/under", "folder", "folder.yaml"),
    *("loop", "/dev/null", "/proc/nope/x", "x" * 300, "a/" + "y" * 300, "~nobody/x", "\udcff"),
    *("s3://b", "bytes", "-", "--", ":", "os:getcwd", "missing.py:f", "own.py:", "own.py:x"),
    *("own.py:g", "own.py:n", "syntax.py:f", "raises.py:f"),
    *(f"{name}.yaml" for name in ("empty", "binary", "list", "odd", "odder", "rates")),
    *(f"{name}.json" for name in ("null", "list", "deep", "object", "binary", "schema", "half")),
    *("hf", "hf/config.json", "run", "tokens.npy", "floats.npy", "cut.npy", "odd.bin"),
    *("empty.jsonl", "bad.jsonl", "text.jsonl", "one_op.xplane.pb"),
]
NAMES = [
    *("", "=", "x=", "a=b=c", "(", "*", "[a-", "a\nb", "é", "\x1b[31m", "tiny", "llama", "v6e"),
    *("v6e-0", "v6e--4", "0xv6e-4", "99999999xv6e-256", "v5p:0x0x0", "v9z", "fsdp=0", "fsdp"),
    *("fsdp=2,fsdp=2", "zzz=4", "stage=4", f"fsdp={'9' * 20}", "train=3", "mesh={}", "model={}"),
    *("train.z_loss=-1", "train.steps=0", "train.data=3", "train.hooks=[nope]", "batch_size=nan"),
    *("model={preset: tiny, n_heads: 0}", "model={preset: tiny, vocab_size: -4}", "loss_chunks=0"),
    *("options={xla_nope: 1}", "options=3", "memory_per_chip=-3GB", "train.learning_rate=.inf"),
    *("bf16[]", "bf16[-1]", "bf16[99999999999999]", "f7[2]", "i32[2]", "causal=true", "2=even"),
    *("99=1", "--xla_nope=1", "--xla_tpu_rwb_fusion=maybe", "every=two", "offload=", "adam"),
    *("int8", "full", "30d", "-5d", "1T", "1e400", "us-east5", "codegen", "rms_norm"),
]


def fill(folder: Path) -> None:
    """Write one file of every wrong kind, and those that `RIGHT` needs."""
    own = "x = 3\ndef f(a): return a\ndef g(): raise KeyError('q')\ndef n(): return None\n"
    job = "model: tiny\non: v6e-4\nmesh: fsdp=4\nbatch_size: 4\nsequence_length: 16\n"
    texts = {
        "own.py": own,
        "syntax.py": "def f(:",
        "raises.py": "raise RuntimeError('boo')",
        "job.yaml": job + "train: {data: nowhere.npy, steps: 1, run_dir: new-run}\n",
        "empty.yaml": "",
        "list.yaml": "- 1\n- 2\n",
        "odd.yaml": "model: {preset: 4}\non: [1]\n",
        "odder.yaml": "model: {preset: tiny, n_layers: -1, foo: 2}\ntrain: []\n",
        "rates.yaml": "rates: [{generation: v6e, usd_per_chip_h: .nan}]",
        "null.json": "null",
        "list.json": "[1, 2]",
        "deep.json": "[" * 5000,
        "object.json": "{}",
        "schema.json": json.dumps({"schema": SCHEMA}),
        "report.json": json.dumps({"schema": SCHEMA}),
        "half.json": json.dumps({"schema": SCHEMA, "memory": 3, "prediction": [], "target": None}),
        "hf/config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": "x"}),
        "run/run.json": "{}",
        "empty.jsonl": "",
        "bad.jsonl": "{nope\n",
        "text.jsonl": '{"text": "a line"}\n' * 20,
    }
    for name in ("hf", "run", "folder", "folder.yaml"):
        (folder / name).mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in ("binary.yaml", "binary.json"):
        (folder / name).write_bytes(bytes(range(256)))
    (folder / "one_op.xplane.pb").write_bytes(ONE_OP)
    np.save(folder / "tokens.npy", np.arange(400, dtype=np.uint16) % 250)
    np.save(folder / "floats.npy", np.zeros((3, 3)))
    (folder / "cut.npy").write_bytes((folder / "tokens.npy").read_bytes()[:40])
    (folder / "odd.bin").write_bytes(b"\0" * 33)
    os.symlink("loop", folder / "loop")


def odd_values(parameter: Parameter, rng: random.Random) -> list[str]:
    """Return what stands behind an option: nothing for a switch, else one odd word."""
    if parameter.kind is bool:
        return []
    if parameter.kind in (int, float):
        return [rng.choice(NUMBERS)]
    return [rng.choice(PATHS if parameter.kind is Path else rng.choice([PATHS, NAMES, NUMBERS]))]


def replaced(command: Command, parameter: Parameter, values: list[str], typed: list[str]) -> None:
    """Put another value of one parameter into what is typed."""
    if not parameter.flag:
        arguments = [one for one in command.parameters if not one.flag]
        place = len(command.words) + arguments.index(parameter)
        typed[place : place + 1] = values
    elif parameter.flag in typed and values:
        place = typed.index(parameter.flag) + 1
        typed[place : place + 1] = values
    else:
        typed += [parameter.flag, *values]


def odd_command(command: Command, rng: random.Random) -> list[str]:
    """Return a command that is right but for one or two values."""
    name = " ".join(command.words)
    typed = [*command.words, *RIGHT[name]]
    choices = [one for one in command.parameters if one.name not in NOT_TYPED.get(name, ())]
    for parameter in rng.sample(choices, min(len(choices), rng.choice([1, 1, 1, 2]))):
        replaced(command, parameter, odd_values(parameter, rng), typed)
    return typed
