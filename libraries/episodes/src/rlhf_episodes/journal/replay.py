"""The recorded turn or episode if there is one, else a new one, which is recorded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from rlhf_core.columns import Column
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.answers import answers
from rlhf_core.rollout.row import Played
from rlhf_core.types import Completion, GenerationRequest, PhaseTimes, SamplingParams

from ..contract import Task
from .records import RequestKeys
from .turn_journal import TurnJournal

ContextT = TypeVar("ContextT")


def recorded_answers(
    journal: TurnJournal | None,
    engine: RolloutEngine,
    pairs: Sequence[tuple[GenerationRequest, ContextT]],
    sampling: SamplingParams,
    times: PhaseTimes,
) -> Iterator[tuple[ContextT, Completion]]:
    """Yield each completion with the value paired with its request, first the recorded ones.

    Args:
        journal: Journal of the player. None samples every turn.
        engine: Samples the turns that are not recorded.
        pairs: A request and any value.
        sampling: Sampling parameters.
        times: Receives the seconds and tokens of sampled turns.
    """
    if journal is None:
        yield from answers(engine, pairs, sampling, times)
        return
    keys, new = RequestKeys(sampling), []
    for request, context in pairs:
        key = keys.of(request)
        recorded = journal.turn(request.sample_id, key)
        if recorded is None:
            new.append((request, (request, key, context)))
        else:
            yield context, recorded
    for (request, key, context), completion in answers(engine, new, sampling, times) if new else ():
        journal.add_turn(request, sampling, key, completion)
        yield context, completion


async def recorded_episode(
    journal: TurnJournal | None, task: Task, kinds: Mapping[str, Column], play: Callable[[], Awaitable[Played]]
) -> Played:
    """Return the recorded episode, or play and record it.

    Args:
        journal: Journal of the player. None plays every episode.
        task: Task of the episode.
        kinds: Declarations of the columns of its rows.
        play: Plays the episode.
    """
    if journal is None:
        return await play()
    journal.open(task.prompt, task.sample_id)
    played = journal.episode(task.prompt, task.sample_id, kinds)
    if played is None:
        played = await play()
        journal.add_episode(played)
    return played
