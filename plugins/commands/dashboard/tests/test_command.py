"""`rlhf dashboard` as a process: where it listens, what it prints, how it ends."""

import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from running import PATIENCE_SECONDS

from rlhf_core.errors import UserInputError


def start(*arguments, **environment):
    command = [sys.executable, "-m", "rlhf_cli", "dashboard", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )


def test_it_serves_until_it_is_stopped(runs):
    process = start(runs, "--port", "0", "--api-key-env", "DASHBOARD_KEY", DASHBOARD_KEY="abc")
    try:
        said = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", said)[0]
        assert "abc" not in said
        request = urllib.request.Request(f"{address}api/runs", headers={"Authorization": "Bearer abc"})
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            assert b'"first"' in answer.read()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert (rest, process.returncode) == ("stopped\n", 0)
    finally:
        process.kill()
        process.communicate()


def test_a_key_is_not_written_to_a_log(runs, monkeypatch):
    from rlhf_dashboard.command import dashboard

    with pytest.raises(UserInputError, match="not a terminal") as refused:
        dashboard.main([str(runs)], standalone_mode=False)
    assert "--api-key-env" in refused.value.hint
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UserInputError, match="is not set"):
        dashboard.main([str(runs), "--api-key-env", "NO_SUCH_KEY"], standalone_mode=False)


def test_a_port_that_is_taken_is_named(runs, monkeypatch):
    import socket

    from rlhf_dashboard.command import dashboard

    monkeypatch.setenv("DASHBOARD_KEY", "abc")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserInputError, match=f"port {port}"):
            dashboard.main([str(runs), "--port", str(port), "--api-key-env", "DASHBOARD_KEY"], standalone_mode=False)
