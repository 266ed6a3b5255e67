"""A player that samples one answer to each prompt, with request options of the prompt's record."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.errors import DataError, PluginError
from rlhf_core.rollout import Played, Player, PlayerContext, Row
from rlhf_core.rollout.answers import answers
from rlhf_core.rollout.player import SingleTurnPlayer
from rlhf_core.types import GenerationRequest, Prompt

logger = logging.getLogger("rlhf")


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
        self._was_checked = False

    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        """Yield the answer to each sample.

        Args:
            samples: Pairs of a prompt and a sample id.
        """
        context = self._context
        self._warn_of_missing(samples)
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

    def _warn_of_missing(self, samples: Sequence[tuple[Prompt, int]]) -> None:
        """Warn once if none of the first prompts has a key."""
        if self._was_checked or not samples:
            return
        self._was_checked = True
        for name, key in self._keys.items():
            if all(key not in prompt.metadata for prompt, _ in samples):
                logger.warning(
                    "prompts.sampling.%s: none of the first %d prompts has the key %s", name, len(samples), key
                )


def options_of(metadata: Mapping[str, Any], keys: Mapping[str, str], position: int) -> dict[str, Any]:
    """Return the request options of a prompt.

    Args:
        metadata: The record without prompt and answer.
        keys: Request option -> key of the record.
        position: Position of the prompt, for the error.

    Returns:
        Option -> number, or a mapping for the structure, without the keys that the record lacks or that are null.

    Raises:
        DataError: A value has another type. The engine checks the value itself.
    """
    options = {name: metadata[key] for name, key in keys.items() if metadata.get(key) is not None}
    for name, value in options.items():
        is_valid = isinstance(value, Mapping) if name == "structure" else isinstance(value, int | float)
        if isinstance(value, bool) or not is_valid:
            wanted = "an object" if name == "structure" else "a number"
            where = f"prompt {position}, key {keys[name]}"
            raise DataError(f"the {name} is {value!r:.100}", where=where, hint=f"use {wanted}, or remove the key")
    return options
