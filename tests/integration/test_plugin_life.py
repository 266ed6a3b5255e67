"""A plugin's life in an environment of its own: made, built, installed, listed, checked, tested, trained with, removed.

The environment sees what this one has through a `.pth` file, so that nothing is downloaded; what is installed into it
is nowhere else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import PATIENCE_SECONDS

from rlhf_cli.scaffold import TEMPLATES, new_plugin

OTHER_KINDS = [kind for kind in TEMPLATES if kind != "rewards"]
RUNS = """
import json, sys
from rlhf_cli.main import run
codes = {}
for number, arguments in enumerate(json.loads(sys.argv[1])):
    codes[number] = run(arguments)
print(json.dumps(list(codes.values())))
"""
SECTIONS = {
    "rewards": "rewards",
    "algorithms": "algorithm",
    "strategies": "strategy",
    "engines": "engine",
    "transports": "transport",
    "prompts": "prompts",
    "environments": "environment",
}


class Environment:
    """A virtual environment that also has everything of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        here = sysconfig.get_path("purelib")
        (site / "parent.pth").write_text(f"import site; site.addsitedir({here!r})\n")

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run its Python; stdout and stderr together."""
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == code, f"{arguments} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def rlhf(self, *arguments: str, code: int = 0) -> str:
        return self.run("-c", "from rlhf_cli.main import main; main()", *arguments, code=code)

    def pip(self, *arguments: str) -> None:
        """This environment's pip, acting on that one."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "-q", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def listed(self, distributions: Sequence[str]) -> set[tuple[str, str]]:
        """(kind, name) of the plugins that these distributions bring."""
        found = json.loads(self.rlhf("plugins", "list", "--json"))
        return {(each["kind"], each["name"]) for each in found if each["distribution"] in distributions}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("plugins"))


def distribution_of(kind: str) -> str:
    return f"rlhf-{TEMPLATES[kind].singular}-made-{TEMPLATES[kind].singular}"


def live(environment: Environment, kinds: Sequence[str]) -> dict[str, Path]:
    """Make, build, install, list, check, test and train with a plugin of each kind."""
    name = {kind: f"made-{TEMPLATES[kind].singular}" for kind in kinds}
    made = {kind: new_plugin(kind, name[kind], environment.folder / kind)[0] for kind in kinds}
    folders = list(map(str, made.values()))
    environment.pip("install", "--no-index", "--no-deps", "--no-build-isolation", *folders)
    assert environment.listed(list(map(distribution_of, kinds))) == set(name.items())

    checked = environment.rlhf("plugins", "check", *([name[kinds[0]]] if len(kinds) == 1 else []))
    lines = {line.split()[0]: line.split()[3] for line in checked.splitlines()[1:]}
    assert {lines[f"{kind}/{name[kind]}"] for kind in kinds} == {"ok"}

    tests = [f"{folder}/tests" for folder in folders]
    environment.run("-m", "pytest", "-q", "--import-mode=importlib", "--strict-markers", *tests)

    alone = [["train", f"{folder}/run.yaml", "--dry-run"] for folder in folders]
    together = environment.folder / f"all-{len(kinds)}.yaml"
    together.write_text(yaml.safe_dump(run_with_all(made)))
    real = ["train", str(together), "--output", str(environment.folder / f"run-{len(kinds)}"), "--quiet"]
    codes = json.loads(environment.run("-c", RUNS, json.dumps([*alone, real])).splitlines()[-1])
    assert codes == [0] * (len(kinds) + 1)
    return made


def run_with_all(made: dict[str, Path]) -> dict[str, Any]:
    """One small run with every plugin: what each one's run file says, in one."""
    run: dict[str, Any] = {}
    for kind, each in made.items():
        own = yaml.safe_load((each / "run.yaml").read_text())
        section = SECTIONS.get(kind, "model")
        run = {**own, **run, section: own[section]}
        if kind in ("optimizers", "schedules"):
            run["optimizer"] = {**run["optimizer"], **own["optimizer"]}
    return {**run, "train": {"episodes": 2, "prompts_per_episode": 4}, "logging": {"tensorboard": False}}


def remove(environment: Environment, made: dict[str, Path]) -> None:
    """Uninstall: not listed any more, and a run that names one is refused before anything runs."""
    distributions = list(map(distribution_of, made))
    environment.pip("uninstall", "--yes", *distributions)
    assert environment.listed(distributions) == set()
    kind, gone = next(iter(made.items()))
    said = environment.rlhf("config", "check", f"{gone}/run.yaml", code=2)
    assert f'"made-{TEMPLATES[kind].singular}" is installed' in said


@pytest.mark.slow
def test_a_reward_from_its_making_to_its_removal(environment: Environment) -> None:
    made = live(environment, ["rewards"])
    lines = (environment.folder / "run-1" / "metrics.jsonl").read_text().splitlines()
    assert all("reward/made-reward" in json.loads(line) for line in lines)
    remove(environment, made)


@pytest.mark.slow
def test_every_other_kind_from_its_making_to_its_removal(environment: Environment) -> None:
    made = live(environment, OTHER_KINDS)
    run_folder = environment.folder / f"run-{len(OTHER_KINDS)}"
    used = yaml.safe_load((run_folder / "config.yaml").read_text())
    sections = [SECTIONS[kind] for kind in OTHER_KINDS if kind in SECTIONS]
    assert [used[section]["name"] for section in sections] == [
        f"made-{TEMPLATES[kind].singular}" for kind in OTHER_KINDS if kind in SECTIONS
    ]
    assert "the best so far" in (run_folder / "run.log").read_text()
    remove(environment, made)
