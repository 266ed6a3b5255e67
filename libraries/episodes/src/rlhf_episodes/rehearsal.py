"""Play one turn of an environment with a made-up completion, to find its errors before weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from rlhf_core.components import TaskContext
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.player import RunPlayer
from rlhf_core.types import Completion, GenerationRequest, Prompt, SamplingParams
from rlhf_core.wiring.inputs import RunInputs

from .player import assignment
from .shared import is_shared

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .section import EnvironmentConfig


_MAX_SEARCHED = 1000


def play_one_turn(inputs: RunInputs, config: EnvironmentConfig) -> None:
    """Play one turn of the first prompt of each environment as the run would, deadlines included.

    `config` is the run's section `environment`. Raises `EpisodeError` or any other error that the run would raise.
    """
    resolved = inputs.resolved
    one_turn = config.for_one_turn()
    shortened = {
        name: replace(each, config=one_turn) if each.config is config else each
        for name, each in resolved.sections.items()
    }
    resolved = replace(resolved, sections=shortened)
    options = getattr(resolved.engine.config, "request_options", {})
    engine = cast(RolloutEngine, _StubEngine(inputs.tokenizer, options))
    seed = resolved.run.train.seed
    samples = [(prompt, number) for number, prompt in enumerate(_prompts(inputs, config))]
    with closing(RunPlayer(resolved, engine, inputs.tokenizer, resolved.sampling, seed=seed)) as player:
        list(player.play(samples))


def _prompts(inputs: RunInputs, config: EnvironmentConfig) -> list[Prompt]:
    """Return the first prompt of each environment of the run, among the first `_MAX_SEARCHED` ones.

    Environments that share resources are left out, since opening those may load weights.
    """
    environment, parts = inputs.resolved.sections["environment"], config.parts()
    if not parts:
        return [] if is_shared(environment) else [inputs.prompts.prompt(0)]
    labels = {label for label, part in parts.items() if not is_shared(part.section["name"])}
    assign = assignment(environment, TaskContext(inputs.resolved.run.train.seed))
    found: dict[str, Prompt] = {}
    for position in range(_MAX_SEARCHED if labels else 0):
        prompt = inputs.prompts.prompt(position)
        if (label := assign(prompt)) in labels:
            found.setdefault(label, prompt)
        if labels == set(found):
            break
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _StubEngine:
    """The methods of an engine that a player uses. Answers each request with one token and the EOS."""

    tokenizer: PreTrainedTokenizerBase
    request_options: Mapping[str, str]
    policy_version: int = 0
    context_tokens: int | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self.tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset({int(cast(int, eos))})

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        special = set(self.tokenizer.all_special_ids)
        plain = next(token for token in range(len(self.tokenizer)) if token not in special)
        for request in requests:
            tokens = [plain, *self.eos_token_ids][: request.max_new_tokens or sampling.max_new_tokens]
            yield Completion(
                sample_id=request.sample_id,
                token_ids=tuple(tokens),
                logprobs=(0.0,) * len(tokens),
                finish_reason="stop" if self.eos_token_ids else "length",
                policy_version=0,
                branch=request.branch,
                support_ids=[[token] for token in tokens] if sampling.top_k else None,
            )
