"""Settings, and words as they are typed: jobs, flags, slices, rates, manifests, MCP requests."""

import json
import re
from pathlib import Path

import numpy as np

from .kinds import YAML_ATTACKS, command, kind

JOB = """\
model: tiny
on: v6e-4
mesh: {fsdp: 2, tensor: 2}
batch_size: 8
sequence_length: 64
remat: minimal
strategy: fsdp+megatron
memory_per_chip: 16GB
options: {xla_tpu_rwb_fusion: false}
train:
  data: tokens.npy
  steps: 10
  learning_rate: 3.0e-4
  z_loss: 1.0e-4
  optimizer: adamw
  weight_decay: 0.1
  checkpoint_every: 5
  run_dir: run
launch:
  provider: local
  spot: true
  environment: {NAME: value}
"""


@kind(
    "job",
    command("config", "show", "job.yaml"),
    command("config", "show", "job.yaml", "--json"),
    command("config", "check", "job.yaml"),
    command("launch", "job.yaml", "--provider", "local", "--dry-run"),
    command("train", "job.yaml", "--dry-run"),
    only="*.yaml",
    known=[("job.yaml", content) for content in YAML_ATTACKS],
)
def _job(folder):
    np.save(folder / "tokens.npy", np.arange(4000, dtype=np.uint16) % 250)
    (folder / "job.yaml").write_text(JOB)


SETTINGS = """\
tpu_version: v6e
num_chips: 8
topology: 2x4
mesh_shape: [4, 2]
memory_per_chip: 16GB
memory_fraction: 0.9
precision: bfloat16
xla_optimization_level: 2
batch_size_per_chip: 4
enable_rematerialization: true
project: mine
zone: us-east5-a
"""


@kind(
    "settings",
    command("config", "show", "settings.yaml"),
    command("config", "check", "settings.yaml", "--json"),
    known=[("settings.yaml", content) for content in YAML_ATTACKS],
)
def _settings(folder):
    (folder / "settings.yaml").write_text(SETTINGS)


def _each_line(file, *readers):
    """Return a reader that hands each line of a file to functions that take text."""

    def read():
        from tpukit.errors import TPUError

        for number, line in enumerate(Path(file).read_bytes().split(b"\n")):
            text = line.decode(errors="surrogateescape")  # as a shell's words arrive
            try:
                readers[number % len(readers)](text)
            except TPUError:
                continue

    return read


def _inspect_flags(text):
    from tpukit.runtime.flags import Flag, FlagRegistry
    from tpukit.runtime.flags.inspection import inspect_environment, inspect_flags
    from tpukit.runtime.flags.syntax import format_flags, merge_flags, parse_flags

    types = {"xla_tpu_rwb_fusion": "bool", "xla_dump_to": "string", "xla_tpu_limit_kib": "int64"}
    registry = FlagRegistry(
        [Flag(name=name, parsers=("libtpu",), type=type_) for name, type_ in types.items()],
        jaxlib_version="1",
        libtpu_version="2",
    )
    inspect_environment({"XLA_FLAGS": text, "LIBTPU_INIT_ARGS": text}, registry=registry)
    merge_flags(text, {"xla_dump_to": "x"})
    inspect_flags(text, registry=registry).to_dict()
    format_flags({name: str(value) for name, value in parse_flags(text).items()})


@kind("flags", _each_line("flags.txt", _inspect_flags))
def _flags(folder):
    lines = ["--xla_tpu_rwb_fusion=false --xla_dump_to='my folder'", "--xla_tpu_limit_kib=65536"]
    lines += ["-xla_dump_to folder --noxla_tpu_rwb_fusion", '--xla_dump_to="a b" --xla_nope=1']
    (folder / "flags.txt").write_text("\n".join(lines))


WORDS = [
    "2xv6e-256",
    "v5p:4x4x8",
    "tpu7x-16",
    "fsdp=8,tensor=4",
    "bf16[8,128]",
    "31.25GiB",
    "2 weeks",
    "1.5T",
    "$50,000",
    "fsdp+megatron",
    "vq:2x16x2",
    "4x4x8",
    "int8",
    "bfloat16",
    "jax0.11",
    "train.z_loss=1e-4",
]


def _readers():
    """Return the function that reads each word."""
    from tpukit.compiler.program.entry import parse_argument
    from tpukit.hardware import Slice, parse_format
    from tpukit.hardware.mesh_sizes import parse_mesh
    from tpukit.hardware.stored_formats import parse_cache_format
    from tpukit.hardware.topology import parse_shape
    from tpukit.job.document import parse_assignments
    from tpukit.job.sections import parse_bytes
    from tpukit.parallel.sharding.strategy import parse_strategy
    from tpukit.planner.amounts import parse_days, parse_tokens, parse_usd
    from tpukit.quantization.formats import parse_vq_format
    from tpukit.runtime.toolchains.toolchain import parse_toolchains

    return [
        Slice.parse,
        Slice.parse,
        Slice.parse,
        parse_mesh,
        parse_argument,
        parse_bytes,
        parse_days,
        parse_tokens,
        parse_usd,
        parse_strategy,
        parse_vq_format,
        parse_shape,
        parse_cache_format,
        parse_format,
        parse_toolchains,
        lambda text: parse_assignments([text]),
    ]


def _read_words():
    _each_line("words.txt", *_readers())()


def _long_words():
    """Every word with a number of more digits than Python reads."""
    words = "\n".join(WORDS)
    return [re.sub("[0-9]+", digits, words).encode() for digits in ("9" * 5000, "0" * 5000, "٣")]


@kind("words", _read_words, known=[("words.txt", words) for words in _long_words()])
def _words_file(folder):
    (folder / "words.txt").write_text("\n".join(WORDS))


@kind(
    "manifests",
    command("pods", "lint", "jobset.yaml"),
    command("pods", "lint", "jobset.yaml", "--json"),
    known=[("jobset.yaml", content) for content in YAML_ATTACKS],
)
def _manifests(folder):
    (folder / "jobset.yaml").write_text(_JOBSET)


_JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: train
  labels: {kueue.x-k8s.io/queue-name: tpus}
spec:
  failurePolicy: {maxRestarts: 3}
  replicatedJobs:
  - name: slice
    replicas: 2
    template:
      spec:
        parallelism: 4
        completions: 4
        backoffLimit: 0
        template:
          spec:
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu-v6e-slice
              cloud.google.com/gke-tpu-topology: 4x4
            restartPolicy: Never
            containers:
            - name: main
              image: python:3.12
              command: [python, train.py]
              env: [{name: A, value: b}]
              resources: {limits: {google.com/tpu: 4}}
---
apiVersion: v1
kind: Service
metadata: {name: train}
spec: {clusterIP: None, selector: {a: b}}
"""


@kind(
    "rates",
    command("prices", "v6e", "--rates", "rates.yaml"),
    command("prices", "--rates", "rates.yaml", "--json"),
    known=[("rates.yaml", content) for content in YAML_ATTACKS],
)
def _rates(folder):
    rates = [{"generation": "v6e", "region": "us-east5", "tier": "mine", "usd_per_chip_h": 1.5}]
    text = json.dumps({"source": "a contract", "date": "2026-01-01", "rates": rates * 2})
    (folder / "rates.yaml").write_text(text)


_REQUESTS = [
    ("slice", {"name": "v5p-128"}),
    ("slices", {"generation": "v6e"}),
    ("flags", {"pattern": "rwb"}),
    ("flag", {"name": "xla_tpu_rwb_fusion"}),
    ("check_flags", {"flags": "--xla_tpu_rwb_fusion=false"}),
    ("kernels", {}),
    ("plan", {"model": "tiny", "tokens": "1e9", "on": "v6e-4", "top": 1, "budget": "50k"}),
    ("write_job", {"name": "job.yaml", "job": {"model": "tiny", "on": "v6e-4", "batch_size": 4}}),
]


def _ask():
    import anyio
    from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError

    from tpukit.mcp import server as mcp_server
    from tpukit.mcp.access import Access
    from tpukit.runtime.flags import Flag, FlagRegistry
    from tpukit.runtime.progress import silent

    registry = FlagRegistry(
        [Flag(name="xla_tpu_rwb_fusion", parsers=("libtpu",), type="bool")],
        jaxlib_version="1",
        libtpu_version="2",
    )
    FlagRegistry.installed = classmethod(lambda cls, **_: registry)
    mcp_server.telling = lambda context: silent  # no client is there to be told
    server = mcp_server.make_server(Access(folder=Path("jobs")))
    whole = {json.dumps(one).encode() for one in _REQUESTS}
    for request in Path("requests.jsonl").read_bytes().splitlines():
        if request in whole and _ask.warm:
            continue  # only what is damaged is asked again
        try:
            tool, arguments = json.loads(request)
        except (ValueError, TypeError, RecursionError):
            continue  # the SDK's to refuse
        if not isinstance(tool, str) or tool not in _TOOLS or not isinstance(arguments, dict):
            continue
        try:
            anyio.run(server.call_tool, tool, arguments)
        except UnexpectedToolError as error:
            raise error.__cause__ or error from None
        except ToolError:
            continue

    _ask.warm = True


_ask.warm = False
_TOOLS = {tool for tool, _ in _REQUESTS}


@kind("MCP requests", _ask)
def _requests(folder):
    (folder / "jobs").mkdir()
    lines = "".join(json.dumps(one) + "\n" for one in _REQUESTS)
    (folder / "requests.jsonl").write_text(lines)
