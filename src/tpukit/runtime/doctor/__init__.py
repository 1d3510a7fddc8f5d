"""What is here, what is wrong with it and how to mend it."""

from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose_tpu as diagnose_tpu
from .finding import DoctorFinding as DoctorFinding
