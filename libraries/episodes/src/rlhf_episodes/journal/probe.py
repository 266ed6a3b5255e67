"""Tests whether recorded turns come from the engine's weights, by sampling one of them again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.answers import answers
from rlhf_core.types import GenerationRequest, PhaseTimes, SamplingParams

from .records import Record, completion_of, packed, unpacked

TOLERANCE = 1e-4
"""Maximum difference of a log-prob in nats. Weights after one more update differ by more, or do not matter."""


def probe_record(request: GenerationRequest, sampling: SamplingParams) -> Record | None:
    """Return a request as JSON values, or None if it has inputs besides tokens.

    Args:
        request: Request of a recorded turn.
        sampling: Sampling parameters of the call to the engine.
    """
    if request.inputs:
        return None
    return {
        "prompt_ids": packed(request.prompt_ids, "i"),
        "branch": request.branch,
        "offset": request.offset,
        "max_new_tokens": request.max_new_tokens,
        "options": dict(request.options),
        "sampling": asdict(sampling),
    }


def is_of_weights(engine: RolloutEngine, line: Record) -> bool:
    """Whether the engine samples a recorded turn as it was recorded.

    Args:
        engine: The engine with the weights in question. Nothing else is sampled meanwhile.
        line: The line of the turn, with its request.
    """
    values: dict[str, Any] = dict(line["probe"])
    sampling = values.pop("sampling")
    request = GenerationRequest(
        sample_id=line["sample"], **{**values, "prompt_ids": unpacked(values["prompt_ids"], "i")}
    )
    parameters = SamplingParams(**{**sampling, "stop": tuple(sampling["stop"])})
    recorded = completion_of(line["completion"], line["sample"], engine.policy_version)
    ((_, found),) = answers(engine, [(request, None)], parameters, PhaseTimes())
    if found.token_ids != recorded.token_ids:
        return False
    pairs = zip(found.logprobs, recorded.logprobs, strict=True)
    return all(abs(ours - theirs) <= TOLERANCE for ours, theirs in pairs)
