"""The contract of environments, with the shell agent."""

import pytest
from played import AGENT, WRITES

from rlhf_containment.sandbox import missing
from rlhf_testing.contracts import EnvironmentContract


@pytest.mark.skipif(missing("namespaces") is not None, reason=f"needs namespaces: {missing('namespaces')}")
class TestContract(EnvironmentContract):
    plugin = "program"
    options = {
        "command": ["python", str(AGENT), "{prompt}"],
        "read": [str(AGENT)],
        "score": ["grep", "-qx", "hello", "greeting"],
    }
    records = [{"prompt": [{"role": "user", "content": f"Write hello to the file greeting{mark}"}]} for mark in ".!"]
    replies = (WRITES, "Done.")
