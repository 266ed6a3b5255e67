"""Contract of a transport: it completes a run file, fails if the run fails, and can resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhf_core.entry.train import TrainResult, train
from rlhf_core.errors import RewardError
from rlhf_core.plugins.selected import SelectedPlugin
from rlhf_core.runfolder.folder import RunFolder

from ..runs import tiny_run
from .base import ComponentContract

_UPDATES_PER_EPISODE = 2
_SAMPLES_PER_EPISODE = 8
_BAD_REWARD = "def bad(rollouts) -> list[float]:\n    raise ValueError('this reward always fails')\n"


class TransportContract(ComponentContract):
    """Tests of a transport: runs of a tiny model with the default plugins (rlhf-ppo, rlhf-torch, rlhf-hf).

    Example:
        class TestMyTransport(TransportContract):
            plugin = "my-transport"
    """

    kind = "transports"
    run: ClassVar[Mapping[str, Any]] = {}
    """Changes to the run file of these tests (`rlhf_testing.runs.tiny_run`)."""

    @classmethod
    def run_file(
        cls, given: Mapping[str, Any], episodes: int, rewards: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Run file with two updates and eight samples per episode."""
        run = tiny_run({"eval": {"num_prompts": 4, "every_episodes": None}, **cls.run})
        run["train"]["episodes"] = episodes
        run["transport"] = {"name": cls.plugin, **given}
        return run if rewards is None else {**run, "rewards": rewards}

    @pytest.fixture(scope="class")
    @classmethod
    def finished(cls, selected: SelectedPlugin, given: dict[str, Any], folder: Path) -> TrainResult:
        """Result of one episode, and then a second one resumed from the checkpoint."""
        train(cls.run_file(given, 1), output=folder / "run")
        result = train(cls.run_file(given, 2), output=folder / "run", resume="auto")
        assert result is not None
        return result

    def test_the_run_is_done(self, finished: TrainResult) -> None:
        summary = finished.summary
        assert summary["status"] == "done", summary
        assert isinstance(summary["eval_before"], float) and isinstance(summary["eval_after"], float), summary

    def test_one_line_for_each_update(self, finished: TrainResult) -> None:
        lines = finished.metrics
        assert [line["step"] for line in lines] == list(range(1, 2 * _UPDATES_PER_EPISODE + 1))
        assert [line["episode"] for line in lines] == [0, 0, 1, 1]
        versions = [line["policy_version"] for line in lines]
        assert versions == sorted(versions), f"policy versions must not decrease: {versions}"
        assert all("reward/mean" in line and "loss/policy" in line for line in lines), sorted(lines[0])

    def test_no_sample_is_lost_or_doubled(self, finished: TrainResult) -> None:
        """`sample_id` is unique in the run, also across the resume, and each episode has exactly its prompts."""
        path = RunFolder.read(finished.run_folder).samples
        ids = [json.loads(line)["sample_id"] for line in path.read_text(encoding="utf-8").splitlines()]
        assert sorted(ids) == list(range(2 * _SAMPLES_PER_EPISODE)), f"samples trained on: {sorted(ids)}"

    def test_the_model_can_be_loaded(self, finished: TrainResult) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = RunFolder.read(finished.run_folder).model
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.num_parameters() > 0 and AutoTokenizer.from_pretrained(folder).eos_token_id is not None

    def test_a_failing_run_fails(self, selected: SelectedPlugin, given: dict[str, Any], tmp_path: Path) -> None:
        """A run fails with its original error, wherever it occurred, and the folder records the failure."""
        bad = tmp_path / "bad_reward.py"
        bad.write_text(_BAD_REWARD, encoding="utf-8")
        with pytest.raises(RewardError, match="this reward always fails"):
            train(self.run_file(given, 1, rewards=[{"name": f"{bad}:bad"}]), output=tmp_path / "run")
        folder = RunFolder.read(tmp_path / "run")
        assert folder.read_json(folder.summary)["status"] == "failed"
