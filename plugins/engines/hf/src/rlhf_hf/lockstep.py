"""The safe path: whole batches that start and step together, for models the slots cannot serve.

Three ways, from faster to surer. `padded`: prompts of any lengths, padded on the left (attention models, sliding
windows included). `equal`: only prompts of one length together, so that nothing is padded and no mask is needed
(recurrent and hybrid models, and those whose rotary embedding depends on a row's length). `recompute`: the same
without any cache (models with none that we know, and requests with inputs for the model).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from .forward import ModelForward
from .rows import Row, sample

Way = Literal["padded", "equal", "recompute"]


class LockstepModel:
    """A causal LM that decodes one batch of sequences from their start, in one of the three ways."""

    def __init__(self, forward: ModelForward, way: Way) -> None:
        self._forward = forward
        self.way = way
        self._last_position = None if forward.context_tokens is None else forward.context_tokens - 1
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.bool)
        self._columns: dict[str, Tensor] = {}

    def start(self, prompts: Sequence[Sequence[int]], inputs: Sequence[Mapping[str, Tensor]] = ()) -> Tensor:
        """Start a new batch; returns next-token logits [B, V] of each prompt.

        inputs: of each prompt for the model, alike in names and shapes; only where the batch is recomputed.
        """
        longest, device = max(map(len, prompts)), self._forward.device
        names = inputs[0] if inputs else ()
        self._columns = {name: torch.stack([each[name] for each in inputs]).to(device) for name in names}
        assert self.way == "padded" or min(map(len, prompts)) == longest
        padded = torch.tensor([[*([0] * (longest - len(p))), *p] for p in prompts], device=device)
        pads = torch.tensor([longest - len(p) for p in prompts], device=device)
        self._mask = torch.arange(longest, device=device) >= pads[:, None]
        # The config tells the cache which layers have a sliding window or a recurrent state.
        self._cache = DynamicCache(config=self._forward.config) if self.way == "padded" else None
        return self._run(padded)

    def step(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Next-token logits [B, V] of each whole sequence, which is one token longer than at the last call."""
        device = self._forward.device
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(sequences), 1)], dim=1)
        # Where the cache was computed with rotary embeddings that do not fit rows of this length, it begins anew.
        begins_anew = len(sequences[0]) - 1 in (self._forward.length_switches or ())
        if self.way == "recompute" or begins_anew:
            self._cache = None
            return self._run(torch.tensor([list(sequence) for sequence in sequences], device=device))
        return self._run(torch.tensor([[sequence[-1]] for sequence in sequences], device=device))

    def _run(self, input_ids: Tensor) -> Tensor:
        # Bounded above for ended rows, which may step past the model's last position.
        if self.way == "recompute":
            inputs = {**self._forward.kind.inputs(input_ids, self._mask, self._columns)}
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
    """Decodes rows that start together, until the longest ends."""

    def __init__(self, model: LockstepModel, rows: Sequence[Row]) -> None:
        self._model = model
        self._rows = rows
        self._age = -1
        """Tokens that rows of the batch have sampled, ended rows apart; -1 before the start."""

    @property
    def busy(self) -> bool:
        return any(row.finish_reason is None for row in self._rows)

    def takes(self, waiting: Sequence[Row]) -> bool:
        """Whether more rows may enter."""
        return False

    def drop(self, row: Row) -> None:
        """Decode it no further."""
        row.finish_reason = "length"

    def weights_changed(self) -> None:
        """Its rows go on from their own cache."""

    def step(self, waiting: object) -> list[Row]:
        """Run one pass; return the rows that it finished."""
        rows = self._rows
        self._age += 1
        if self._age:
            logits = self._model.step([self._sequence(row) for row in rows])
        else:
            logits = self._model.start([row.prompt_ids for row in rows], [row.request.inputs for row in rows])
        going = [index for index, row in enumerate(rows) if row.finish_reason is None]
        return sample(logits[torch.tensor(going, device=logits.device)], [rows[index] for index in going])

    def _sequence(self, row: Row) -> list[int]:
        """Prompt and answer; a finished row repeats its last token to keep the batch in lockstep."""
        return [*row.prompt_ids, *row.token_ids, *row.token_ids[-1:] * (self._age - len(row.token_ids))]


def take_alike(waiting: deque[Row], max_batch_size: int, *, same_length: bool) -> list[Row]:
    """Take the shortest prompts that may start with the first of `waiting`; inputs for the model have one shape."""

    def kind(row: Row) -> tuple[int, list[tuple[str, tuple[int, ...]]]]:
        shapes = sorted((name, tuple(values.shape)) for name, values in row.request.inputs.items())
        return len(row.prompt_ids) if same_length else 0, shapes

    first = kind(waiting[0])
    alike = [row for row in waiting if kind(row) == first]
    taken = sorted(alike, key=lambda row: len(row.prompt_ids))[:max_batch_size]
    for row in taken:
        row.num_computed = len(row.prompt_ids)
        waiting.remove(row)
    return taken
