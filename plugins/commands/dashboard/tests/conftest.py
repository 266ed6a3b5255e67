"""A run folder as training leaves it, and the dashboard over it."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from dashboard_runs import HOST, KEY, make_run


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "runs" / "first")
    return tmp_path / "runs"


@pytest.fixture
def client(runs):
    """A client with the key, which talks to the application without a socket."""
    from starlette.testclient import TestClient

    from rlhf_dashboard.app import make_app
    from rlhf_dashboard.runs import Runs

    app = make_app(Runs(runs), key=KEY, host="127.0.0.1")
    return TestClient(app, base_url=f"http://{HOST}", headers={"authorization": f"Bearer {KEY}"})


@pytest.fixture
def first(client):
    """The id of the run `first`."""
    (row,) = (row for row in client.get("/api/runs").json()["runs"] if row["name"] == "first")
    return row["id"]
