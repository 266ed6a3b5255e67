"""Detached runs of a tiny model, and faults that strike inside the actors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from quick_ray import quick_workers

Run = Callable[..., dict[str, Any]]

FAULTS = '''
"""Hooks that kill the process they run in, once, when a file says so."""

import os
import signal
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["RLHF_TEST_FAULTS"])
STAGED = []


def is_struck(name):
    """The process that takes the file away is the one that is struck."""
    try:
        (FOLDER / name).unlink()
    except FileNotFoundError:
        return False
    return True


def strike(name, signal_number=signal.SIGKILL):
    if is_struck(name):
        os.kill(os.getpid(), signal_number)


def strike_driver(name):
    """The file says which process it is."""
    try:
        driver = int((FOLDER / name).read_text())
    except FileNotFoundError:
        return
    if is_struck(name):
        os.kill(driver, signal.SIGKILL)
        time.sleep(600)


def rlhf_batch_start(batch):
    strike("trainer-stops", signal.SIGSTOP)
    deadline = time.monotonic() + 600
    while (FOLDER / "trainer-waits").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if is_struck("trainer-raises"):
        raise KeyError("asked for by the test")


def rlhf_decide(moment):
    if moment.at != "update" or not is_struck(f"rollback-{moment.step}"):
        return None
    from rlhf_core.hookspecs import Action

    return Action(kind="rollback", by="faults", reason="asked for by the test", lr_factor=1.0)


def rlhf_reward_end(num_samples):
    strike("maker-generates")
    strike("maker-hangs", signal.SIGSTOP)


SENT = []


def rlhf_send_end(num_groups):
    """What was sent before has been taken by now."""
    SENT.append(num_groups)
    strike(f"maker-sent-{len(SENT)}")


def rlhf_fit_start(info):
    import ray
    from rlhf_ray import sample_store

    plain = sample_store.fetch

    def fetch(places, *, timeout_seconds):
        if is_struck("maker-dies-when-taken"):
            (maker,) = [each for each in ray.util.list_named_actors(all_namespaces=True) if each["name"] == "maker-0"]
            ray.kill(ray.get_actor(**maker))
            deadline, wanted = time.monotonic() + 60, set(places)
            while time.monotonic() < deadline and plain(places, timeout_seconds=timeout_seconds).keys() >= wanted:
                time.sleep(0.1)
        return plain(places, timeout_seconds=timeout_seconds)

    sample_store.fetch = fetch


def wait_for_weights_in_flight():
    """Answers of the episode after the one that is trained on wait, after their first tokens, for its weights."""
    from rlhf_ray.engine_thread import SharedEngine

    plain = SharedEngine._between

    def between(self):
        ahead = self._open and all(sample // 16 > (self._weights.newest or 0) for sample, _ in self._open)
        deadline = time.monotonic() + 20
        while ahead and not (self._weights._ready or self._waiting or self._works) and time.monotonic() < deadline:
            time.sleep(0.01)
        return plain(self)

    SharedEngine._between = between


def rlhf_maker_loop_start(maker):
    if is_struck("maker-waits-in-flight"):
        wait_for_weights_in_flight()
    from rlhf_core.errors import EngineLostError
    from rlhf_ray.holder_weights import StagedWeights
    from rlhf_ray.maker_parts import MakerWorker

    plain = StagedWeights.stage

    def stage(self, version, *arguments, **options):
        plain(self, version, *arguments, **options)
        strike(f"maker-receives-{version}")

    def commit(self, version, *arguments, **options):
        committed(self, version, *arguments, **options)
        STAGED.append(self)

    def make(self, prompts):
        if is_struck("maker-loses-engine"):
            raise EngineLostError("the vLLM process was ended by SIGKILL", where="engine vllm")
        return made(self, prompts)

    made = MakerWorker.make
    MakerWorker.make = make
    committed = StagedWeights.commit
    StagedWeights.stage = stage
    StagedWeights.commit = commit


def rlhf_maker_loop_end(maker):
    """Leave the maker's last weights where the test looks for them."""
    if not is_struck("maker-saves"):
        return
    from rlhf_core.rollout.weight_sync import named_weights
    from safetensors.torch import save_file

    weights = named_weights(STAGED[-1]._models["policy"])
    save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, FOLDER / "maker.safetensors")


def rlhf_sync_start(version):
    if "rlhf_ray.sending" not in sys.modules:
        return
    from rlhf_ray import sending

    plain = getattr(sending.pack, "plain", sending.pack)

    def pack(shard):
        strike(f"trainer-syncs-{version}")
        strike_driver(f"driver-dies-in-sync-{version}")
        return plain(shard)

    pack.plain = plain
    sending.pack = pack
'''


SPREAD = '''
"""A reward with some spread even for a random model, so that advantages are not rounding errors made large."""


def spread(rollouts):
    return [sum(token % 5 for token in r.completion_ids) / (4.0 * len(r.completion_ids)) for r in rollouts]
'''


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the path of this process and of Ray's, with an installed hook plugin that brings the faults."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "fake_faults-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlhf.hooks]\nfaults = fake_faults\n")
    (folder / "fake_faults.py").write_text(dedent(FAULTS))
    (folder / "spread.py").write_text(dedent(SPREAD))
    (folder / "faults").mkdir()
    before = {key: os.environ.get(key) for key in ("PYTHONPATH", "RLHF_TEST_FAULTS", "OMP_NUM_THREADS")}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before["PYTHONPATH"]]))
    os.environ["RLHF_TEST_FAULTS"] = str(folder / "faults")
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


@pytest.fixture(scope="package")
def local_ray(site: Path, ray_worker_source: None) -> Iterator[None]:
    """One Ray for all runs of this process, as the transport starts it but for how its workers begin."""
    from rlhf_ray.cluster import connect
    from rlhf_ray.config import RayConfig

    with quick_workers(), connect(RayConfig()):
        yield


@pytest.fixture
def faults(site: Path) -> Iterator[Callable[[str], Path]]:
    """`faults(name)` arms a fault; every armed one must have struck when the test ends."""
    folder = site / "faults"
    armed: list[Path] = []

    def arm(name: str) -> Path:
        (folder / name).touch()
        armed.append(folder / name)
        return folder / name

    yield arm
    left = [path for path in armed if path.exists()]
    for path in left:
        path.unlink()
    assert not left, f"these faults never struck: {[path.name for path in left]}"


@pytest.fixture
def run_file(site: Path) -> Callable[..., dict[str, Any]]:
    """`run_file(transport options…)`: a run of a tiny random model, in seconds; `local` without any."""

    def make(train: Mapping[str, Any] | None = None, lora: bool = False, **transport: Any) -> dict[str, Any]:
        sizes = {"episodes": 3, "prompts_per_episode": 8, "samples_per_prompt": 2, "train_batch_size": 8}
        return {
            "model": {"path": "builtin:tiny-digits", "lora": {"r": 4} if lora else None},
            "prompts": {"name": "sort-digits", "size": 1000},
            "eval": {"every_episodes": 3, "num_prompts": 12, "batch_size": 8},
            "algorithm": {"name": "ppo", "kl_coef": 0.05},
            "optimizer": {"lr": 1e-3},
            "rewards": [f"{site / 'spread.py'}:spread"],
            "engine": {"max_new_tokens": 8},
            "train": {**sizes, **(train or {})},
            "checkpoint": {"every_episodes": 1},
            "logging": {"tensorboard": False},
            "transport": {"name": "ray", **transport} if transport else "local",
        }

    return make


@pytest.fixture(params=["as by default", "direct and in flight"])
def ways(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Transport options: how weights get to the makers, and when they take them."""
    return {} if request.param == "as by default" else {"sync": "direct", "weights": "in-flight", "max_staleness": 1}


@pytest.fixture(scope="package")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder: the tiny model after a few supervised steps, so that it answers with digits."""
    from rlhf_core import train

    run = {
        "model": {"path": "builtin:tiny-digits"},
        "prompts": {"name": "sort-digits", "size": 1000},
        "algorithm": "sft",
        "optimizer": {"lr": 3e-3},
        "train": {"episodes": 10, "prompts_per_episode": 64, "train_batch_size": 64},
        "checkpoint": {"every_episodes": None},
        "logging": {"tensorboard": False},
    }
    result = train(run, output=tmp_path_factory.mktemp("warm") / "run")
    assert result is not None
    return str(result.run_folder / "model")


@pytest.fixture
def samples() -> Callable[[Path], list[dict[str, Any]]]:
    def read(folder: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]

    return read


@pytest.fixture
def check_samples(samples: Callable[[Path], list[dict[str, Any]]]) -> Callable[[Path], None]:
    """Every sample of the run was trained on exactly once, in the episode that its prompt belongs to."""

    def check(folder: Path) -> None:
        import yaml

        train = yaml.safe_load((folder / "config.yaml").read_text())["train"]
        lines = samples(folder)
        per_episode = train["prompts_per_episode"] * train["samples_per_prompt"]
        assert sorted(line["sample_id"] for line in lines) == list(range(train["episodes"] * per_episode))
        assert all(line["episode"] == line["sample_id"] // per_episode for line in lines)

    return check
