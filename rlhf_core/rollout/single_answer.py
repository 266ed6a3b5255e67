"""One turn of the policy for each sample: a run without an environment."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..environments.attempt import Played
from ..environments.play import engine_error
from ..environments.row import Row
from ..protocols import RolloutEngine
from ..types import Completion, GenerationRequest, PhaseTimes, Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SingleAnswers:
    """Samples one answer to each prompt."""

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> None:
        self._engine = engine
        self.tokenizer = tokenizer
        self._sampling = sampling

    def close(self) -> None:
        """It keeps nothing."""

    def play(self, samples: Sequence[tuple[Prompt, int]], times: PhaseTimes) -> Iterator[Played]:
        """Yield what was answered for each (prompt, sample id), each as soon as it is done. Adds to `times`."""
        prompts = {sample_id: prompt for prompt, sample_id in samples}
        requests = [GenerationRequest(sample_id=i, prompt_ids=prompt.prompt_ids) for i, prompt in prompts.items()]
        started = time.perf_counter()
        for completion in self._engine.generate(requests, self._sampling):
            prompt = prompts.pop(completion.sample_id, None)
            if prompt is None:
                raise engine_error(f"answered sample {completion.sample_id}, which is not or no longer asked for")
            times.response_tokens += len(completion.token_ids)
            yield Played(prompt, completion.sample_id, (self._row(prompt, completion),))
        if prompts:
            raise engine_error(f"left {len(prompts)} of {len(requests)} samples without an answer")
        times.rollout_s += time.perf_counter() - started

    def _row(self, prompt: Prompt, completion: Completion) -> Row:
        row = Row(branch=0, text=prompt.text, prompt_ids=prompt.prompt_ids, messages=prompt.messages)
        text = self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        row.sample(completion, text, (), 0)
        return row
