"""The helpers of these tests are modules beside them, and those of the integration tests."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "integration")]
