"""Diagnose this machine for TPU work: findings, and how to fix them."""

from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose_tpu as diagnose_tpu
from .finding import DoctorFinding as DoctorFinding
