"""Carries out turns of samples on the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tinker import types

from rlhf_core.errors import DeadlineError

from .checkpoints import Checkpoints
from .failures import fail
from .limits import Limits
from .ranks import Ranks
from .requests import ModelFacts, SampleOrder, read, sample_order
from .sampling import SampleWork
from .store import PROTO_RESULT, Store, StoredRequest
from .wire import InvalidRequest, Sampled, sample_output


class SampleTurns:
    """Samples for the requests of a turn together, and stores each request's result."""

    def __init__(self, store: Store, ranks: Ranks, facts: ModelFacts, limits: Limits, checkpoints: Checkpoints) -> None:
        """Create the object.

        Args:
            store: the journal.
            ranks: the ranks.
            facts: facts of the base model.
            limits: limits of the service.
            checkpoints: the saved adapters.
        """
        self._store, self._ranks, self._facts, self._limits = store, ranks, facts, limits
        self._checkpoints = checkpoints

    def run(self, requests: Sequence[StoredRequest]) -> None:
        """Carry out a turn and store its results.

        Args:
            requests: requests for samples of one adapter.
        """
        orders: dict[str, SampleOrder] = {}
        folder: str | None = None
        for request in requests:
            try:
                sampler = self._store.row("SELECT model_path FROM samplers WHERE id=?", request.owner)
                if sampler is None:
                    raise InvalidRequest(f"the sampling session {request.owner} does not exist")
                if sampler["model_path"] is not None:
                    folder = str(self._checkpoints.folder(request.tenant, sampler["model_path"]))
                message = read(types.SampleRequest, self._store.body(request.id) or b"")
                orders[request.id] = sample_order(message, request.id, self._facts, self._limits)
            except Exception as error:  # an unforeseen one must not end the service for all tenants
                fail(self._store, request, error)
        try:
            results = self._answers(folder, orders)
        except DeadlineError:
            raise
        except Exception as error:
            for request in requests:
                if request.id in orders:
                    fail(self._store, request, error)
            return
        with self._store.transaction():
            for request_id, result in results.items():
                self._store.finish(request_id, result, PROTO_RESULT)

    def _answers(self, folder: str | None, orders: Mapping[str, SampleOrder]) -> dict[str, bytes]:
        """Result of each request. Equal seeds are sampled in separate rounds, since they identify rows of a batch."""
        waiting = [work for order in orders.values() for work in order.works]
        sampled: dict[int, Sampled] = {}
        while waiting:
            batch: dict[tuple[int, int], SampleWork] = {}
            later = [work for work in waiting if batch.setdefault((work.key, work.index), work) is not work]
            works = list(batch.values())
            found = self._ranks.call("sample", folder=folder, works=works)
            sampled.update((id(work), each) for work, each in zip(works, found, strict=True))
            waiting = later
        scored = self._scores(folder, list(orders.values()), sampled)
        return {
            request_id: _answer(order, [sampled[id(work)] for work in order.works], scored)
            for request_id, order in orders.items()
        }

    def _scores(
        self, folder: str | None, orders: Sequence[SampleOrder], sampled: Mapping[int, Sampled]
    ) -> dict[_Row, _Scores]:
        """Scores of all rows that the requests need, computed together for each number of top tokens."""
        rows: dict[int, dict[_Row, None]] = {}  # number of top tokens -> rows, each once
        for order in orders:
            if order.prompt_logprobs:
                rows.setdefault(order.top_prompt, {})[_Row(tuple(order.prompt_ids), order.top_prompt)] = None
            if order.top_sample:
                of_order = rows.setdefault(order.top_sample, {})
                for work in order.works:
                    of_order[_Row((*order.prompt_ids, *sampled[id(work)].token_ids), order.top_sample)] = None
        found: dict[_Row, _Scores] = {}
        for num_top, of_number in rows.items():
            scores = self._ranks.call(
                "score", folder=folder, rows=[row.token_ids for row in of_number], num_top=num_top
            )
            found.update(zip(of_number, scores, strict=True))
        return found


class _Row(NamedTuple):
    """A row to score."""

    token_ids: tuple[int, ...]
    num_top: int


_Scores = tuple[list[float], list[dict[int, float]]]
"""Log-probs of a row's tokens after the first, and the most likely tokens at each."""


def _answer(order: SampleOrder, samples: Sequence[Sampled], scored: Mapping[_Row, _Scores]) -> bytes:
    prompt, last = tuple(order.prompt_ids), order.prompt_logprobs
    logprobs: list[float] | None = None
    prompt_top: list[dict[int, float]] = []
    if last is not None:
        before = len(prompt) - last
        found: _Scores = scored[_Row(prompt, order.top_prompt)] if last else ([], [])
        logprobs = [math.nan] * before + found[0][len(found[0]) - last :]
        if order.top_prompt:
            prompt_top = [{}] * before + found[1][len(found[1]) - last :]
    if order.top_sample:
        of_samples = [scored[_Row((*prompt, *each.token_ids), order.top_sample)] for each in samples]
        samples = [
            Sampled(each.token_ids, each.logprobs, each.stopped, top[len(prompt) - 1 :])
            for each, (_, top) in zip(samples, of_samples, strict=True)
        ]
    return sample_output(samples, logprobs, prompt_top)
