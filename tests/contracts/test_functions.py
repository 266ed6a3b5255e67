"""Every installed advantage estimator and policy loss keeps its contract, and says what it is without torch."""

from __future__ import annotations

import json
import subprocess
import sys

from running import PATIENCE_SECONDS

from rlhf_testing.contracts import AdvantageContract, PolicyLossContract, contracts_for

globals().update({f"{name}Advantage": each for name, each in contracts_for(AdvantageContract).items()})
globals().update({f"{name}Loss": each for name, each in contracts_for(PolicyLossContract).items()})

LOADED = """
import json, sys
from rlhf_core.plugins.discovery import discover, import_target
for kind in ("advantages", "policy_losses"):
    for ref in discover(kind).values():
        import_target(ref)
print(json.dumps("torch" in sys.modules))
"""


def test_checking_a_run_file_loads_no_torch_for_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert json.loads(done.stdout) is False
