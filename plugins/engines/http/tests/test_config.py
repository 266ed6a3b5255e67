"""Options that are refused, and those that are fine."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from running import run_rlhf

from rlhf_engine_http.config import HttpEngineConfig

LOCAL = "http://localhost:8000"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "url"),
        ({"url": []}, "should be an address"),
        ({"url": "localhost:8000"}, "should be http://HOST"),
        ({"url": "http://me:secret@host"}, "api_key_env"),
        ({"url": f"{LOCAL}?key=1"}, "should not contain"),
        ({"url": [LOCAL, f"{LOCAL}/"]}, "a server twice"),
        ({"url": "http://gpu-box:8000"}, "http://gpu-box:8000 is another machine: set weights_folder"),
        ({"url": LOCAL, "weights_folder": "weights"}, "absolute path"),
        ({"url": LOCAL, "server_weights_folder": "/weights"}, "needs weights_folder"),
        ({"url": LOCAL, "kind": "tgi"}, "kind"),
        ({"url": LOCAL, "top_p": 0.9}, "top_p needs top_k"),
        ({"url": LOCAL, "top_k": 4000}, "at most 1024 with the engine http"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        HttpEngineConfig(**options)


def test_one_address_or_several():
    assert HttpEngineConfig(url=f"{LOCAL}/").url == [LOCAL]
    remote = HttpEngineConfig(url=["http://a:1", "http://b:1"], weights_folder="/shared")
    assert remote.url == ["http://a:1", "http://b:1"]


@pytest.mark.slow
def test_a_run_is_checked_and_planned_without_the_server():
    url = ("--engine", "http", "--set", "engine.url=http://localhost:9")
    assert "can run" in run_rlhf("train", *url, "--dry-run").stdout
    plans = [run_rlhf("plan", *engine).stdout for engine in (url, ("--engine", "hf"))]
    assert ["key-value cache" in plan for plan in plans] == [False, True]
    missing = run_rlhf("train", "--engine", "http", "--dry-run")
    assert missing.returncode == 2 and "engine.url: is required" in missing.stderr
