"""Document 004's name for the flat settings of `tpu_config.yaml`."""

from ..job.config import TPUConfig

TpuConfig = TPUConfig
"""The same class: a file of flat settings is read in one place."""
