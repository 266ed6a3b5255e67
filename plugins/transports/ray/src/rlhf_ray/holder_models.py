"""From the seed's factory functions to a `MakerWorker`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import nn

from rlhf_core.components import EngineContext
from rlhf_core.config import RewardCallOptions
from rlhf_core.contexts import strategy_context
from rlhf_core.errors import UserInputError
from rlhf_core.hooks import HookRelay
from rlhf_core.models import ReferencePass, adapter_off, disable_dropout, is_lora
from rlhf_core.plugins import load, resolve_build
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rewards import RewardScorer, RewardSpec
from rlhf_core.seed import seed_reward
from rlhf_core.strategy import Strategy
from rlhf_core.types import SamplingParams

from .maker_worker import MakerWorker, trained_names

REWARD_NAME = "reward"
"""What the one reward of a holder is called on its samples."""


@dataclass(frozen=True, slots=True)
class HolderModels:
    """What a `model_fn` returned, ready for inference."""

    actor: nn.Module
    critic: nn.Module | None
    reward: RewardSpec
    reference: nn.Module | None
    reference_context: Callable[[], AbstractContextManager[Any]]
    actor_adapter: frozenset[str]
    critic_adapter: frozenset[str]


class IdTokenizer:
    """Stands in where a maker is given token ids only: texts are the ids, with spaces between."""

    pad_token_id: int | None = None
    chat_template: str | None = None

    def __init__(self, eos_token_id: int | Sequence[int] | None) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The ids; the EOS is left out where special tokens are not wanted."""
        special = self.eos_token_id if isinstance(self.eos_token_id, Sequence) else (self.eos_token_id,)
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i in special))

    def batch_decode(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """`decode` of each."""
        return [self.decode(ids, skip_special_tokens) for ids in batch]


def make_strategy(strategy_fn: Callable[[], Any]) -> Strategy:
    """The factory's strategy, joined. A ColossalAI booster trains only: a maker then computes as `single` does."""
    strategy = strategy_fn()
    if not isinstance(strategy, Strategy):
        selected = load("strategies", "single")
        strategy = resolve_build(selected)(selected.component.config(), strategy_context("auto"))
    strategy = cast(Strategy, strategy)
    strategy.setup()
    return strategy


def make_models(
    model_fn: Callable[[], tuple[Any, ...]], strategy: Strategy, *, kl_coef: float, seed: int = 0
) -> HolderModels:
    """Build and place the models; `seed` is for an installed reward.

    Raises `UserInputError` when the factory returned something else.
    """
    with strategy.model_init_context():
        returned = model_fn()
    if not isinstance(returned, tuple | list) or len(returned) != 4:
        raise UserInputError(
            "it must return (actor, critic, reward model, initial model)", where="model_fn of the experience maker"
        )
    actor, critic, reward, initial = returned
    if not isinstance(actor, nn.Module):
        raise UserInputError(f"the actor is a {type(actor).__name__}, not a causal language model", where="model_fn")
    adapters = [trained_names(model) if model is not None else frozenset[str]() for model in (actor, critic)]
    reference, context = _reference(actor, initial, strategy, kl_coef)
    return HolderModels(
        actor=_placed(actor, strategy),
        critic=None if critic is None else _placed(critic, strategy),
        reward=seed_reward(reward, strategy.device, offload=False, seed=seed, where="model_fn"),
        reference=reference,
        reference_context=context,
        actor_adapter=adapters[0],
        critic_adapter=adapters[1],
    )


def _reference(
    actor: nn.Module, initial: nn.Module | None, strategy: Strategy, kl_coef: float
) -> tuple[nn.Module | None, Callable[[], AbstractContextManager[Any]]]:
    """The initial model, or the actor with its adapter off; none where no KL is used."""
    if kl_coef == 0:
        return None, nullcontext
    if initial is not None and initial is not actor:
        return _placed(initial, strategy), nullcontext
    if is_lora(actor):
        return actor, partial(adapter_off, actor)
    raise UserInputError(
        "the initial model is the actor itself, which changes" if initial is actor else "there is no initial model",
        where="model_fn",
        hint="return a copy of the actor as it starts (copy.deepcopy), or set kl_coef=0",
    )


def _placed(model: nn.Module, strategy: Strategy) -> nn.Module:
    disable_dropout(model)
    return strategy.prepare_inference(model)


def make_worker(
    models: HolderModels,
    strategy: Strategy,
    tokenizer: Any,
    sampling: SamplingParams,
    hooks: HookRelay,
    *,
    engine: str,
    engine_options: Mapping[str, Any],
    seed: int,
    kl_coef: float,
    reward_timeout_seconds: float,
    sync_idle_seconds: float,
) -> MakerWorker:
    """An engine over the actor, a scorer over the reward, a pass over reference and critic."""
    selected = load("engines", engine)
    context = EngineContext(model=models.actor, tokenizer=tokenizer, device=strategy.device, seed=seed)
    built = resolve_build(selected)(selected.component.config.model_validate(dict(engine_options)), context)
    policy = RewardCallOptions(timeout_seconds=reward_timeout_seconds)
    reference_pass = ReferencePass(
        strategy,
        temperature=sampling.temperature,
        reference=models.reference,
        reference_context=models.reference_context,
        critic=models.critic,
    )
    return MakerWorker(
        engine=cast(RolloutEngine, built),
        tokenizer=tokenizer,
        sampling=sampling,
        samples_per_prompt=1,
        scorer=RewardScorer([replace(models.reward, name=REWARD_NAME, call_options=policy)]),
        hooks=hooks,
        policy=models.actor,
        critic=models.critic,
        policy_adapter=models.actor_adapter,
        critic_adapter=models.critic_adapter,
        reference_pass=reference_pass,
        kl_coef=kl_coef,
        number=lambda position, k: position,
        sync_idle_seconds=sync_idle_seconds,
    )
