"""Examples of every command, for `--help` and docs/cli.md."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "doctor": ("tpukit doctor", "tpukit doctor --deep --json"),
    "slices": ("tpukit slices", "tpukit slices v6e"),
    "slice": ("tpukit slice v5p-128", "tpukit slice 2xv6e-256 --json"),
    "prices": (
        "tpukit prices v6e --region us-east5",
        "tpukit prices v5p --region europe --tier spot",
    ),
    "presets": ("tpukit presets", "tpukit presets qwen3 --json"),
    "plan": (
        "tpukit plan llama3.1-70b --tokens 1e12 --deadline 30d --no-verify",
        "tpukit plan llama3.1-8b --tokens 1e11 --on v6e,v5p -o job.yaml",
        "tpukit plan llama3.1-70b --serve --batch 32 --context 8192",
        "tpukit plan llama3.1-8b --tokens 100M --lora-rank 16 --lora-base int4",
        "tpukit plan my_model.py:build --tokens 1e9 --on v6e-8",
    ),
    "check": (
        "tpukit check llama3.1-8b --on v6e-8 --batch-size 8 --sequence-length 8192",
        "tpukit check job.yaml --on v5p-128 --fix --html report.html",
        "tpukit check my_model.py:build --on v6e-8",
        "tpukit check --torch my_model.py:build --on v6e-8 --batch-size 8",
        "tpukit check my_model.py:step --on v6e-8 --arg 'bf16[8,4096]'",
        "tpukit check --on v6e-8 -- python train.py --batch 512",
        "tpukit check --on v5e-64,v6e-32 --per-step 524288 -- python train.py",
    ),
    "compile": (
        "tpukit compile my_model.py:step --on v6e-8 --arg 'bf16[8,4096]'",
        "tpukit compile my_model.py:step --on v6e-8 --arg 'bf16[8@fsdp,4096]'",
        "tpukit compile my_model.py:build --on v6e-8 --hlo step.hlo",
    ),
    "train": (
        "tpukit train tiny --data corpus/ --steps 100 --run-dir runs/one",
        "tpukit train job.yaml --data corpus/",
    ),
    "profile": ("tpukit profile runs/one", "tpukit profile runs/one --html profile.html"),
    "launch": (
        "tpukit launch job.yaml --on v6e-16 --provider local",
        "tpukit launch job.yaml --on v6e-64 --provider gke --spot --dry-run",
    ),
    "top": ("tpukit top", "tpukit top runs/one --once"),
    "dashboard": ("tpukit dashboard", "tpukit dashboard runs/ --port 0 --open"),
    "generate": ('tpukit generate runs/one --prompt "def "', "tpukit generate exported/ --chat"),
    "export": ("tpukit export runs/one exported/", "tpukit export runs/one adapters/ --adapters"),
    "quantize": (
        "tpukit quantize exported/ --calibration corpus.jsonl --target-retention 0.98 -o small/",
        "tpukit quantize published/ --verdict --on v6e,7x",
    ),
    "rehearse": ("tpukit rehearse job.yaml",),
    "mcp": ("tpukit mcp",),
    "pods ls": ("tpukit pods ls", "tpukit pods ls --json"),
    "pods up": ("tpukit pods up mine --on v6e-8 --provider local",),
    "pods down": ("tpukit pods down mine",),
    "pods forget": ("tpukit pods forget mine",),
    "pods attach": ("tpukit pods attach mine", "tpukit pods attach mine --namespace research"),
    "pods logs": ("tpukit pods logs mine", "tpukit pods logs mine --no-follow --json"),
    "pods ssh": ("tpukit pods ssh mine --host 1",),
    "pods cost": ("tpukit pods cost", "tpukit pods cost mine"),
    "pods preflight": ("tpukit pods preflight job.yaml --provider gcp",),
    "pods lint": ("tpukit pods lint manifests/ --nodes nodes.yaml",),
    "pods emulate": ("tpukit pods emulate", "tpukit pods emulate gcp"),
    "data prepare": (
        "tpukit data prepare corpus.jsonl -o corpus/ --tokenizer bytes",
        "tpukit data prepare chats.jsonl -o chats/ --tokenizer exported/ --chat",
    ),
    "data inspect": ("tpukit data inspect corpus/ --tokenizer bytes --html corpus.html",),
    "kernel list": ("tpukit kernel list",),
    "kernel bench": (
        "tpukit kernel bench flash_attention --on v6e --quick",
        "tpukit kernel bench flash_attention --on v6e,v5p --backward",
    ),
    "kernel tune": ("tpukit kernel tune flash_attention --on v6e --dry-run",),
    "flags check": (
        'tpukit flags check "--xla_tpu_rwb_fusion=false"',
        "tpukit flags check --on v6e",
    ),
    "flags list": ("tpukit flags list windowed", "tpukit flags list --level 3 --on v6e"),
    "flags explain": ("tpukit flags explain xla_tpu_rwb_fusion",),
    "flags tune": (
        "tpukit flags tune llama3.1-8b --on v6e-8 --batch-size 24",
        "tpukit flags tune --on v6e-8 -- python train.py",
    ),
    "cache show": ("tpukit cache show",),
    "cache clear": ("tpukit cache clear",),
    "report diff": ("tpukit report diff before.json after.json",),
    "report html": ("tpukit report html check.json -o check.html",),
    "report perfetto": ("tpukit report perfetto check.json -o check.pftrace",),
    "config show": ("tpukit config show job.yaml", "tpukit config show --preset training"),
    "config check": ("tpukit config check job.yaml --set on=v6e-8",),
}


def epilog(path: str) -> str | None:
    """Return the text below a command's help; None for a command without examples."""
    lines = EXAMPLES.get(path)
    # \b keeps the lines separate, so that they can be copied.
    return None if lines is None else "\n".join(["\b", "Examples:", *(f"  {one}" for one in lines)])
