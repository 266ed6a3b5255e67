from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def make_run() -> Any:
    """`make_run.make_run`; the file stands beside this one, which is no package."""
    spec = importlib.util.spec_from_file_location("make_run", Path(__file__).with_name("make_run.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_run
