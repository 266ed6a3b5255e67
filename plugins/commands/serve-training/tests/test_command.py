"""The command's options, without a server."""

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from rlhf_core.errors import UserInputError
from rlhf_serve_training import launchers
from rlhf_serve_training.command import serve_training
from rlhf_serve_training.running import check_keys
from rlhf_serve_training.settings import parse_settings, parse_tenants

KEY = "tml-" + "k" * 40


def test_settings():
    settings = parse_settings(["strategy.precision=bf16", "limits.disk_bytes=1e10", "model.micro_batch_tokens=512"])
    assert settings.strategy == {"precision": "bf16"}
    assert settings.limits == {"disk_bytes": 1e10}
    assert settings.model == {"micro_batch_tokens": 512}


@pytest.mark.parametrize(
    "change",
    ["x", "strategy=1", "limits.nothing=1", "other.x=1", "limits.models=-1", "limits.models=2.5", "model.path=x"],
)
def test_wrong_settings_are_named(change):
    with pytest.raises(UserInputError) as caught:
        parse_settings([change])
    assert change.partition("=")[0] in str(caught.value)


def test_tenants_and_keys(monkeypatch):
    assert parse_tenants(["a=KEY_A", "b=KEY_B"]) == {"a": "KEY_A", "b": "KEY_B"}
    for wrong in (["a"], ["=X"], ["a=X", "a=Y"], ["../x=Y"]):
        with pytest.raises(UserInputError):
            parse_tenants(wrong)
    monkeypatch.setenv("KEY_A", KEY)
    assert check_keys({"a": "KEY_A"}) == {"a": KEY}
    monkeypatch.setenv("KEY_B", KEY)
    with pytest.raises(UserInputError, match="has the key of another tenant"):
        check_keys({"a": "KEY_A", "b": "KEY_B"})
    monkeypatch.setenv("KEY_A", "sk-short")
    with pytest.raises(UserInputError, match="must start with tml-"):
        check_keys({"a": "KEY_A"})


def test_plan(base, tmp_path):
    arguments = [
        "--base",
        base,
        "--output",
        str(tmp_path / "o"),
        "--plan",
        "--strategy",
        "fsdp",
        "--num-processes",
        "2",
    ]
    result = CliRunner().invoke(serve_training, arguments, catch_exceptions=False)
    assert "second copy of it for sampling" in result.output
    assert "one training checkpoint of rank 32" in result.output
    assert not (tmp_path / "o").exists()


def test_refusals(base, tmp_path, monkeypatch):
    monkeypatch.delenv("RLHF_SERVE_TRAINING_KEY", raising=False)
    arguments = ["--base", base, "--output", str(tmp_path / "o")]
    for more, message in (
        (["--set", "transport.address=auto"], "local does not have the option address"),
        (["--transport", "ray", "--set", "transport.adress=auto"], "Extra inputs are not permitted"),
        (["--strategy", "gemini", "--max-adapters", "2"], "gemini holds one adapter, not 2"),
        (["--set", "model.dtype=bf16"], "'bf16' is not a dtype"),
        ([], "a key must not be written to a log"),
    ):
        with pytest.raises(UserInputError, match=message):
            CliRunner().invoke(serve_training, [*arguments, *more], catch_exceptions=False)


def test_a_transport_that_starts_runs_only_is_refused_by_name(monkeypatch):
    class RunsOnly:
        def run(self, request):
            raise AssertionError

    selected = SimpleNamespace(build=lambda config, context: RunsOnly())
    monkeypatch.setattr(launchers, "plugin_of", lambda *arguments: (selected, None))
    with pytest.raises(UserInputError, match="'other' starts runs, but not the ranks of a service"):
        launchers.launcher_of("other", {})
