"""`MakerWorker`: the working parts of a maker process, whoever hosts it. No Ray in here.

One thread calls `make`; another brings weights through `weights`. They meet at the border between two batches only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlhf_core.hooks import HookRelay
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rewards import RewardScorer
from rlhf_core.rollout import ModuleReceiver, PolicyExperienceMaker
from rlhf_core.types import PhaseTimes, Prompt, RolloutGroup, SamplingParams

from .holder_weights import StagedWeights, WeightTarget

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.models import ReferencePass


class MakerWorker:
    """An engine, a scorer and, where needed, a reference and a critic; and the weights on their way to them."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        samples_per_prompt: int,
        scorer: RewardScorer,
        hooks: HookRelay,
        policy: nn.Module | None = None,
        critic: nn.Module | None = None,
        policy_adapter: frozenset[str] = frozenset(),
        critic_adapter: frozenset[str] = frozenset(),
        reference_pass: ReferencePass | None = None,
        kl_coef: float | None = None,
        number: Callable[[int, int], int] | None = None,
        sync_idle_seconds: float = 600.0,
    ) -> None:
        """policy: the module the engine generates with, where it is of this process; versions are then checked
        on arrival and may be adapter-only. critic: the module of `reference_pass` that takes new weights.
        policy_adapter, critic_adapter: names of an adapter-only version (see `trained_names`).
        """
        self.engine = engine
        self.scorer = scorer
        self.maker = PolicyExperienceMaker(
            engine=engine,
            tokenizer=tokenizer,
            sampling=sampling,
            samples_per_prompt=samples_per_prompt,
            scorer=scorer,
            hooks=hooks,
            reference_pass=reference_pass,
            kl_coef=kl_coef,
            number=number,
        )
        targets = {"policy": WeightTarget(engine.receiver(), policy, policy_adapter, engine.weights_updated)}
        if critic is not None:
            received = ModuleReceiver(critic, on_commit=lambda version: None)
            targets["critic"] = WeightTarget(received, critic, critic_adapter)
        self.weights = StagedWeights(targets, idle_seconds=sync_idle_seconds)

    def make(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Make one batch, all of it with the newest whole version that had arrived when it began."""
        with self.weights.making():
            return list(self.maker.make(prompts))

    def take_times(self) -> PhaseTimes:
        """Seconds spent since the last call."""
        return self.maker.take_times()

    def close(self) -> None:
        """Free the engine and end the rewards' threads and processes."""
        try:
            self.engine.close()
        finally:
            self.scorer.close()


def trained_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are trained: adapter, and what is trained beside it (a value head, biases).

    Empty where everything is trained: there is no adapter then. Ask before freezing a model for inference.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    return frozenset(trained) if frozen else frozenset()
