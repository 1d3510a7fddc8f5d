"""One process of a job that is told to stop: NUM_HOSTS HOST_ID ADDRESS DIRECTORY."""

import sys
import time
from pathlib import Path

from tpukit.runtime.multihost import MultiHostConfig
from tpukit.training.failure import PreemptionGuard


def main():
    num_hosts, host, address, directory = sys.argv[1:]
    with (
        MultiHostConfig(int(num_hosts), int(host), address, shutdown_timeout_s=20),
        PreemptionGuard() as guard,
    ):
        for step in range(10_000):
            Path(directory, f"started-{host}").touch()
            time.sleep(0.01 * (1 + int(host)))  # the hosts are not in step
            if guard.should_stop(step):
                Path(directory, f"stopped-{host}").write_text(str(step))
                break


if __name__ == "__main__":
    main()
