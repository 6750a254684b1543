"""Puts this folder's helper modules (`mapper_testkit`, `mapper_engines`) on the path; hypothesis profiles.

HYPOTHESIS_PROFILE=fuzz draws fifty times as many examples (nox session `fuzz`).
"""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("h3", deadline=None, max_examples=40, suppress_health_check=QUIET)
settings.register_profile("fuzz", deadline=None, max_examples=2000, suppress_health_check=QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "h3"))
