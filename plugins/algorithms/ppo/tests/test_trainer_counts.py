"""What PPOTrainer counts, as the seed's page says: samples in the buffer, batches in a step, steps between saves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.types import Experience
from rlhf_forward.forward import policy_forward, value_forward
from rlhf_objective.functional.losses import ppo_policy_loss, value_loss
from rlhf_ppo import OLTrainer, PPOTrainer
from rlhf_ppo.seed_trainer.base import SampleBuffer

MakeTrainer = Callable[..., PPOTrainer]


def lines(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


class Watch:
    """Sizes of the batches, and of the updates, that callbacks and the updater are given."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.updates: list[int] = []

    def on_learn_batch_end(self, experience: Experience) -> None:
        self.batches.append(experience.sample_ids.tolist())

    def of(self, trainer: PPOTrainer, monkeypatch: pytest.MonkeyPatch) -> PPOTrainer:
        from rlhf_core.training.updater import Updater

        update = Updater.update

        def noted(updater: Updater, items: Any, **options: Any) -> dict[str, float]:
            self.updates.append(len(items))
            return update(updater, items, **options)

        monkeypatch.setattr(Updater, "update", noted)
        return trainer


@pytest.mark.parametrize("sample_buffer", [False, True])
@pytest.mark.slow_except("True")
def test_accumulation_goes_on_over_passes(
    make_trainer: MakeTrainer, prompt_loader: Any, folder: str, monkeypatch: pytest.MonkeyPatch, sample_buffer: bool
) -> None:
    watch = Watch()
    options: dict[str, Any] = {"sample_buffer": sample_buffer, "train_batch_size": 4, "accumulation_steps": 8}
    trainer = watch.of(make_trainer(**options, callbacks=[watch]), monkeypatch)
    trainer.fit(2, 1, 20 if sample_buffer else 10, prompt_loader, log_dir=folder)
    # 8 samples are 2 batches a pass and 20 an episode: steps of 32 samples, and one of what is left.
    assert [len(batch) for batch in watch.batches] == [4] * 40
    assert watch.updates == [32, 32, 16] * 2
    assert [(row["step"], row["episode"]) for row in lines(folder)] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
    assert trainer.num_train_step == 6


def test_accumulated_passes_are_one_step_of_their_mean_gradient(make_trainer: MakeTrainer, prompt_loader: Any) -> None:
    """The same samples twice in one step weigh as they do once."""
    once = make_trainer(train_batch_size=8, lr=1e-3)
    twice = make_trainer(train_batch_size=4, accumulation_steps=4, lr=1e-3)
    once.fit(1, 1, 1, prompt_loader)
    twice.fit(1, 1, 2, prompt_loader)
    assert once.num_train_step == twice.num_train_step == 1
    for ours, theirs in zip(twice.actor.parameters(), once.actor.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_save_interval_counts_steps(make_trainer: MakeTrainer, prompt_loader: Any, folder: str) -> None:
    trainer = make_trainer(train_batch_size=4, save_interval=3, save_dir=folder)
    trainer.fit(2, 1, 2, prompt_loader)  # 4 steps an episode
    assert sorted(path.name for path in Path(folder).glob("step-*")) == ["step-3", "step-6"]


def test_a_checkpoint_from_within_an_episode_goes_on_from_its_start(
    make_trainer: MakeTrainer, prompt_loader: Any, tmp_path: Path
) -> None:
    saving = {"train_batch_size": 4, "save_interval": 3, "save_dir": str(tmp_path / "saved")}
    make_trainer(**saving).fit(2, 1, 2, prompt_loader, log_dir=str(tmp_path / "logs"))
    seen: list[list[int]] = []

    class Prompts:
        def on_make_experience_end(self, experience: Experience) -> None:
            seen.append(experience.sample_ids.tolist())

    trainer = make_trainer(callbacks=[Prompts()], **saving)
    assert trainer.load_checkpoint(tmp_path / "saved" / "step-6") == 1
    trainer.fit(3, 1, 2, prompt_loader, log_dir=str(tmp_path / "logs"))
    # The second collect step's prompts again, then the third's.
    assert [sorted(ids) for ids in seen] == [[(step << 20) + row for row in range(8)] for step in (1, 2)]
    rows = lines(tmp_path / "logs")
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert [row["episode"] for row in rows] == [0] * 4 + [1] * 6 + [2] * 4


def test_buffer_limit_counts_samples_and_drops_the_oldest(
    make_trainer: MakeTrainer, prompt_loader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch()
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        make_trainer(buffer_limit=12, train_batch_size=4, callbacks=[watch]).fit(1, 2, 1, prompt_loader)
    trained = [sample for batch in watch.batches for sample in batch]
    assert len(trained) == 12
    assert "4 oldest of 16" in caplog.text and "buffer_limit is 12 samples" in caplog.text
    second = [sample for sample in trained if sample >= 1 << 20]
    assert len(second) == 8, "the newest are kept"
    caplog.clear()
    for limit in (0, -1):
        watch = Watch()
        make_trainer(buffer_limit=limit, train_batch_size=4, callbacks=[watch]).fit(1, 2, 1, prompt_loader)
        assert sum(map(len, watch.batches)) == 16
    assert "buffer_limit" not in caplog.text


class OwnStep(PPOTrainer):
    """Writes the training step itself, as one of the seed's subclasses does."""

    def _training_step(self, experience: Experience) -> None:
        assert len(self.data_buffer) == 16 and self.data_buffer.items[0].advantages is not None
        assert len(self.data_buffer.sample()) == 4
        assert self.experience_maker.tokenizer is self.tokenizer
        assert experience.advantages is not None and experience.values is not None and experience.returns is not None
        log_probs = policy_forward(self.actor, experience, 1.0).log_probs
        clips = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}
        mask = experience.action_mask
        policy = ppo_policy_loss(log_probs, experience.action_log_probs, experience.advantages, mask, **clips)
        self.actor_booster.backward(loss=policy.losses.mean(), optimizer=self.actor_optim)
        values = value_forward(self.critic, experience)
        value = value_loss(values, experience.values, experience.returns, mask, clip_eps=0.2)
        self.critic_booster.backward(loss=value.losses.mean(), optimizer=self.critic_optim)
        if self.completes_update:
            for optimizer in (self.actor_optim, self.critic_optim):
                optimizer.step()
                optimizer.zero_grad()
            self.actor_scheduler.step()
            self.critic_scheduler.step()


def test_a_subclass_can_write_the_training_step_itself(
    make_trainer: MakeTrainer, prompt_loader: Any, folder: str
) -> None:
    trainer = make_trainer(OwnStep, train_batch_size=4, accumulation_steps=2)
    assert isinstance(trainer, OLTrainer)
    before = [parameter.detach().clone() for parameter in trainer.actor.parameters()]
    trainer.fit(1, 2, 2, prompt_loader, log_dir=folder)
    assert trainer.num_train_step == 4
    assert len(lines(folder)) == 4
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters(), strict=True))
    assert len(trainer.data_buffer) == 0


def test_the_buffer_draws_at_random(make_items: Callable[..., Any]) -> None:
    from rlhf_core.batching import collate

    buffer = SampleBuffer(4, 0, seed=0)
    buffer.append(collate(make_items(16)))
    drawn = [tuple(buffer.sample().sample_ids.tolist()) for _ in range(3)]
    assert len(set(drawn)) == 3
    assert all(len(set(each)) == 4 for each in drawn)
    buffer.clear()
    assert len(buffer) == 0
