"""What the code that `PPOTrainer` replaces got wrong, and is not covered by the number tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.errors import CheckpointError, RlhfError
from rlhf_core.types import Experience, Rollout
from rlhf_ppo import PPOTrainer
from rlhf_testing.models import tiny_tokenizer


class Watch:
    """Keeps every experience that is made."""

    def __init__(self) -> None:
        self.made: list[Experience] = []

    def on_make_experience_end(self, experience: Experience) -> None:
        self.made.append(experience)


@pytest.fixture
def watch() -> Watch:
    return Watch()


def first_line(folder: str) -> dict[str, Any]:
    line: dict[str, Any] = json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[0])
    return line


def test_an_answer_ends_at_its_eos_or_at_its_limit(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, watch: Watch, tokenizer: PreTrainedTokenizerBase
) -> None:
    """EOS is an action; nothing after it is, nor is the padding of an answer that was cut."""
    make_trainer(callbacks=[watch], max_new_tokens=8).fit(1, 2, 1, prompt_loader)
    ended, cut = 0, 0
    for batch in watch.made:
        answers = batch.sequences[:, batch.prompt_length :]
        assert torch.equal(batch.attention_mask[:, batch.prompt_length :], batch.action_mask)
        for answer, mask, truncated in zip(answers, batch.action_mask, batch.truncated, strict=True):
            counted = answer[mask].tolist()
            assert (tokenizer.eos_token_id in counted) == (not truncated)
            assert tokenizer.eos_token_id not in counted[:-1]
            assert len(counted) == 8 or not truncated
            ended, cut = ended + int(not truncated), cut + int(truncated)
    assert ended and cut


def test_eos_counts_where_it_is_the_pad_token_too(
    make_trainer: Callable[..., PPOTrainer], make_actor: Callable[..., Any], prompt_loader: Any, watch: Watch
) -> None:
    tokenizer = tiny_tokenizer("0123456789>,")
    tokenizer.pad_token = tokenizer.eos_token
    trainer = make_trainer(tokenizer=tokenizer, callbacks=[watch], max_new_tokens=8)
    trainer.fit(1, 2, 1, prompt_loader)
    ends = [batch.sequences[:, batch.prompt_length :][batch.action_mask] == 2 for batch in watch.made]
    assert sum(int(each.sum()) for each in ends) == sum(int((~batch.truncated).sum()) for batch in watch.made) > 0


def test_noise_is_new_in_every_step_and_global_state_is_left_alone(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, watch: Watch
) -> None:
    before = torch.random.get_rng_state()
    make_trainer(callbacks=[watch], lr=0.0).fit(2, 2, 1, prompt_loader[:1])
    assert torch.equal(torch.random.get_rng_state(), before)
    answers = {json.dumps(batch.sequences.tolist()) for batch in watch.made}
    assert len(answers) == len(watch.made) == 4  # the same prompts and weights, four times
    ids = [sample for batch in watch.made for sample in batch.sample_ids.tolist()]
    assert len(set(ids)) == len(ids)


def test_a_buffer_smaller_than_a_batch_is_trained_on(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any
) -> None:
    for sample_buffer in (False, True):
        trainer = make_trainer(train_batch_size=64, sample_buffer=sample_buffer)
        before = [parameter.detach().clone() for parameter in trainer.actor.parameters()]
        trainer.fit(1, 1, 1, prompt_loader)
        assert trainer.num_train_step == 1
        assert any(not torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters(), strict=True))


def test_rewards_are_what_the_reward_said(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, folder: str
) -> None:
    def large(rollouts: Sequence[Rollout]) -> list[float]:
        return [1000.0 if index % 2 else -3000.0 for index in range(len(rollouts))]

    make_trainer(reward_model=large).fit(1, 1, 1, prompt_loader, log_dir=folder)
    assert first_line(folder)["reward/mean"] == -1000.0


def test_metrics_are_means_over_tokens_in_full_precision(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, watch: Watch, folder: str
) -> None:
    make_trainer(callbacks=[watch], train_batch_size=16, max_new_tokens=8).fit(1, 2, 1, prompt_loader, log_dir=folder)
    counts = [int(each) for batch in watch.made for each in batch.action_mask.sum(1)]
    assert len(set(counts)) > 1
    assert first_line(folder)["response/length_mean"] == pytest.approx(sum(counts) / len(counts), rel=1e-12)


def test_a_checkpoint_of_another_model_is_refused(
    make_trainer: Callable[..., PPOTrainer], make_actor: Callable[..., Any], prompt_loader: Any, folder: str
) -> None:
    make_trainer(save_interval=1, save_dir=folder).fit(1, 1, 1, prompt_loader)
    with pytest.raises(CheckpointError, match="shape"):
        make_trainer(actor=make_actor(hidden_size=64)).load_checkpoint(Path(folder) / "step-1")


def test_importing_the_plugin_loads_neither_torch_nor_ray() -> None:
    heavy = "[name for name in ('torch', 'ray', 'transformers') if name in sys.modules]"
    code = f"import sys, rlhf_ppo, rlhf_ppo.plugin; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import rlhf_ppo

    with pytest.raises(AttributeError, match="PPOTrainr"):
        _ = rlhf_ppo.PPOTrainr  # type: ignore[attr-defined]


class LosesAPeer(PPOTrainer):
    def _training_step(self, experience: Experience) -> None:
        raise ConnectionError("Connection closed by peer")


@pytest.mark.usefixtures("losing_a_peer")
def test_a_process_lost_while_the_model_runs_is_named(make_trainer, prompt_loader):
    with pytest.raises(RlhfError, match="rank 1 is gone"):
        make_trainer(LosesAPeer).fit(1, 1, 1, prompt_loader)
