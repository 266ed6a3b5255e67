"""Whole detached runs in this process's Ray."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running import PATIENCE_SECONDS

from rlhf_control.control_box import ControlBox, parse_command
from rlhf_core import train
from rlhf_core.errors import ConfigError, InterruptedRun, RlhfError

pytestmark = pytest.mark.usefixtures("local_ray")

OF_THE_PLACE = ("time/", "tokens_per_second/", "memory/", "transport/", "sync/", "reward_calls/")
"""Metrics that say where and how fast, not what was learnt."""


def learnt(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(OF_THE_PLACE)} for line in lines]


def assert_equal(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(lines) == len(expected) > 0
    for line, other in zip(learnt(lines), learnt(expected), strict=True):
        assert line.keys() == other.keys()
        for name, value in line.items():
            assert value == pytest.approx(other[name], abs=1e-6, rel=1e-6), name


@pytest.fixture
def warm_run(run_file: Callable[..., dict[str, Any]], warm_start: str) -> Iterator[Callable[..., dict[str, Any]]]:
    """As `run_file`, from the warm start; greedy and sampled answers are evaluated.

    A local run has as many threads as the actors, one: sums over more are rounded otherwise.
    """

    def make(*arguments: Any, **options: Any) -> dict[str, Any]:
        run = run_file(*arguments, **options)
        run["model"]["path"] = warm_start
        run["eval"]["sampled_temperature"] = 1.0
        return run

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make
    torch.set_num_threads(before)


@pytest.mark.slow
def test_on_policy_it_is_the_local_run(
    tmp_path: Path, warm_run: Callable[..., dict[str, Any]], check_samples: Callable[[Path], None]
) -> None:
    """Strictly on-policy, nothing that is learnt depends on where it was: values, noise, evaluation, order, prompts."""

    def run(**transport: Any) -> dict[str, Any]:
        made = warm_run(**transport)
        # So few prompts that each comes again, and of some no answer succeeds.
        small = {"name": "sort-digits", "size": 24}
        made["prompts"] = small | {"curriculum": {"success": [0.4, 0.9], "success_score": 0.5, "revisit_after": 1}}
        made["eval"]["sets"] = {"more": {"prompts": small, "num_prompts": 3, "samples_per_prompt": 2}}
        return made

    local = train(run(), output=tmp_path / "local")
    result = train(run(max_staleness=0, sync="chunked", max_shard_bytes=200_000), output=tmp_path / "ray")
    assert result is not None and local is not None
    assert_equal(result.metrics, local.metrics)
    assert {"eval/sampled/spread", "eval/more/pass@2", "eval/more/maj@2"} <= set(result.metrics[-1])
    assert result.metrics[-1]["curriculum/passed_over"] > 0
    assert result.summary["eval_before"] == pytest.approx(local.summary["eval_before"], abs=1e-6)
    check_samples(tmp_path / "ray")
    assert all(0 <= line["rollout/logprob_gap_max"] < 1e-5 for line in result.metrics)
    assert not (tmp_path / "ray" / "ray.json").exists()
    assert (tmp_path / "ray" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_with_two_makers_and_adapter_only_syncs_it_is_the_local_run_with_fewer_bytes(
    tmp_path: Path, warm_run: Callable[..., dict[str, Any]], check_samples: Callable[[Path], None]
) -> None:
    def run(**options: Any) -> dict[str, Any]:
        """One sample a pass: each maker has half of them, and MKL rounds a product by how many rows it has."""
        made = warm_run({"micro_batch_tokens": 1}, lora=True, **options)
        made["engine"] = {**made["engine"], "max_batch_size": 1}
        return made

    local = train(run(), output=tmp_path / "local")
    result = train(run(num_makers=2, max_staleness=0, sync="adapter"), output=tmp_path / "ray")
    assert result is not None and local is not None
    assert_equal(result.metrics, local.metrics)
    check_samples(tmp_path / "ray")
    assert all(line["sync/makers"] == 2 for line in result.metrics)
    whole_bytes = sum(path.stat().st_size for path in (tmp_path / "ray" / "model").glob("*.safetensors"))
    assert 0 < result.metrics[0]["sync/bytes"] < whole_bytes


@pytest.mark.slow
def test_with_links_to_two_makers_it_is_the_local_run(
    tmp_path: Path, warm_run: Callable[..., dict[str, Any]], check_samples: Callable[[Path], None]
) -> None:
    def run(**options: Any) -> dict[str, Any]:
        """One sample a pass, as above."""
        made = warm_run({"micro_batch_tokens": 1}, **options)
        made["engine"] = {**made["engine"], "max_batch_size": 1}
        return made

    local = train(run(), output=tmp_path / "local")
    result = train(run(num_makers=2, max_staleness=0, sync="direct", max_shard_bytes=200_000), output=tmp_path / "ray")
    assert result is not None and local is not None
    assert_equal(result.metrics, local.metrics)
    check_samples(tmp_path / "ray")
    assert all((line["sync/makers"], line["sync/fallbacks"]) == (2, 0) for line in result.metrics)
    assert all(0 <= line["rollout/logprob_gap_max"] < 1e-5 for line in result.metrics)


@pytest.mark.slow
def test_after_twenty_adapter_syncs_the_makers_policy_is_the_trainers(
    tmp_path: Path, warm_run: Callable[..., dict[str, Any]], site: Path, faults: Callable[[str], Path]
) -> None:
    from safetensors.torch import load_file

    from rlhf_models import read_weights

    faults("maker-saves")
    sizes = {"episodes": 20, "prompts_per_episode": 4, "train_batch_size": 8}
    result = train(warm_run(sizes, lora=True, max_staleness=0, sync="adapter"), output=tmp_path / "ray")
    assert result is not None
    maker = load_file(site / "faults" / "maker.safetensors")
    trainer = dict(read_weights(tmp_path / "ray" / "checkpoints" / "step-20" / "policy"))
    assert maker.keys() == trainer.keys()
    assert all(bool((maker[name] - trainer[name]).abs().max() <= 1e-6) for name in maker)
    adapter = [name for name in trainer if "lora_" in name]
    assert any(bool(trainer[name].abs().max() > 1e-3) for name in adapter if "lora_B" in name)
    assert len({line["sync/bytes"] for line in result.metrics}) == 1


@pytest.mark.parametrize("strategy", ["low-level-zero", "gemini"])
@pytest.mark.parametrize("sync", ["chunked", "adapter", "direct"])
@pytest.mark.slow
def test_sharded_trainers(
    strategy: str,
    sync: str,
    tmp_path: Path,
    warm_run: Callable[..., dict[str, Any]],
    check_samples: Callable[[Path], None],
) -> None:
    """Two makers by two trainers; gemini trains in bf16, so its makers generate in it, too."""
    lora = sync == "adapter"
    run = warm_run(lora=lora, num_makers=2, num_trainers=2, max_staleness=1, sync=sync, max_shard_bytes=200_000)
    run["strategy"] = strategy
    result = train(run, output=tmp_path / "ray")
    assert result is not None
    check_samples(tmp_path / "ray")
    assert all(math.isfinite(line["loss/policy"]) for line in result.metrics)
    assert all(line["sync/makers"] == 2 and 0 <= line["staleness/max"] <= 1 for line in result.metrics)


class Send:
    """Leaves commands for the run before it starts."""

    def __init__(self, *commands: str) -> None:
        self.commands = commands

    def rlhf_run_start(self, run_folder: Path) -> None:
        for command in self.commands:
            ControlBox(run_folder / "control").send(parse_command(command.split()))


def test_a_run_takes_commands_while_it_goes_on(tmp_path: Path, run_file: Callable[..., dict[str, Any]]) -> None:
    run = run_file(max_staleness=0)
    run["checkpoint"]["every_episodes"] = None
    with pytest.raises(InterruptedRun, match="stopped after episode 1 of 3"):
        train(run, output=tmp_path / "ray", hooks=[Send("set lr=5e-4", "set kl_coef=0.2", "stop")])
    lines = [json.loads(line) for line in (tmp_path / "ray" / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy/lr"] for line in lines] == pytest.approx([1e-3, 5e-4])
    assert [path.name for path in (tmp_path / "ray" / "checkpoints").glob("step-*")] == ["step-2"]


class SignalOncePaused:
    """Pauses the run, and asks this process to stop as soon as the run says that it is paused."""

    def __init__(self, number: int) -> None:
        self.number = number

    def rlhf_run_start(self, run_folder: Path) -> None:
        control = run_folder / "control"
        ControlBox(control).send(parse_command(["pause"]))
        threading.Thread(target=self._signal, args=(control,), daemon=True).start()

    def _signal(self, control: Path) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not list(control.glob("*.answer.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.slow
def test_a_paused_run_hears_a_signal(tmp_path: Path, run_file: Callable[..., dict[str, Any]], number: int) -> None:
    with pytest.raises(InterruptedRun, match="stopped after episode 1 of 3"):
        train(run_file(max_staleness=0), output=tmp_path / "ray", hooks=[SignalOncePaused(number)])
    assert [path.name for path in (tmp_path / "ray" / "checkpoints").glob("step-*")] == ["step-2"]


@pytest.mark.slow
def test_a_time_limit_ends_the_run_with_a_checkpoint(tmp_path: Path, run_file: Callable[..., dict[str, Any]]) -> None:
    """Trainer 0 decides by the time at which the driver took the folder, and the driver records the reason."""
    with pytest.raises(InterruptedRun, match="stopped after episode 1 of 3"):
        train(run_file({"max_hours": 1e-9}, max_staleness=0), output=tmp_path / "ray")
    summary = json.loads((tmp_path / "ray" / "summary.json").read_text())
    assert (summary["status"], summary["stopped"]["by"]) == ("interrupted", "train.max_hours")
    assert [path.name for path in (tmp_path / "ray" / "checkpoints").glob("step-*")] == ["step-2"]


@pytest.mark.slow
def test_a_rollback_takes_the_makers_back(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], faults: Callable[[str], Path]
) -> None:
    """With a rate that stays, what was learnt before is learnt again: no sample or weight of the lost time is left."""
    straight = train(run_file({"episodes": 4}), output=tmp_path / "local")
    run = run_file({"episodes": 4}, num_makers=2, max_staleness=0)
    run["guards"] = {"kl": {"action": "rollback", "bound": 1e9}, "rollback": {"lr_factor": 1.0}}
    run["checkpoint"]["keep"] = 4
    faults("rollback-5")
    result = train(run, output=tmp_path / "ray")
    assert result is not None and straight is not None
    assert result.summary["rollbacks"] == 1
    assert_equal(result.metrics, straight.metrics)


@pytest.mark.parametrize("max_staleness", [1, 3])
@pytest.mark.slow
def test_a_rollback_in_the_middle_of_everything(
    max_staleness: int,
    tmp_path: Path,
    run_file: Callable[..., dict[str, Any]],
    faults: Callable[[str], Path],
    check_samples: Callable[[Path], None],
) -> None:
    run = run_file({"episodes": 6}, num_makers=2, max_staleness=max_staleness)
    run["guards"] = {"kl": {"action": "rollback", "bound": 1e9}, "rollback": {"lr_factor": 1.0}}
    run["checkpoint"]["keep"] = 6
    for step in (1, 6, 9):
        faults(f"rollback-{step}")
    result = train(run, output=tmp_path / "ray")
    assert result is not None
    assert result.summary["rollbacks"] == 3
    check_samples(tmp_path / "ray")
    assert all(0 <= line["staleness/max"] <= max_staleness for line in result.metrics)


class Recorder:
    """An object hook: it stays in this process and sees what happened in the actors."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.lengths: list[int] = []

    def rlhf_fit_start(self, info: Any) -> None:
        self.events.append(f"fit of {info.world_size}")

    def rlhf_episode_end(self, episode: int, metrics: Any) -> None:
        self.events.append(f"episode {episode}")

    def rlhf_make_experience_end(self, groups: Any) -> None:
        self.lengths += [item.num_response_tokens for group in groups for item in group.items]

    def rlhf_fit_end(self, error: BaseException | None) -> None:
        self.events.append(f"end {error}")


@pytest.mark.slow
def test_several_makers_and_trainers_keep_the_staleness_bound(
    tmp_path: Path,
    run_file: Callable[..., dict[str, Any]],
    check_samples: Callable[[Path], None],
    samples: Callable[[Path], list[dict[str, Any]]],
) -> None:
    recorder = Recorder()
    run = run_file({"episodes": 4}, num_makers=2, num_trainers=2, max_staleness=1)
    run["strategy"] = "ddp"
    result = train(run, output=tmp_path / "ray", hooks=[recorder])
    assert result is not None
    check_samples(tmp_path / "ray")
    assert all(0 <= line["staleness/max"] <= 1 for line in result.metrics)
    assert any(line["staleness/mean"] > 0 for line in result.metrics)
    assert all(line["episode"] - line["policy_version"] in (0, 1) for line in samples(tmp_path / "ray"))
    assert all(math.isfinite(line["loss/policy"]) for line in result.metrics)
    assert recorder.events == ["fit of 2", *(f"episode {i}" for i in range(4)), "end None"]
    assert len(recorder.lengths) >= 64


@pytest.mark.slow
def test_a_graph_without_room_is_an_error_that_says_what_was_asked_and_what_there_is(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]]
) -> None:
    run = run_file(num_makers=2, maker_cpus=900, start_timeout_seconds=2)
    with pytest.raises(RlhfError, match=r"(?s)maker-0, maker-1.*1800 CPU.*nodes of the cluster have .* CPU"):
        train(run, output=tmp_path / "ray")


def test_what_the_transport_cannot_do_is_said_before_anything_starts(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(ConfigError, match="no adapter"):
        train(run_file(sync="adapter"), output=tmp_path / "a")
    with pytest.raises(ConfigError, match="strategy single supports one process"):
        train(run_file(num_trainers=2), output=tmp_path / "b")


@pytest.mark.slow
def test_an_error_in_a_maker_names_it_and_keeps_its_traceback(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]]
) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text("def broken(rollouts):\n    raise KeyError('no such thing')\n")
    run = run_file(max_staleness=0)
    run["rewards"] = [f"{reward}:broken"]
    with pytest.raises(RlhfError, match=r"(?s)maker-0.*no such thing"):
        train(run, output=tmp_path / "ray")
    log = (tmp_path / "ray" / "run.log").read_text()
    assert "[maker-0] failed" in log
    assert "Traceback" in log
    assert "KeyError" in log


@pytest.mark.slow
def test_a_hook_with_options_finishes_a_detached_run(tmp_path: Path, run_file: Callable[..., dict[str, Any]]) -> None:
    """It is built in the trainer, all ranks end together while makers are ahead, and a resume goes no further."""
    run = run_file({"episodes": 6}, num_makers=2, num_trainers=2, max_staleness=1)
    run["strategy"] = "ddp"
    run["hooks"] = {"early-stop": {"metric": "reward/mean", "below": 9.0, "patience": 2}}
    result = train(run, output=tmp_path / "ray")
    assert result is not None and result.summary["status"] == "done"
    assert result.summary["finished"]["guard"] == "early-stop"
    assert {line["episode"] for line in result.metrics} == {0, 1}
    assert (tmp_path / "ray" / "model" / "model.safetensors").exists()
    again = train(run, output=tmp_path / "ray", resume="auto")
    assert again is not None and len(again.metrics) == len(result.metrics)


RISING = """
class Rising:
    def __init__(self):
        self.calls = 0

    def __call__(self, rollouts):
        self.calls += 1
        return [self.calls / 8] * len(rollouts)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


from pydantic import BaseModel
from rlhf_core import Component, Section

class Config(Section):
    pass

def build(config, context):
    return Rising()

rising = Component("Rises.", Config, "ray_rising:build")
"""


@pytest.mark.slow
def test_a_reward_of_a_maker_goes_on_where_it_was(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], site: Path
) -> None:
    """What the rewards keep comes from the makers into the checkpoint, and back before the first prompts."""
    (site / "ray_rising.py").write_text(RISING)
    info = site / "ray_rising-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-rising\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlhf.rewards]\nray-rising = ray_rising:rising\n")
    try:
        run = {**run_file({"episodes": 2}, max_staleness=0), "rewards": ["ray-rising"], "eval": None}
        first = train(run, output=tmp_path / "ray")
        longer = {**run, "train": {**run["train"], "episodes": 4}}
        resumed = train(longer, output=tmp_path / "ray", resume="auto")
    finally:
        (info / "entry_points.txt").unlink()
    assert first is not None and resumed is not None
    means = [line["reward/ray-rising"] for line in resumed.metrics]
    assert means == sorted(means) and len(set(means)) == 4, means
