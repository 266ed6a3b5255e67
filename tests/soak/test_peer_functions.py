"""Advantages, the weighted KL and PPO, compared with the functions of verl 0.9.1, TRL 1.16 and TRL 1.12 (for PPO).

The test downloads their wheels without dependencies, and executes only the compared functions of their source, because
both packages need libraries that conflict with those of this repository.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rlhf_objective as objective
from rlhf_core.episode_view import EpisodeView
from rlhf_forward import masked_whiten
from rlhf_group.score_norms import SCORE_NORM

pytestmark = pytest.mark.slow

VERL, TRL, TRL_WITH_PPO = "verl==0.9.1", "trl==1.16.0", "trl==1.12.0"
EQUAL = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], ast.Module]:
    """source(requirement, path in its wheel): the parsed module."""
    folder = tmp_path_factory.mktemp("wheels")

    def parsed(requirement: str, path: str) -> ast.Module:
        place = folder / requirement
        if not place.exists():
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*command, "-d", str(place), requirement], check=True, timeout=300)
        (wheel,) = place.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return ast.parse(archive.read(path))

    return parsed


def executed(module: ast.AST, name: str, **names: Any) -> Callable[..., Any]:
    """Return the function `name` of a parsed module, without decorators and annotations, in a namespace of `names`."""
    (found,) = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == name]
    found.decorator_list, found.returns = [], None
    for argument in [*found.args.args, *found.args.kwonlyargs]:
        argument.annotation = None
    namespace: dict[str, Any] = {"torch": torch, "np": np, "defaultdict": defaultdict, **names}
    exec(compile(ast.Module([found], type_ignores=[]), name, "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


class Case:
    """Six answers of different lengths to two prompts, with scores of 0 and 1 at their last tokens."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.groups = torch.tensor([0, 0, 0, 1, 1, 1])
        # Two answers have the maximum length, so that no token is without counterpart.
        self.lengths = torch.tensor([5, 5, 2, 5, 5, 3])
        self.mask = torch.arange(5) < self.lengths.unsqueeze(-1)
        self.scores = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
        last = torch.arange(5) == self.lengths.unsqueeze(-1) - 1
        self.rewards = torch.where(last, self.scores.unsqueeze(-1), 0.0)
        logits = torch.randn(6, 5, 11, generator=draw).log_softmax(-1)
        self.log_probs = torch.where(self.mask, logits[..., 0], 0.0)
        self.sum_of_squares = logits.exp().square().sum(-1)

    @property
    def view(self) -> EpisodeView:
        ids = torch.arange(6)
        return EpisodeView(
            sample_ids=ids, group_ids=self.groups, scores=self.scores, lengths=self.lengths, totals=self.scores
        )


def ours(name: str, episode: Any, **options: Any) -> Tensor:
    found: Tensor = objective.FunctionUse("advantages", {"name": name, **options}).bind(where="test")(episode)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_opo_is_that_of_verl(seed: int, source: Any) -> None:
    case = Case(seed)
    module = source(VERL, "verl/trainer/ppo/core_algos.py")
    theirs, _ = executed(module, "compute_opo_outcome_advantage")(
        case.rewards.clone(), case.mask.float(), case.groups.numpy()
    )
    torch.testing.assert_close(ours("length-weighted", case.view).unsqueeze(-1) * case.mask, theirs, **EQUAL)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    "name", ["compute_optimal_token_baseline_advantage", "compute_multi_turn_optimal_token_baseline_advantage"]
)
def test_the_optimal_token_baseline_is_that_of_verl(name: str, cut: bool, seed: int, source: Any) -> None:
    """Also with a token that only one answer has, with and without a baseline there."""
    case = Case(seed)
    if cut:
        case.mask[1, 4] = case.mask[4, 4] = False
    norms = 1.0 - 2.0 * case.log_probs.exp() + case.sum_of_squares
    rows = objective.AdvantageInput(case.rewards, case.mask, case.groups, columns={SCORE_NORM: norms})
    function = executed(source(VERL, "verl/trainer/ppo/core_algos.py"), name)
    for tail in (False, True):
        theirs, _ = function(
            case.rewards.clone(),
            case.mask.float(),
            case.groups.numpy(),
            case.log_probs,
            case.sum_of_squares,
            handle_zero_tail=not tail,
        )
        torch.testing.assert_close(ours("optimal-token", rows, tail_baseline=tail), theirs, **EQUAL)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weighted", [False, True])
def test_the_weighted_kl_is_that_of_trl(weighted: bool, seed: int, source: Any) -> None:
    """The loss of TRL's GRPO (`loss_type: dapo`, all answers in one batch), and its gradient."""
    case = Case(seed)
    draw = torch.Generator().manual_seed(seed + 100)
    shift, other = (torch.randn(6, 5, generator=draw) / 10 for _ in range(2))
    log_probs = (case.log_probs + shift).requires_grad_()
    reference, advantages = case.log_probs + other, torch.randn(6, generator=draw)
    beta, tokens = 0.3, case.mask.sum()

    class Stub(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            """Metrics, which the comparison ignores."""
            return defaultdict(lambda: defaultdict(list))

    args = SimpleNamespace(use_bias_correction_kl=weighted, delta=None)
    trainer = Stub(
        beta=beta,
        args=args,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        loss_type="dapo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(6, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(6, 5, dtype=torch.int64),
        "completion_mask": case.mask.long(),
        "advantages": advantages,
        "old_per_token_logps": case.log_probs,
        "ref_per_token_logps": reference,
        "num_items_in_batch": tokens,
    }
    module = source(TRL, "trl/trainer/grpo_trainer.py")
    theirs = executed(module, "_compute_loss", nanmin=torch.min, nanmax=torch.max)(trainer, None, inputs)
    (their_gradient,) = torch.autograd.grad(theirs, log_probs)

    loss = objective.ppo_policy_loss(
        log_probs,
        case.log_probs,
        advantages.unsqueeze(-1).expand_as(log_probs),
        case.mask,
        clip_eps_low=0.2,
        clip_eps_high=0.2,
    ).losses
    kl = objective.kl_estimate(log_probs, reference, "k3")
    if weighted:
        kl = kl * objective.importance_ratio(log_probs, case.log_probs, case.mask)
    mine = (loss + beta * torch.where(case.mask, kl, 0.0)).sum() / tokens
    (my_gradient,) = torch.autograd.grad(mine, log_probs)
    torch.testing.assert_close(mine, theirs, **EQUAL)
    torch.testing.assert_close(my_gradient, their_gradient, **EQUAL)


def statements(module: ast.Module, first: str, last: str) -> list[ast.stmt]:
    """Return the consecutive statements of `PPOTrainer.train` that assign `first` up to the last one of `last`."""

    def assigns(node: ast.stmt, name: str) -> bool:
        return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name

    bodies = [node.body for node in ast.walk(module) if isinstance(getattr(node, "body", None), list)]
    (body,) = [each for each in bodies if any(assigns(node, first) for node in each)]
    start = next(place for place, node in enumerate(body) if assigns(node, first))
    end = max(place for place, node in enumerate(body) if assigns(node, last))
    return body[start : end + 1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_losses_of_ppo_are_those_of_trl(estimator: str, seed: int, source: Any) -> None:
    """Answers of full length, so that TRL's masks of policy and values are equal."""
    draw = torch.Generator().manual_seed(seed)
    shape, mask = (6, 7), torch.ones(6, 7, dtype=torch.bool)
    old, reference = (-torch.rand(shape, generator=draw) - 0.2 for _ in range(2))
    values, scores = torch.randn(shape, generator=draw), torch.randn(6, generator=draw)
    args = SimpleNamespace(kl_coef=0.05, kl_estimator=estimator, whiten_rewards=False, gamma=0.99, lam=0.95)
    args.cliprange, args.cliprange_value, args.vf_coef = 0.2, 0.3, 0.1
    module = source(TRL_WITH_PPO, "trl/experimental/ppo/ppo_trainer.py")
    namespace: dict[str, Any] = {"torch": torch, "args": args}
    for name in ("masked_mean", "masked_var", "masked_whiten"):
        namespace[name] = executed(module, name, **namespace)
    namespace |= {
        "logprobs": old,
        "ref_logprobs": reference,
        "values": values,
        "scores": scores,
        "responses": torch.zeros(shape),
        "sequence_lengths": torch.full((6,), 6),
        "sequence_lengths_p1": torch.full((6,), 7),
        "padding_mask": ~mask,
        "padding_mask_p1": ~mask,
    }
    exec(compile(ast.Module(statements(module, "logr", "advantages"), []), "rewards", "exec"), namespace)

    kl = objective.kl_estimate(old, reference, estimator)
    rewards = objective.token_rewards(scores, kl, 0.05, mask)
    result = objective.gae(rewards, values, mask, 0.99, 0.95)
    torch.testing.assert_close(rewards, namespace["rewards"], **EQUAL)
    torch.testing.assert_close(result.returns, namespace["returns"], **EQUAL)
    unbiased = (1 - 1 / mask.numel()) ** 0.5
    advantages = masked_whiten(result.advantages, mask)
    torch.testing.assert_close(advantages * unbiased, namespace["advantages"], **EQUAL)

    new = (old + torch.randn(shape, generator=draw) / 5).requires_grad_()
    new_values = (values + torch.randn(shape, generator=draw) / 2).requires_grad_()
    namespace |= {"micro_batch_inds": torch.arange(6), "mb_advantage": namespace["advantages"], "mb_logprobs": old}
    namespace |= {"mb_return": namespace["returns"], "mb_values": values, "new_logprobs": new, "vpred": new_values}
    exec(compile(ast.Module(statements(module, "vpredclipped", "loss"), []), "losses", "exec"), namespace)
    theirs = torch.autograd.grad(namespace["loss"], [new, new_values])
    policy = objective.ppo_policy_loss(new, old, advantages * unbiased, mask, clip_eps_low=0.2, clip_eps_high=0.2)
    value = objective.value_loss(new_values, values, result.returns, mask, clip_eps=0.3)
    torch.testing.assert_close(policy.losses.mean(), namespace["pg_loss"], **EQUAL)
    torch.testing.assert_close(value.losses.mean(), namespace["vf_loss"], **EQUAL)
    mine = torch.autograd.grad(policy.losses.mean() + 0.1 * value.losses.mean(), [new, new_values])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, **EQUAL)
