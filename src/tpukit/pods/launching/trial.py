"""Find out on this machine whether `tpukit train` would refuse the job on the hosts.

The hosts' own command runs here once with `--dry-run`, in a folder with the shipped files, on as
many CPU devices as the slice has chips.
"""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...errors import ConfigError
from ...job.job import Job
from ...job.model_source import is_own_model
from ...runtime.child import offline_environment
from ...runtime.files import temporary_folder
from ...runtime.progress import Progress
from ...runtime.toolchains.running import run_followed
from .bundle import JOB_FILE, Bundle

MOST_DEVICES = 1024
"""Largest number of virtual devices; the mesh of a larger slice is scaled down to it."""
_STAND_IN = "tokens-of-the-hosts.npy"
_LONGEST = 8192  # tokens per example if the job does not set them


def refuse_untrainable(
    job: Job,
    bundle: Bundle,
    variables: Mapping[str, str],
    *,
    is_local: bool,
    progress: Progress,
) -> list[str]:
    """Run the hosts' command up to its first step.

    Args:
        job: The job as it is shipped.
        bundle: Files for each host.
        variables: Environment variables of the job's processes.
        is_local: Whether the hosts are on this machine, with its files and packages.
        progress: Called when the trial starts.

    Returns:
        What could not be checked here.

    Raises:
        ConfigError: `tpukit train` refuses the job; the message is the command's.
    """
    elsewhere = {} if is_local else _data_elsewhere(job)
    if elsewhere and is_own_model(str(job.model)):
        (key, where), *_ = elsewhere.items()
        return [
            f"{key} is {where}, which only the hosts can read, so model and data are checked there."
        ]
    progress("checking model and data as tpukit train does")
    with temporary_folder("tpukit-trial-") as folder:
        _unpack(bundle, folder)
        command = [sys.executable, "-m", "tpukit", "train", JOB_FILE, "--dry-run"]
        for key in elsewhere:
            _write_stand_in(job, folder / _STAND_IN)
            command += ["--set", f"{key}={_STAND_IN}"]
        ended = run_followed(command, environment=_environment(job, variables), folder=folder)
        if ended.code == 0:
            return []
        lines = [
            line for line in ended.errors.replace(f"{folder}/", "").splitlines() if line.strip()
        ]
    errors = [line for line in lines if line.startswith("error: ")] or lines[-1:]
    why = errors[-1].removeprefix("error: ") if errors else f"it exits with {ended.code}"
    if "No module named" in why and not is_local:
        return [f"Model and data could not be checked here: {why}"]
    raise ConfigError(f"tpukit train would refuse this job, so no pod was requested: {why}")


def _data_elsewhere(job: Job) -> dict[str, str]:
    """Return the keys of data that only the hosts can read."""
    named = {"train.data": job.train.data, "train.eval_data": job.train.eval_data}
    return {
        key: text
        for key, text in named.items()
        if text and ("://" in text or Path(text).is_absolute())
    }


def _unpack(bundle: Bundle, folder: Path) -> None:
    for name, content in bundle.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content.suffix == ".py":  # Python would find unshipped files through links
            shutil.copyfile(content, path)
        else:
            path.symlink_to(content.resolve())


def _write_stand_in(job: Job, path: Path) -> None:
    """Write two batches of tokens as a sparse file, which takes no space."""
    examples = job.batch_size or job.slice.devices * job.microbatches
    tokens = 2 * examples * ((job.sequence_length or _LONGEST) + 1)
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(tokens,))


def _environment(job: Job, variables: Mapping[str, str]) -> dict[str, str]:
    devices = min(job.slice.devices, MOST_DEVICES)
    flags = f"--xla_force_host_platform_device_count={devices}"
    return offline_environment({**variables, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags})
