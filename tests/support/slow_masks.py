"""A slow reference for the masks of episodes: they are found again from the requests of the engine alone."""

from __future__ import annotations

from typing import Any


def check_masks(episode: Any, engine: Any) -> None:
    """Assert that the policy's own tokens count, each once, and no other ones.

    Args:
        episode: The played episode (`Played`).
        engine: Its engine, with `turns`: each request with the ids of its answer.
    """
    turns = [(request, ids) for request, ids in engine.turns if request.sample_id == episode.sample_id]
    for row in episode.rows:
        sequence, mask = list(row.sequence), [False] * len(row.sequence)
        for request, token_ids in turns:
            if request.branch == row.branch:
                start = len(request.prompt_ids)
                end = start + len(token_ids)
                assert sequence[:end] == [*request.prompt_ids, *token_ids]
                mask[start:end] = [True] * len(token_ids)
        assert not any(mask[: len(row.prompt_ids)])
        assert mask[len(row.prompt_ids) :] == row.mask
    assert sum(sum(row.mask) for row in episode.rows) == sum(len(token_ids) for _, token_ids in turns)
