from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from rlhf_core.config.resolve import resolve
from rlhf_core.entry.run_record import collect_manifest, git_revision
from rlhf_core.util.redact import redact_command
from rlhf_testing.runs import tiny_run


def test_it_is_json_and_says_what_made_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/bin/rlhf", "train"])
    manifest = collect_manifest(resolve(tiny_run({"train": {"seed": 3}})))
    assert json.loads(json.dumps(manifest)) == manifest
    assert manifest["libraries"]["pydantic"] == version("pydantic")
    assert "rlhf-core" in manifest["plugins"]
    assert manifest["seed"] == 3 and manifest["command"] == ["rlhf", "train"]
    assert manifest["git_revision"] is None and manifest["working_folder"] == str(tmp_path)
    assert manifest["owners"]["algorithms"]["ppo"].startswith("rlhf-ppo ")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--set", "rewards.0.api_key=abcdef"], ["--set", "rewards.0.api_key=***"]),
        (["--token", "abcdef", "x"], ["--token", "***", "x"]),
        (["--token", "abc", "--set", "rewards.0.api_key=abc"], ["--token", "***", "--set", "rewards.0.api_key=***"]),
        (["--hf-token=abcdef"], ["--hf-token=***"]),
        (["--set", "rewards.0.url=http://me:pw@host/x"], ["--set", "rewards.0.url=http://***@host/x"]),
        (["--set", "engine.max_new_tokens=64"], ["--set", "engine.max_new_tokens=64"]),
        (["--reward", "exact-match:1"], ["--reward", "exact-match:1"]),
    ],
)
def test_secrets_are_taken_out(command, shown, monkeypatch):
    monkeypatch.setattr("rlhf_core.util.redact._known", {})
    assert redact_command(command) == shown


def test_git_revision_tells_the_commit_and_changes(tmp_path: Path):
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.hooksPath=/dev/null")
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)
        return done.stdout.decode().strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert git_revision(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "file").write_text("2")
    assert git_revision(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": True}
