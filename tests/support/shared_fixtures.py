"""Fixtures of all tests: fake distributions, as if they were installed, and a hub that does not answer."""

import importlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(distribution, {group: {name: target}}, {module: source}, version=...)."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    modules: list[str] = []

    def add(
        distribution: str,
        entry_points: Mapping[str, Mapping[str, str]],
        sources: Mapping[str, str] | None = None,
        version: str = "1.2.3",
        requires: Sequence[str] = (),
    ) -> None:
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        about = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        about += [f"Requires-Dist: {each}" for each in requires]
        about += [f"Provides-Extra: {each.partition('extra == ')[2][1:-1]}" for each in requires if "extra" in each]
        (info / "METADATA").write_text("\n".join(about) + "\n")
        lines: list[str] = []
        for group, targets in entry_points.items():
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in targets.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, source in (sources or {}).items():
            (folder / f"{name}.py").write_text(dedent(source))
            modules.append(name)
        importlib.invalidate_caches()

    yield add
    for name in modules:
        sys.modules.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def sigint_not_ignored() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal, even if a shell started the tests in the background."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def sighup_not_ignored() -> Iterator[None]:
    """Handle SIGHUP as in a terminal, even if `nohup` started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


FAKE_PLUGINS = """
from typing import Literal
from pydantic import BaseModel, Field
from rlhf_core.components import Component
from rlhf_core.config import EngineConfig, OwnProcesses, TransportConfig

class Update(BaseModel):
    clip_eps: float = Field(0.2, gt=0, description="Clip.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount.")

class OtherUpdate(BaseModel):
    gamma: float = 0.9

class Placement(BaseModel):
    precision: Literal["auto", "fp32"] = "auto"

class Empty(TransportConfig):
    pass

class Detached(TransportConfig):
    num_trainers: int = Field(1, ge=1)

    def own_processes(self):
        return OwnProcesses(trainers=self.num_trainers, makers=0, option="num_trainers")

class Engine(EngineConfig):
    cache: bool = True

class Lines(BaseModel):
    path: str = "lines.jsonl"

learn = Component("Learns.", Update, "fake_build:build")
relearn = Component("Learns otherwise.", OtherUpdate, "fake_build:build")
offline = Component("Learns from lines.", Update, "fake_build:build", feeds="dataset")
place = Component("Here.", Placement, "fake_build:build")
near = Component("In process.", Empty, "fake_build:build")
far = Component("Elsewhere.", Detached, "fake_build:build")
engine = Component("Generates.", Engine, "fake_build:build")
other_engine = Component("Generates otherwise.", EngineConfig, "fake_build:build")
lines = Component("Lines.", Lines, "fake_build:build")

def shout(rollouts, *, loudness: int = 1, word: str = "hey") -> list[float]:
    "Louder is better."
    return [float(loudness)] * len(rollouts)

def whisper(rollouts) -> list[float]:
    return [0.0] * len(rollouts)
"""


@pytest.fixture
def fake_plugins(install: Install) -> None:
    """Install a distribution with lightweight plugins of every kind."""
    groups = {
        "algorithms": {"fake-learn": "learn", "fake-relearn": "relearn", "fake-offline": "offline"},
        "strategies": {"fake-place": "place"},
        "transports": {"fake-near": "near", "fake-far": "far"},
        "engines": {"fake-engine": "engine", "fake-engine-2": "other_engine"},
        "prompts": {"fake-lines": "lines"},
        "rewards": {"fake-shout": "shout", "fake-whisper": "whisper"},
    }
    targets = {
        f"rlhf.{kind}": {name: f"fake_plugins_module:{attribute}" for name, attribute in names.items()}
        for kind, names in groups.items()
    }
    build = "def build(config, context):\n    return config\n"
    install("fake-plugins", targets, {"fake_plugins_module": FAKE_PLUGINS, "fake_build": build})


@pytest.fixture
def fake_run() -> dict[str, object]:
    """A run file with those plugins."""
    return {
        "model": {"path": "some-model"},
        "prompts": {"name": "fake-lines", "path": "p.jsonl", "max_prompt_tokens": 16},
        "algorithm": {"name": "fake-learn", "clip_eps": 0.3},
        "strategy": "fake-place",
        "transport": "fake-near",
        "engine": {"name": "fake-engine", "max_new_tokens": 5},
        "rewards": ["fake-shout:0.5"],
    }


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Use a local port that refuses connections as the hub, with an empty cache."""
    from huggingface_hub import constants

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield
