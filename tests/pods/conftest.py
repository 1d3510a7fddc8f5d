"""Emulators for tests: one authority a process, because gRPC reads its roots of trust once."""

import os

import pytest

from tpukit.pods.emulators.identity import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    made = Authority(tmp_path_factory.mktemp("authority"))
    os.environ["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = str(made.root_file)
    return made
