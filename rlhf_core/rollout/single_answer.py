"""One turn of the policy for each sample: a run without an environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..environments.attempt import Played
from ..environments.play import answers
from ..environments.row import Row
from ..protocols import RolloutEngine
from ..types import GenerationRequest, PhaseTimes, Prompt, SamplingParams

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
        asked = [(GenerationRequest(sample_id=i, prompt_ids=prompt.prompt_ids), prompt) for prompt, i in samples]
        for prompt, completion in answers(self._engine, asked, self._sampling, times):
            row = Row(branch=0, text=prompt.text, prompt_ids=prompt.prompt_ids, messages=prompt.messages)
            text = self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
            assert isinstance(text, str)
            row.sample(completion, text, (), 0)
            yield Played(prompt, completion.sample_id, (row,))
