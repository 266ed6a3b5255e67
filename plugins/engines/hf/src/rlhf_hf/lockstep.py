"""The slower paths: batches that start and step together, for models that the slot cache does not support.

There are three, from fastest to safest. `padded`: prompts of any lengths, padded on the left (attention models, sliding
windows included). `equal`: batches of prompts with equal length, without padding or a mask (recurrent and hybrid
models, those whose rotary embedding depends on a row's length, and requests with inputs of a `PromptInputs` kind, whose
prompts are computed once for all answers). `recompute`: the same without a cache (models without a known cache, and
requests with other inputs for the model).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from rlhf_models import PromptInputs

from .forward import ModelForward
from .rows import DecodingRow, sample

Way = Literal["padded", "equal", "recompute"]


class LockstepModel:
    """A causal LM that decodes one batch of sequences from their start, on one of the three paths."""

    def __init__(self, forward: ModelForward, way: Way) -> None:
        self._forward = forward
        self.way = way
        self._last_position = None if forward.context_tokens is None else forward.context_tokens - 1
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._columns: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] | None = None
        """Values for tokens after prompts with inputs (`PromptInputs.kept`)."""

    def start(self, prompts: Sequence[Sequence[int]], inputs: Sequence[Mapping[str, Tensor]] = ()) -> Tensor:
        """Start a new batch and return the next-token logits [B, V] of the prompts.

        `inputs`: model inputs of each prompt, with equal names and shapes. Only for `equal` and `recompute`.
        """
        if self.way == "equal" and inputs and inputs[0]:
            return self._start_shared(prompts, inputs)
        longest, device = max(map(len, prompts)), self._forward.device
        self._columns = self._stacked(inputs)
        assert self.way == "padded" or min(map(len, prompts)) == longest
        padded = torch.tensor([[*([0] * (longest - len(p))), *p] for p in prompts], device=device)
        pads = torch.tensor([longest - len(p) for p in prompts], device=device)
        self._mask = torch.arange(longest, device=device) >= pads[:, None]
        # The config determines which layers have a sliding window or a recurrent state.
        self._cache = DynamicCache(config=self._forward.config) if self.way == "padded" else None
        return self._run(padded)

    def _start_shared(self, prompts: Sequence[Sequence[int]], inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Compute each different prompt once with its inputs, and return the logits [B, V] of all rows."""
        keys = [(tuple(prompt), *map(id, each.values())) for prompt, each in zip(prompts, inputs, strict=True)]
        firsts = {key: keys.index(key) for key in keys}
        places = {key: place for place, key in enumerate(firsts)}
        device = self._forward.device
        ids = torch.tensor([list(prompts[first]) for first in firsts.values()], device=device)
        columns = self._stacked([inputs[first] for first in firsts.values()])
        mask = torch.ones(ids.shape, dtype=torch.bool, device=device)
        arguments = {**self._forward.kind.inputs(ids, mask, columns)}
        positions = arguments.pop("position_ids", None)
        logits, cache = self._forward(
            ids,
            position_ids=positions,
            cache=DynamicCache(config=self._forward.config),
            use_cache=True,
            inputs=arguments,
        )
        index = torch.tensor([places[key] for key in keys], device=device)
        cache.batch_select_indices(index)
        self._cache, self._mask = cache, mask[index]
        assert isinstance(self._forward.kind, PromptInputs)
        self._kept = {name: values[index] for name, values in self._forward.kind.kept(columns).items()}
        return logits[index, -1]

    def _stacked(self, inputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Model inputs of a batch, name -> [B, ...]."""
        names = inputs[0] if inputs else ()
        return {name: torch.stack([each[name] for each in inputs]).to(self._forward.device) for name in names}

    def step(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Next-token logits [B, V] of the full sequences, each one token longer than at the last call."""
        device = self._forward.device
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(sequences), 1)], dim=1)
        # Recompute the cache if its rotary embeddings do not apply to rows of this length.
        restarts = len(sequences[0]) - 1 in (self._forward.length_switches or ())
        if self.way == "recompute" or restarts:
            self._cache = None
            return self._run(torch.tensor([list(sequence) for sequence in sequences], device=device))
        return self._run(torch.tensor([[sequence[-1]] for sequence in sequences], device=device))

    def _run(self, input_ids: Tensor) -> Tensor:
        # Positions are clamped for ended rows, which may step past the model's last position.
        if self.way == "recompute":
            inputs = {**self._forward.kind.inputs(input_ids, self._mask, self._columns)}
            positions = inputs.pop("position_ids", None)
        elif self._kept is not None:
            assert isinstance(self._forward.kind, PromptInputs)
            lengths = self._mask.sum(1) - input_ids.shape[1]
            inputs = {**self._forward.kind.continued(input_ids, lengths, self._kept)}
            positions = inputs.pop("position_ids", None)
        else:
            inputs, positions = {}, self._mask.cumsum(dim=1)[:, -input_ids.shape[1] :] - 1
        logits, cache = self._forward(
            input_ids,
            position_ids=None if positions is None else positions.clamp(0, self._last_position),
            attention_mask=self._mask if self.way == "padded" else None,
            cache=self._cache,
            use_cache=self.way != "recompute",
            inputs=inputs,
        )
        if self.way != "recompute":
            self._cache = cache
        return logits[:, -1]


class LockstepBatch:
    """Decodes rows that start together until the longest one ends."""

    def __init__(self, model: LockstepModel, rows: Sequence[DecodingRow]) -> None:
        self._model = model
        self._rows = rows
        self._age = -1
        """Number of tokens sampled by each row that has not ended, -1 before the start."""

    @property
    def is_busy(self) -> bool:
        return any(row.finish_reason is None for row in self._rows)

    def can_admit(self, waiting: Sequence[DecodingRow]) -> bool:
        """Whether more rows may enter: never."""
        return False

    def drop(self, row: DecodingRow) -> None:
        """Stop decoding a row."""
        row.finish_reason = "length"

    def weights_changed(self) -> None:
        """Do nothing: rows continue from their own cache."""

    def step(self, waiting: object) -> list[DecodingRow]:
        """Run one pass and return the rows that it finished."""
        rows = self._rows
        self._age += 1
        if self._age:
            logits = self._model.step([self._sequence(row) for row in rows])
        else:
            logits = self._model.start([row.prompt_ids for row in rows], [row.request.inputs for row in rows])
        open_rows = [index for index, row in enumerate(rows) if row.finish_reason is None]
        return sample(logits[torch.tensor(open_rows, device=logits.device)], [rows[index] for index in open_rows])

    def _sequence(self, row: DecodingRow) -> list[int]:
        """Prompt and answer. A finished row repeats its last token to keep the batch in lockstep."""
        return [*row.prompt_ids, *row.token_ids, *row.token_ids[-1:] * (self._age - len(row.token_ids))]


def take_matching(waiting: deque[DecodingRow], max_batch_size: int, *, same_length: bool) -> list[DecodingRow]:
    """Take the shortest prompts that can share a batch with the first waiting row (equal shapes of model inputs)."""

    def layout(row: DecodingRow) -> tuple[int, list[tuple[str, tuple[int, ...]]]]:
        shapes = sorted((name, tuple(values.shape)) for name, values in row.request.inputs.items())
        return len(row.prompt_ids) if same_length else 0, shapes

    first = layout(waiting[0])
    matching = [row for row in waiting if layout(row) == first]
    taken = sorted(matching, key=lambda row: len(row.prompt_ids))[:max_batch_size]
    for row in taken:
        row.num_computed = len(row.prompt_ids)
        waiting.remove(row)
    return taken
