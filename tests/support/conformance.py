"""`@conforms("000", 2, "…")`: a test that runs one code block of a document."""

import pytest

conforms = pytest.mark.conforms
