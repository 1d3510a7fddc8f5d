"""What `tpukit train` would refuse on the hosts, found on this machine before a pod is asked for.

The very command of the hosts runs here once with `--dry-run`, in a folder with what is shipped and
on as many CPU devices as the slice has chips.
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
"""More virtual devices take long to make; the mesh of a larger slice is scaled down to these."""
_STAND_IN = "tokens-of-the-hosts.npy"
_LONGEST = 8192  # tokens in an example, where the job leaves that to the model


def refuse_untrainable(
    job: Job,
    bundle: Bundle,
    variables: Mapping[str, str],
    *,
    is_local: bool,
    progress: Progress,
) -> list[str]:
    """Run the command of the hosts up to its first step.

    Args:
        job: As it is shipped.
        bundle: The files that hosts get.
        variables: Of the job's processes.
        is_local: Whether the hosts are on this machine, and have its files and packages.
        progress: Told that this is under way.

    Returns:
        What could not be checked here, for the user to know.

    Raises:
        ConfigError: `tpukit train` refuses the job; the message is its own.
    """
    elsewhere = {} if is_local else _data_elsewhere(job)
    if elsewhere and is_own_model(str(job.model)):
        (key, where), *_ = elsewhere.items()
        return [f"{key} is {where}, which only the hosts see: model and data are checked there."]
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
        said = [
            line for line in ended.errors.replace(f"{folder}/", "").splitlines() if line.strip()
        ]
    told = [line for line in said if line.startswith("error: ")] or said[-1:]
    why = told[-1].removeprefix("error: ") if told else f"it exits with {ended.code}"
    if "No module named" in why and not is_local:
        return [f"Model and data could not be checked here: {why}"]
    raise ConfigError(f"tpukit train would refuse this job, so no pod is asked for: {why}")


def _data_elsewhere(job: Job) -> dict[str, str]:
    """Return the keys of data that hosts find in places of their own."""
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
        elif content.suffix == ".py":  # Python follows links, and would find what is not shipped
            shutil.copyfile(content, path)
        else:
            path.symlink_to(content.resolve())


def _write_stand_in(job: Job, path: Path) -> None:
    """Write two batches of tokens as a sparse file, which takes no room."""
    examples = job.batch_size or job.slice.devices * job.microbatches
    tokens = 2 * examples * ((job.sequence_length or _LONGEST) + 1)
    np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(tokens,))


def _environment(job: Job, variables: Mapping[str, str]) -> dict[str, str]:
    devices = min(job.slice.devices, MOST_DEVICES)
    flags = f"--xla_force_host_platform_device_count={devices}"
    return offline_environment({**variables, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags})
