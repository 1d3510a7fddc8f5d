"""`TpuConfig`: document 004's name for the flat settings of `tpu_config.yaml`."""

import os
from typing import Self

from ..job.config import TPUConfig
from ..runtime.calls import either_way


class TpuConfig(TPUConfig):
    """The same settings as `TPUConfig`, whose file can be awaited too."""

    @classmethod
    @either_way
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a YAML file, a job's or one of flat settings, and nothing else."""
        return super().from_file(path)
