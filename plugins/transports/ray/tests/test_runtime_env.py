"""What Ray prepares for the actors, and which variables only they and the driver ever see."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from running import run_rlhf

from rlhf_core.config.resolve import resolve
from rlhf_core.entry.train import check_run
from rlhf_core.errors import ConfigError, RlhfError, UserInputError
from rlhf_core.util import redact_mapping
from rlhf_ray import cluster
from rlhf_ray.cluster import check_loopback_patch, connect
from rlhf_ray.config import RayConfig
from rlhf_ray.runtime_env import JOB_CONFIG, init_options, own_variables

RunFile = Callable[..., dict[str, Any]]


def variables(**values: Any) -> dict[str, Any]:
    return {"env_vars": values}


def test_what_looks_like_a_secret_or_is_copied_is_not_given_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPIED", "from here")
    option = {"pip": ["one"], **variables(LEVEL="3", HF_TOKEN="hf_abcdef", COPIED=None)}
    assert init_options(option) == {"runtime_env": {"pip": ["one"], **variables(LEVEL="3")}}
    assert own_variables(option) == {"HF_TOKEN": "hf_abcdef", "COPIED": "from here"}
    assert init_options(variables(HF_TOKEN="hf_abcdef")) == init_options({}) == init_options(None) == {}
    assert own_variables(None) == own_variables({"pip": ["one"]}) == {}


def test_a_variable_to_copy_must_be_set() -> None:
    with pytest.raises(
        UserInputError, match=r"(?s)not set in the environment of this command: NOWHERE.*export NOWHERE"
    ):
        init_options(variables(NOWHERE=None))


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"env_var": {"A": "1"}}, 'Ray does not have the key env_var; did you mean "env_vars"?'),
        ({"working_dir": "/nowhere/at/all"}, "not a valid path"),
        ({"pip": 3}, "must be of type str or List"),
        ({"pip": ["a"], "conda": "b"}, "cannot be specified at the same time"),
    ],
)
def test_what_ray_would_reject_or_ignore_is_wrong_input(option: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserInputError, match=r"transport\.runtime_env") as caught:
        init_options(option)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("option", "problem"), [({"env_var": {"A": "1"}}, "does not have the key"), (variables(NOWHERE=None), "not set in")]
)
def test_a_dry_run_finds_it_too(option: dict[str, Any], problem: str, run_file: RunFile) -> None:
    with pytest.raises(UserInputError, match=rf"transport\.runtime_env.*{problem}"):
        check_run(resolve(run_file(runtime_env=option)))


def test_keys_of_the_clusters_own_plugins_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_RUNTIME_ENV_PLUGINS", "[]")
    assert init_options({"ours": "x"}) == {"runtime_env": {"ours": "x"}}


def test_what_the_job_sets_too_is_named_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"runtime_env": {"pip": ["a"], **variables(LEVEL="secret-1", OTHER="x", HF_TOKEN="of-the-job")}}
    monkeypatch.setenv(JOB_CONFIG, json.dumps(job))
    assert init_options(variables(MINE="1", HF_TOKEN="of-the-run")) == {"runtime_env": variables(MINE="1")}
    with pytest.raises(UserInputError, match=r"already sets env_vars\.LEVEL, pip") as caught:
        init_options({"pip": ["b"], **variables(LEVEL="secret-2")})
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    assert init_options({"pip": ["b"]}) == {"runtime_env": {"pip": ["b"]}}


def test_numbers_become_text_and_other_values_are_refused(run_file: RunFile) -> None:
    config = resolve(run_file(runtime_env=variables(OMP_NUM_THREADS=4, NAME="x", COPIED=None))).transport.config
    assert isinstance(config, RayConfig)
    assert config.runtime_env == variables(OMP_NUM_THREADS="4", NAME="x", COPIED=None)
    for wrong in (variables(A=True), variables(A=1.5), variables(A=["x"]), {"env_vars": ["A=1"]}, ["env_vars"]):
        with pytest.raises(ConfigError, match="runtime_env"):
            resolve(run_file(runtime_env=wrong))


def test_the_written_run_file_hides_secrets_and_a_resume_wants_them_again(run_file: RunFile) -> None:
    run = resolve(run_file(runtime_env=variables(WANDB_API_KEY="w-123456", LEVEL="3", COPIED=None))).to_mapping()
    written = redact_mapping(run)
    assert written["transport"]["runtime_env"] == variables(WANDB_API_KEY="***", LEVEL="3", COPIED=None)
    with pytest.raises(ConfigError, match=r"set it again with --set transport\.runtime_env\.env_vars\.WANDB_API_KEY="):
        resolve(written)


@pytest.mark.usefixtures("local_ray")
def test_a_connection_that_exists_keeps_its_environment() -> None:
    with (
        pytest.raises(UserInputError, match="connected to Ray already"),
        connect(RayConfig(runtime_env=variables(LEVEL="3"))),
    ):
        pass
    with connect(RayConfig(runtime_env=variables(HF_TOKEN="hf_abcdef"))):  # the actors set it
        pass


REWARD = """
import os

def of_environment(rollouts):
    found = [os.environ.get(name) for name in ("LEVEL", "MY_API_KEY", "COPIED")]
    assert found == ["3", "k-secret-of-the-file", "c-secret-of-the-shell"], "not as in the run file"
    return [len(rollout.completion) / 8 for rollout in rollouts]
"""


def holds(folder: Path, text: str) -> list[str]:
    found = subprocess.run(["grep", "-rlF", "-e", text, str(folder)], capture_output=True, text=True, check=False)
    return found.stdout.splitlines()


@pytest.mark.slow
def test_actors_get_the_variables_and_no_file_of_the_run_or_of_ray_has_the_secrets(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray_files = tmp_path_factory.mktemp("e")  # short, since sockets are in it
    monkeypatch.setenv("COPIED", "c-secret-of-the-shell")
    monkeypatch.setenv("RAY_TMPDIR", str(ray_files))
    (tmp_path / "reward.py").write_text(REWARD)
    run = run_file({"episodes": 1}, max_staleness=0)
    run["transport"]["runtime_env"] = variables(LEVEL="3", COPIED=None)
    run["rewards"] = [f"{tmp_path / 'reward.py'}:of_environment"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    secret = "transport.runtime_env.env_vars.MY_API_KEY=k-secret-of-the-file"
    done = run_rlhf("train", tmp_path / "run.yaml", "--output", tmp_path / "out", "--set", secret, "--verbose")
    assert done.returncode == 0, done
    assert "-secret-of-the-" not in done.stdout + done.stderr
    assert holds(ray_files, "LEVEL"), "Ray's session is elsewhere"
    for text in ("k-secret-of-the-file", "c-secret-of-the-shell"):
        assert not holds(tmp_path / "out", text)
        assert not holds(ray_files, text)


@pytest.mark.slow
def test_an_environment_that_cannot_be_set_up_ends_the_run_by_its_option(tmp_path: Path, run_file: RunFile) -> None:
    option = {"pip": {"packages": ["no-such-package-of-rlhf"], "pip_install_options": ["--no-index"]}}
    run = run_file({"episodes": 1}, max_staleness=0, runtime_env=option)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    done = run_rlhf("train", tmp_path / "run.yaml", "--trust", "--output", tmp_path / "out")
    assert done.returncode == 1, done
    assert "transport.runtime_env: Ray cannot set up the runtime environment of" in done.stderr


# The private function of Ray that keeps a local one on 127.0.0.1.


def test_this_ray_has_the_function_that_is_replaced() -> None:
    check_loopback_patch()


@pytest.mark.parametrize("replaced", [None, lambda host, port: host])
def test_a_ray_without_it_is_not_started(replaced: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    monkeypatch.setattr(services, "resolve_ip_for_localhost", replaced)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it was started"))
    with pytest.raises(RlhfError, match="would listen on all network interfaces"), cluster.local_ray():
        pass


def test_the_manifest_caps_ray_at_the_minor_version_of_the_pin() -> None:
    import re
    import tomllib

    from packaging.specifiers import SpecifierSet

    manifest: Mapping[str, Any] = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    (bounds,) = [each for each in manifest["project"]["dependencies"] if each.startswith("ray>")]
    allowed = SpecifierSet(bounds.removeprefix("ray"))
    lock = (Path(__file__).parents[4] / "requirements" / "lock.txt").read_text()
    (minor,) = re.findall(r"^ray==(\d+\.\d+)", lock, re.MULTILINE)
    assert ray.__version__ in allowed and f"{minor}.99" in allowed
    assert f"{minor.split('.')[0]}.{int(minor.split('.')[1]) + 1}.0" not in allowed
