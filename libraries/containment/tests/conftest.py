"""`attacks` is imported by name, as the table of these tests."""

import sys
from pathlib import Path

from reward_scores import rollouts as rollouts
from reward_scores import score as score

sys.path.append(str(Path(__file__).parent))
