"""The mark of tests that need a real lab, which are skipped where there can be none."""

import pytest

from tests.lab.hosts import why_not

needs_a_lab = pytest.mark.skipif(bool(why_not()), reason=why_not())
