"""A player that samples one answer to each prompt, with request options of the prompt's record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlhf_core.errors import PluginError
from rlhf_core.rollout import Played, Player, PlayerContext, Row
from rlhf_core.rollout.answers import answers
from rlhf_core.rollout.player import SingleTurnPlayer
from rlhf_core.types import GenerationRequest, Prompt

from .prompt_sampling import options_of


class PromptPlayer(Player):
    """Samples one answer to each prompt, like core's player, with options of the prompt."""

    def __init__(self, context: PlayerContext, keys: Mapping[str, str]) -> None:
        """Raise `PluginError` if another section's player would be bypassed.

        Args:
            context: Engine, tokenizer and sampling parameters.
            keys: Request option -> key of the record.
        """
        if not isinstance(context.default, SingleTurnPlayer):
            raise PluginError(
                "makes the requests itself, so it cannot wrap the player of another section",
                where="prompts.sampling",
                hint="remove one of the two sections",
            )
        self._context, self._keys = context, keys

    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        """Yield the answer to each sample.

        Args:
            samples: Pairs of a prompt and a sample id.
        """
        context = self._context
        requests = [
            (
                GenerationRequest(
                    sample_id=number,
                    prompt_ids=prompt.prompt_ids,
                    inputs=prompt.columns.model_inputs,
                    options=options_of(prompt.metadata, self._keys, prompt.position),
                ),
                prompt,
            )
            for prompt, number in samples
        ]
        for prompt, completion in answers(context.engine, requests, context.sampling, context.times):
            row = Row(text=prompt.text, prompt_ids=prompt.prompt_ids, messages=prompt.messages)
            row.sample(completion, str(context.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)))
            yield Played(prompt, completion.sample_id, (row,))
