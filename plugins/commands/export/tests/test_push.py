"""`rlhf export --push`: the uploads to a stand-in of the hub, and the errors of a real one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hub_stand_in import TOKEN, Hub
from run_files import start
from running import PATIENCE_SECONDS
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_cli.main import run
from rlhf_testing.models import builtin_model

pytestmark = pytest.mark.usefixtures("no_plots")
RUN = {"train": {"episodes": 1, "prompts_per_episode": 4}, "checkpoint": {"every_episodes": 1}}


def push(source: Path, *arguments: str) -> int:
    return run(["export", str(source), "--push", "me/model", *arguments])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with a file that must not be uploaded."""
    folder = tmp_path / "base"
    made, tokenizer = builtin_model("builtin:tiny-digits", 0)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / ".env").write_text("KEY=secret")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "file").write_text("secret")
    return folder


@pytest.mark.slow
def test_a_finished_run_is_uploaded_by_the_command_itself(tmp_path: Path, hub: Hub) -> None:
    start(RUN, tmp_path / "run")
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "rlhf_cli", "export", str(tmp_path / "run"), "--push", "me/model", "--private"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{hub.address}/me/model: the policy of {tmp_path / 'run' / 'model'}\n"
    assert TOKEN not in done.stdout + done.stderr
    repo = hub.repositories["me/model"]
    assert repo["private"] and repo["messages"] == ["Upload a model trained by rlhf"]
    assert not any("samples" in path or "config.yaml" in path for path in repo["files"]["main"])
    assert repo["files"]["main"]["README.md"].startswith(b"---\nlibrary_name: transformers\n")
    for path, content in repo["files"]["main"].items():
        (tmp_path / "got").mkdir(exist_ok=True)
        (tmp_path / "got" / path).write_bytes(content)
    assert AutoTokenizer.from_pretrained(tmp_path / "got").encode("12")
    got, trained = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("got", "run/model"))
    assert all(got[name].equal(trained[name]) for name in trained)


def test_a_model_folder_goes_to_a_branch_without_hidden_files(model: Path, hub: Hub) -> None:
    hub.add("me/model")
    assert push(model, "--revision", "second", "--message", "Better") == 0
    repo = hub.repositories["me/model"]
    assert repo["messages"] == ["Better"] and not repo["files"]["main"]
    assert set(repo["files"]["second"]) == {each.name for each in model.iterdir() if each.name[0] != "."}


def test_a_checkpoint_is_exported_first(tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    start(RUN, tmp_path / "run")
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert push(checkpoint, "--dtype", "bfloat16") == 0
    assert capsys.readouterr().out == f"{hub.address}/me/model: the policy of {checkpoint}\n"
    files = hub.repositories["me/model"]["files"]["main"]
    assert b'"dtype": "bfloat16"' in files["config.json"] and "model.safetensors" in files
    assert push(tmp_path / "run", "--to", str(tmp_path / "new")) == 0
    assert len(hub.repositories["me/model"]["messages"]) == 2


@pytest.mark.slow
def test_an_adapter_of_a_folder_here_is_refused(
    tmp_path: Path, model: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    start({**RUN, "model": {"path": str(model), "lora": {"r": 2}}}, tmp_path / "run")
    assert push(tmp_path / "run") == 2
    assert "is not on the hub" in capsys.readouterr().err and not hub.requests
    assert push(tmp_path / "run", "--merge-lora") == 0
    assert "model.safetensors" in hub.repositories["me/model"]["files"]["main"]


def test_a_link_is_refused(model: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "id_rsa").write_text("private")
    (model / "notes.txt").symlink_to(tmp_path / "id_rsa")
    assert push(model) == 2
    assert "notes.txt is a link" in capsys.readouterr().err and not hub.requests
    assert push(model, "--to", str(tmp_path / "new")) == 0
    assert "notes.txt" not in hub.repositories["me/model"]["files"]["main"]


def refusal(capsys: pytest.CaptureFixture[str], code: int, expected: int = 2) -> str:
    assert code == expected
    err = capsys.readouterr().err
    assert TOKEN not in err
    return err


def test_what_the_hub_refuses_is_named(
    model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "a name on the hub" in refusal(capsys, run(["export", str(model), "--push", "model"]))
    assert "there is nothing to do" in refusal(capsys, run(["export", str(model)]))
    assert "need --push" in refusal(capsys, run(["export", str(model), "--to", "x", "--private"]))
    others = refusal(capsys, run(["export", str(model), "--push", "others/model"]))
    assert "may not write to others/model" in others and "don't have the rights" in others
    hub.add("me/model")
    assert "exists and is public" in refusal(capsys, push(model, "--private"))
    hub.users.clear()
    assert "does not accept the token" in refusal(capsys, push(model))
    hub.users[TOKEN] = "me"
    (model / "README.md").write_text("---\nbase_model: /data/me/base\n---\n")
    assert 'Invalid metadata in README.md. - "base_model" is not valid' in refusal(capsys, push(model))
    monkeypatch.delenv("HF_TOKEN")
    assert "hf auth login" in refusal(capsys, push(model, "--to", str(model.parent / "new")))
    assert not (model.parent / "new").exists()
    assert not hub.repositories["me/model"]["files"]["main"]


def test_without_a_hub_it_says_what_to_check(
    model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    assert f"{address} does not respond" in refusal(capsys, push(model))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE disables the hub" in refusal(capsys, push(model))


def test_the_upload_has_a_deadline(model: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.stalled = threading.Event()
    err = refusal(capsys, push(model, "--timeout", "0.02"), expected=1)
    assert "waited 1.2 s for the upload to me/model" in err and "--timeout" in err
