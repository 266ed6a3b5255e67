"""The player: core's player answers each sample, and answers again if the answer is not new."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_core import Columns, Prompt
from rlhf_core.rollout import Played, Player, PlayerContext

from .section import NoveltyConfig

DRAW = 40
"""First bit of the draw's number in a sample id. Noise depends on the id, so each draw needs its own."""


class NewAnswers(Player):
    """Samples an answer again if its prompt has had the same one, up to `tries` times in total."""

    def __init__(self, config: NoveltyConfig, context: PlayerContext) -> None:
        self.default, self.config = context.default, config
        self.known: dict[tuple[tuple[int, ...], ...], None] = {}
        """The latest answers, oldest first: prompt and response of each row."""

    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        prompts = {sample_id: prompt for prompt, sample_id in samples}
        left = sorted(prompts)
        for draw in range(1, self.config.tries + 1):
            requests = [(prompts[sample_id], sample_id + (draw - 1 << DRAW)) for sample_id in left]
            found = {played.sample_id - (draw - 1 << DRAW): played for played in self.default.play(requests)}
            left = []
            # In order of sample ids: the first of two equal answers is then reproducibly the new one.
            for sample_id, played in sorted(found.items()):
                if draw < self.config.tries and self.is_known(played):
                    left.append(sample_id)
                else:
                    yield self.accept(replace(played, sample_id=sample_id), draw)

    def is_known(self, played: Played) -> bool:
        return tuple(row.sequence for row in played.rows) in self.known

    def accept(self, played: Played, draws: int) -> Played:
        """Remember the answer, and add the column `draws` to its rows."""
        answer = tuple(row.sequence for row in played.rows)
        self.known.pop(answer, None)
        self.known[answer] = None
        if len(self.known) > self.config.memory:
            del self.known[next(iter(self.known))]
        for row in played.rows:
            row.columns |= Columns({"draws": draws}, NoveltyConfig.columns)
        return played

    def state_dict(self) -> dict[str, Any]:
        """Saved in checkpoints for each process that samples answers."""
        return {"known": [[list(row) for row in answer] for answer in self.known]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.known = {tuple(tuple(row) for row in answer): None for answer in state["known"]}
