"""`attacks` is imported by name, as the table of these tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
