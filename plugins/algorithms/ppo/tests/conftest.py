"""Tiny models, and a trainer on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.components import StrategyContext
from rlhf_core.errors import RlhfError
from rlhf_core.plugins.selected import load
from rlhf_core.strategy import Strategy
from rlhf_core.types import BufferItem, Rollout
from rlhf_ppo import Critic, PPOTrainer
from rlhf_testing.models import tiny_model, tiny_tokenizer

MakeTrainer = Callable[..., PPOTrainer]


def fraction_of_sevens(rollouts: Sequence[Rollout]) -> list[float]:
    """Share of the answer's characters that are 7."""
    return [rollout.completion.count("7") / max(1, len(rollout.completion_ids)) for rollout in rollouts]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer("0123456789>,")


@pytest.fixture
def make_actor(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    def make(seed: int = 0, hidden_size: int = 32) -> Any:
        return tiny_model(tokenizer, hidden_size=hidden_size, num_layers=1, num_heads=2, seed=seed)

    return make


@pytest.fixture
def actor(make_actor: Callable[..., Any]) -> Any:
    return make_actor()


def single_strategy(precision: str = "fp32") -> Strategy:
    selected = load("strategies", "single")
    config = selected.component.config.model_validate({"precision": precision})
    strategy: Strategy = selected.build(config, StrategyContext(device="cpu"))
    strategy.setup()
    return strategy


def token_batches(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], size: int) -> list[dict[str, Any]]:
    """Left-padded batches as ColossalChat's prompt loader gives them."""
    batches = []
    for start in range(0, len(texts), size):
        rows = [tokenizer(text)["input_ids"] for text in texts[start : start + size]]
        width = max(map(len, rows))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


@pytest.fixture
def prompt_loader(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    return token_batches(tokenizer, [f"{a}{b}>" for a in range(4) for b in range(4)], 8)


@pytest.fixture
def make_trainer(tokenizer: PreTrainedTokenizerBase, make_actor: Callable[..., Any]) -> MakeTrainer:
    def make(
        kind: type[PPOTrainer] = PPOTrainer,
        *,
        actor: nn.Module | None = None,
        lr: float = 1e-3,
        precision: str = "fp32",
        reference: Any = "copy",
        **changes: Any,
    ) -> PPOTrainer:
        policy = make_actor() if actor is None else actor
        critic = Critic.from_pretrained(policy)
        initial = copy.deepcopy(policy) if reference == "copy" else reference
        strategy = single_strategy(precision)
        prepared = {}
        for name, model in (("actor", policy), ("critic", critic)):
            parameters = [p for p in model.parameters() if p.requires_grad]
            optimizer = strategy.make_optimizer(parameters, lr=lr)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=3)
            prepared[name] = strategy.prepare(model, optimizer, schedule, max_grad_norm=1.0)
        given: dict[str, Any] = {
            "actor_booster": strategy,
            "critic_booster": strategy,
            "actor": prepared["actor"].model,
            "critic": prepared["critic"].model,
            "reward_model": fraction_of_sevens,
            "initial_model": initial,
            "actor_optim": prepared["actor"].optimizer,
            "critic_optim": prepared["critic"].optimizer,
            "actor_lr_scheduler": prepared["actor"].scheduler,
            "critic_lr_scheduler": prepared["critic"].scheduler,
            "tokenizer": tokenizer,
            "ptx_coef": 0.0,
            "max_new_tokens": 4,
        }
        return kind(**{**given, **changes})

    return make


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "out")


@pytest.fixture
def make_strategy() -> Callable[..., Strategy]:
    return single_strategy


@pytest.fixture
def make_batches(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[str], int], list[dict[str, Any]]]:
    def make(texts: Sequence[str], size: int) -> list[dict[str, Any]]:
        return token_batches(tokenizer, texts, size)

    return make


@pytest.fixture
def sevens() -> Callable[[Sequence[Rollout]], list[float]]:
    return fraction_of_sevens


def random_item(index: int, random: torch.Generator, *, vocabulary: int = 16) -> BufferItem:
    """A sample of random lengths and numbers, ready for an update."""
    num_prompt, num_actions = (int(torch.randint(1, 7, (1,), generator=random)) for _ in range(2))

    def normal(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(num_actions, generator=random) * scale

    return BufferItem(
        sample_id=index,
        group_id=index,
        policy_version=0,
        prompt_ids=torch.randint(4, vocabulary, (num_prompt,), generator=random),
        response_ids=torch.randint(4, vocabulary, (num_actions,), generator=random),
        action_mask=torch.ones(num_actions, dtype=torch.bool),
        action_log_probs=normal(0.3) - 2.7,
        reference_log_probs=normal(0.3) - 2.7,
        values=normal(),
        score=float(torch.randn(1, generator=random)),
        advantages=normal(),
        returns=normal(),
    )


@pytest.fixture
def make_items() -> Callable[..., list[BufferItem]]:
    def make(count: int, seed: int = 0) -> list[BufferItem]:
        random = torch.Generator().manual_seed(seed)
        return [random_item(index, random) for index in range(count)]

    return make


@pytest.fixture
def losing_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy's process group that reads every `ConnectionError` as the loss of another process."""

    @contextmanager
    def naming(strategy: Strategy) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            raise RlhfError("rank 1 is gone") from error

    monkeypatch.setattr(type(single_strategy("fp32")), "naming_lost_peers", naming)
