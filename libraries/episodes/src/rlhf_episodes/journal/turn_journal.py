"""Records the policy's turns, environments' states and finished episodes of a run, and finds those to continue from."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any
from uuid import uuid4

from rlhf_core.columns import Column
from rlhf_core.config.resolved import ResolvedRun
from rlhf_core.errors import PluginError
from rlhf_core.protocols import RolloutEngine
from rlhf_core.rollout.answers import with_kinds
from rlhf_core.rollout.episode_metrics import ENVIRONMENT
from rlhf_core.rollout.journal import Journal
from rlhf_core.rollout.row import Played
from rlhf_core.types import Completion, GenerationRequest, Prompt, SamplingParams

from ..progress import MAX_STATE_CHARS, RESET, EpisodeLost, Progress, Step
from .known import Known, KnownSample
from .probe import is_of_weights, probe_record
from .records import Record, completion_of, completion_record, reply_key, row_of, row_record, tensor_digest

logger = logging.getLogger(__name__)

_DOES_NOT_MATTER = ("logging", "checkpoint", "eval")
"""Sections of a run file that may change between attempts without an effect on samples."""
_STEP = tuple(each.name for each in fields(Step))


def run_digest(run: ResolvedRun) -> str:
    """Return a digest of the options that determine the samples of a run.

    Args:
        run: The run.
    """
    options = {name: value for name, value in run.to_mapping().items() if name not in _DOES_NOT_MATTER}
    return _digest(options, default=_name)


def _digest(value: Any, default: Callable[[Any], str]) -> str:
    text = json.dumps(value, sort_keys=True, default=default)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _name(value: Any) -> str:
    """Return a name that is the same in each process, for values that JSON cannot represent."""
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _unique(value: Any) -> str:
    """Return a text that no other process returns, so that tasks with values besides JSON and tensors differ."""
    return tensor_digest(value) if hasattr(value, "detach") else uuid4().hex


class TurnJournal:
    """The journal of one player. Turns are only used under the weights that sampled them.

    Example:
        journal.begin()  # at the start of a call of `play`
        journal.open(prompt, sample_id)  # at the start of each episode
        key = RequestKeys(sampling).of(request)
        if (completion := journal.turn(request.sample_id, key)) is None:
            completion = sample(request)
            journal.add_turn(request, sampling, key, completion)
    """

    def __init__(self, journal: Journal, engine: RolloutEngine, run: str, num_kept: int) -> None:
        """Prepare to read the lines of earlier attempts, and to record further ones.

        Args:
            journal: Lines in the run folder.
            engine: Samples the turns.
            run: Result of `run_digest`.
            num_kept: Number of versions before the current one that a resume may start from.
        """
        self._journal = journal
        self._engine = engine
        self._run = run
        self._num_kept = num_kept
        self._lock = threading.Lock()
        """The engine's turns and the environments' steps are recorded on different threads."""
        self._known = Known()
        self._earlier = [] if journal.folder is None else sorted(journal.folder.glob("*.jsonl"))
        self._rollbacks = 0
        self._version = -1
        self._has_begun = False
        self._is_new_file = self._is_writable = True
        self._has_probe = False
        self._open: dict[int, list[tuple[Completion, str]]] = {}
        """Sample id -> its completions so far, with the keys of their requests."""
        self._tasks: dict[int, str] = {}
        """Sample id -> digest of its task. Lines of a sample with another task are not used."""

    def begin(self) -> None:
        """Start a call of `play` with the engine's weights. Older lines that no resume needs are deleted."""
        version = self._engine.policy_version
        with self._lock:
            self._open.clear()
            self._tasks.clear()
            if version == self._version:
                return
            is_first, self._has_begun = not self._has_begun, True
            if is_first:
                self._known.load(self._earlier, self._run, version)
            self._version = version
            self._known.forget(before=version)
            if not is_first or self._known.max_rollbacks > self._rollbacks:
                self._check_weights()
            self._journal.close()
            self._is_new_file, self._has_probe = True, False
            for path in [path for path, newest in self._known.newest.items() if newest < version - self._num_kept]:
                path.unlink(missing_ok=True)  # all processes of a run delete the files of earlier attempts
                del self._known.newest[path]

    def _check_weights(self) -> None:
        """Forget lines of this version and later ones if they come from other weights than the engine's.

        A resume restores the weights of its checkpoint. It trains those of later versions again, which are equal only
        if training is reproducible and no option was changed in between.
        """
        trajectory = self._rollbacks, self._version
        if not self._known.samples.get(trajectory):
            return
        line = self._known.probes.get(trajectory)
        if line is None or not is_of_weights(self._engine, line):
            self._known.forget(since=self._version)
            text = "turns recorded from version %d on are not used: the weights differ from those that sampled them"
            logger.info(text, self._version)

    def open(self, prompt: Prompt, sample_id: int) -> None:
        """Start an episode.

        Args:
            prompt: Prompt of the episode.
            sample_id: Id of the sample.
        """
        task = [prompt.position, prompt.text, prompt.messages, prompt.prompt_ids, prompt.answer, prompt.metadata]
        values = [*task, prompt.columns.model_inputs]
        self._tasks[sample_id] = _digest(values, default=_unique)

    def turn(self, sample_id: int, key: str) -> Completion | None:
        """Return the recorded answer to a request, or None.

        Args:
            sample_id: Id of the sample.
            key: Key of the request (`RequestKeys`).
        """
        sample = self._sample(sample_id)
        if sample is None or (record := sample.turns.get(key)) is None:
            return None
        try:
            completion = self._completion(record, sample_id)
        except (KeyError, TypeError, ValueError, PluginError) as error:
            logger.warning("a recorded turn of sample %d is damaged and sampled again: %s", sample_id, error)
            return None
        self._open.setdefault(sample_id, []).append((completion, key))
        return completion

    def add_turn(self, request: GenerationRequest, sampling: SamplingParams, key: str, completion: Completion) -> None:
        """Record a turn, unless several versions sampled it.

        Args:
            request: The request.
            sampling: Sampling parameters of the call to the engine.
            key: Key of the request.
            completion: The engine's answer.
        """
        if completion.policy_versions or completion.policy_version != self._version:
            return
        sample_id = completion.sample_id
        try:
            line = {"turn": key, "completion": completion_record(completion)}
            if not self._has_probe and (probe := probe_record(request, sampling)) is not None:
                line["probe"] = probe
            self._append(sample_id, line)
            self._has_probe |= "probe" in line
        except (TypeError, ValueError) as error:
            logger.debug("a turn of sample %d is not recorded: %s", sample_id, error)
            return
        self._open.setdefault(sample_id, []).append((completion, key))

    def _completion(self, record: Record, sample_id: int) -> Completion:
        return with_kinds(completion_of(record, sample_id, self._version), self._engine)

    def progress(self, sample_id: int) -> Progress:
        """Return the progress of a new attempt at an episode. The first attempt continues from the recorded steps."""
        sample = self._sample(sample_id)
        steps: list[Record] = []
        if sample is not None and sample.is_continuous:
            steps, sample.steps = sample.steps, []
        replies = [step["reply"] for step in steps]
        record = partial(self._add_step, sample_id, self._version)
        return _Recorded([_step(each) for each in steps], replies, record, self._version)

    def _add_step(self, sample_id: int, version: int, step: Step, reply: str) -> None:
        if version != self._version:
            return
        try:
            values = {name: getattr(step, name) for name in _STEP}  # without the copies of `asdict`
            self._append(sample_id, {"step": {**values, "reply": reply}})
        except (TypeError, ValueError) as error:  # then later steps are not continued from, either
            logger.debug("a step of sample %d is not recorded: %s", sample_id, error)

    def episode(self, prompt: Prompt, sample_id: int, kinds: Mapping[str, Column]) -> Played | None:
        """Return the recorded episode of a sample, or None if it has to be played.

        Args:
            prompt: Prompt of the episode.
            sample_id: Id of the sample.
            kinds: Declarations of the columns of its rows.
        """
        sample = self._sample(sample_id)
        if sample is None or sample.episode is None:
            return None
        record, turns = sample.episode, sample.turns
        try:
            found = {
                key: self._completion(turns[key], sample_id)
                for key in {turn["key"] for row in record["rows"] for turn in row["turns"] if "key" in turn}
            }
            rows = tuple(row_of(row, found.__getitem__, kinds) for row in record["rows"])
            rewards = {int(turn): float(reward) for turn, reward in record["turn_rewards"].items()}
            return Played(prompt, sample_id, rows, record["reward"], rewards)
        except Exception as error:  # a damaged record may fail anywhere
            logger.warning("the recorded episode of sample %d cannot be used and is played again: %s", sample_id, error)
            return None

    def add_episode(self, played: Played) -> None:
        """Record a finished episode that did not fail, if all of its turns are recorded under one version."""
        completions = self._open.pop(played.sample_id, [])
        if not played.rows or played.rows[0].columns[ENVIRONMENT]["failed"]:
            return

        def key_of(completion: Completion) -> str:
            return next(key for each, key in completions if each is completion)

        try:
            rows = [row_record(row, key_of) for row in played.rows]
            rewards = {"reward": played.reward, "turn_rewards": dict(played.turn_rewards)}
            self._append(played.sample_id, {"episode": {"rows": rows, **rewards}})
        except (StopIteration, TypeError, ValueError, AttributeError) as error:
            logger.debug("the episode of sample %d is not recorded: %s", played.sample_id, error)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rollbacks, after which the weights of a version differ."""
        return {"rollbacks": self._rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` after a resume, or count a rollback."""
        with self._lock:
            self._rollbacks = max(self._rollbacks, state["rollbacks"]) + 1 if self._has_begun else state["rollbacks"]
            self._version = -1  # the next call starts a new file

    def _sample(self, sample_id: int) -> KnownSample | None:
        with self._lock:
            samples = self._known.samples.get((self._rollbacks, self._version), {})
            return samples.get((sample_id, self._tasks.get(sample_id, "")))

    def _append(self, sample_id: int, line: Record) -> None:
        whole = {"at": [self._rollbacks, self._version], "sample": sample_id, "task": self._tasks.get(sample_id, "")}
        with self._lock:
            if not self._is_writable:
                return
            try:
                if self._is_new_file:
                    self._is_new_file = False
                    self._journal.append({"run": self._run})
                    if self._journal.path is not None and self._journal.folder is not None:
                        self._known.newest[self._journal.path] = self._version
                self._journal.append({**whole, **line})
            except OSError as error:
                self._is_writable = False
                logger.warning("turns are no longer recorded, so a resume samples them again: %s", error)


class _Recorded(Progress):
    """Progress that is recorded with the turn before each step."""

    def __init__(self, steps: list[Step], replies: list[str], record: Any, version: int) -> None:
        self._record, self._replies, self._version = record, replies, version
        self._last: tuple[int, str] | None = None
        self._next = RESET + len(steps)
        super().__init__(steps, self._record_step)

    def took_turn(self, turn: int, token_ids: tuple[int, ...], policy_version: int) -> None:
        """See `Progress`."""
        key = reply_key(token_ids)
        if turn + 1 < len(self._replies) and key != self._replies[turn + 1]:
            raise EpisodeLost
        self._last = turn, key
        if policy_version != self._version:
            self.record = None

    def _record_step(self, step: Step) -> None:
        turn, reply = self._last or (RESET, "")
        if step.turn != turn or turn < self._next or len(json.dumps(step.state)) > MAX_STATE_CHARS:
            return  # then later steps are not continued from, either
        self._next = turn + 1
        self._record(step, reply)


def _step(record: Record) -> Step:
    return Step(**{name: value for name, value in record.items() if name != "reply"})
