"""The environment of the whole suite: no metadata look-ups, eight virtual CPU devices, no TPU."""

import gc
import logging
import os
import signal
from importlib.metadata import version
from pathlib import Path

import pytest
from chromium import BROWSERS, Browser, find_browser
from hypothesis import HealthCheck, settings

pytest_plugins = ["leftovers", "recorded_times", "skips", "slow_cases"]

# Most of the suite's time is XLA compiling small programs for the CPU. Its newest way of emitting
# loops takes three times as long as the older one, and LLVM's optimizations half of the rest
# (measured); no test is about the CPU's speed. A jaxlib that does not know a flag ends the process,
# so these are for the one they were tried with.
FAST_COMPILES = (
    " --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
    if version("jaxlib")[:4] == "0.10"
    else ""
)

os.environ.update(
    TPU_SKIP_MDS_QUERY="1",
    NO_GCE_CHECK="true",
    JAX_PLATFORMS="cpu",
    XLA_FLAGS="--xla_force_host_platform_device_count=8" + FAST_COMPILES,
    # One thread a worker for torch and numpy: with more, workers fight for the cores, and threads
    # that wait for each other spin (half of the torch tests' processor time went there).
    OMP_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    # Not the user's own cache; kept between runs, so that a second run compiles less.
    TPUKIT_CACHE_DIR=str(Path(__file__).parents[1] / ".cache" / "tests"),
    # matplotlib lists the machine's fonts in its own folder: minutes of work, kept as well.
    MPLCONFIGDIR=str(Path(__file__).parents[1] / ".cache" / "matplotlib"),
    # Nor the user's own pods.
    TPUKIT_STATE_DIR=str(Path(__file__).parents[1] / ".cache" / "state"),
)

# A shell starts what runs in its background deaf to Ctrl-C, and every child of it would be too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A full machine is no fault of a test: hypothesis judges how long examples take by the clock.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# Collecting tests makes only what stays: a sixth of its time went into looking for garbage.
gc.disable()


def pytest_collection_finish():
    """Keep the collector off what stays to the end: a tenth of the suite's time went there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


LOGGER = logging.getLogger("tpukit")
AT_FIRST = LOGGER.propagate, LOGGER.level, [*LOGGER.handlers]


@pytest.fixture(autouse=True)
def logging_as_at_first():
    """A command sets up logging for its process, which here is that of every other test too.

    What a fixture of a whole module set up is undone as well, so it is before a test, not after.
    """
    LOGGER.propagate, level, handlers = AT_FIRST
    LOGGER.handlers = [*handlers]
    LOGGER.setLevel(level)


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    """Who signs for emulators: one a process, because gRPC reads its roots of trust once."""
    from tpukit_emulators.identity import Authority

    made = Authority(tmp_path_factory.mktemp("authority"))
    os.environ["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = str(made.root_file)
    return made


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = find_browser()
    if program is None:
        pytest.skip(f"no browser ({', '.join(BROWSERS)}); apt-get install chromium to run this")
    opened = Browser(program, tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()
