"""Runs the guards and applies their verdicts on all ranks together; what is kept of one that ends a run as done."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..config.resolve import ResolvedRun
from ..errors import GuardStop
from ..guards import make_guards
from ..hooks.relay import HookRelay
from ..hookspecs import Verdict
from ..runfolder.checkpoint_state import RunState
from ..runfolder.folder import RunFolder
from ..strategy import Strategy
from ..util.jsonl import read_lines
from ..util.redact import redact_mapping
from .loop import BatchSource, EpisodeBatches, SkippedUpdate

logger = logging.getLogger("rlhf")

B = TypeVar("B")
P = TypeVar("P")
ROLLBACK = "rollback"
"""Kind of the event in the manifest."""
_GRAVITY = {"skip": 1, "finish": 2, "rollback": 3, "stop": 4}


class RollBack(Exception):
    """Leaves the loop, on every rank, so that the session can go back to a checkpoint."""

    def __init__(self, verdict: Verdict, *, step: int, episode: int) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict
        self.step = step
        self.episode = episode


class GuardRunner:
    """Fires `rlhf_verdict` and `rlhf_episode_verdict` on rank 0 and applies the verdicts on every rank."""

    def __init__(self, strategy: Strategy, hooks: HookRelay, resolved: ResolvedRun, folder: RunFolder) -> None:
        self._strategy = strategy
        self._hooks = hooks
        self._resolved = resolved
        self._config = config = resolved.run.guards
        self._folder = folder
        self.skips_rest = False
        """Whether the episode's remaining updates are left out."""
        self.rollbacks = 0
        """Rollbacks of the run so far."""
        self._finish: Verdict | None = None
        self._guards = make_guards(config) if strategy.is_main else []
        for guard in self._guards:
            hooks.register(guard, name=f"guard {guard.name}")

    def restart(self) -> None:
        """Reset the guards at a start, resume or rollback, with the past lines of `metrics.jsonl`."""
        self._finish = None
        for guard in self._guards:
            guard.restart(read_lines(self._folder.metrics))

    def after_update(self, step: int, episode: int, metrics: Mapping[str, float]) -> None:
        """Collective. Raises `GuardStop` or `RollBack`; a skip, or a finish, ends the episode's updates."""
        verdict = self._ask("verdict", step=step, episode=episode, metrics=metrics, error=None)
        if verdict is None:
            return
        if verdict.action == "finish":
            self._finish = verdict
            self.skips_rest = True
            return
        if verdict.action == "skip":
            logger.warning(
                "guard %s, update %d: %s; the rest of episode %d is skipped",
                verdict.guard, step, verdict.reason, episode + 1,
            )  # fmt: skip
            self.skips_rest = True
            return
        self._leave(verdict, step, episode)

    def after_failed_update(
        self, step: int, episode: int, metrics: Mapping[str, float], error: Exception
    ) -> SkippedUpdate:
        """Collective. Called when no rank made the update: raises `error`, unless a guard decides otherwise."""
        verdict = self._ask("verdict", step=step, episode=episode, metrics=metrics, error=error)
        if verdict is None or verdict.action in ("stop", "finish"):
            raise error
        if verdict.action == "skip":
            logger.warning("guard %s: update %d is skipped: %s", verdict.guard, step, verdict.reason)
            return SkippedUpdate(verdict.reason)
        raise RollBack(verdict, step=step, episode=episode) from error

    def after_episode(self, step: int, episode: int, metrics: Mapping[str, float]) -> Verdict | None:
        """Collective. The verdict that ends the run as done after this episode, or None. Raises as `after_update`."""
        verdict = self._ask("episode_verdict", step=step, episode=episode, metrics=metrics)
        if verdict is not None and verdict.action in ("stop", "rollback"):
            self._leave(verdict, step, episode)
        return verdict if verdict is not None and verdict.action == "finish" else self._finish

    def allow_rollback(self, request: RollBack, target: Path | None) -> None:
        """Count a rollback. Raises `GuardStop` where there is no checkpoint, or too many were made."""
        if self.rollbacks >= self._config.rollback.max_times or target is None:
            why = "there is no whole checkpoint" if target is None else f"it was rolled back {self.rollbacks} times"
            raise GuardStop(
                f"{request.verdict.reason}, and {why} (update {request.step}, episode {request.episode + 1})",
                where=f"guard {request.verdict.guard}",
                hint="lower optimizer.lr, or see guards.rollback",
            ) from request
        self.rollbacks += 1

    def tell_rollback(self, request: RollBack, state: RunState, factors: Mapping[str, float]) -> None:
        """Record in the log and the manifest that the run was rolled back to `state`."""
        if not self._strategy.is_main:
            return
        verdict = request.verdict
        logger.warning(
            "guard %s, update %d (episode %d): %s; rollback %d: back to update %d, with learning rates x %s",
            verdict.guard,
            request.step,
            request.episode + 1,
            verdict.reason,
            self.rollbacks,
            state.step,
            ", ".join(f"{factor:g} ({role})" for role, factor in factors.items()),
        )
        facts = {
            "guard": verdict.guard,
            "reason": verdict.reason,
            "from_step": request.step,
            "to_step": state.step,
            "lr_factors": dict(factors),
        }
        self._folder.add_event(ROLLBACK, facts)

    def watch(self, source: BatchSource[B]) -> BatchSource[B]:
        """The same episodes, ended early where a guard skips the rest."""
        return _Watched(source, self)

    def _leave(self, verdict: Verdict, step: int, episode: int) -> None:
        if verdict.action == "rollback":
            raise RollBack(verdict, step=step, episode=episode)
        raise GuardStop(
            f"{verdict.reason} (update {step}, episode {episode + 1})",
            where=f"guard {verdict.guard}",
            hint=f"set by {keys_of(verdict.guard, self._resolved)}; "
            + (f"{verdict.hint}; " if verdict.hint else "")
            + "--resume auto goes on from the newest checkpoint",
        )

    def _ask(self, event: str, **facts: Any) -> Verdict | None:
        import torch

        verdict: Verdict | None = None
        if self._strategy.is_main and self._hooks.listens(event):
            answers = self._hooks.fire(event, **facts)
            verdict = max(answers, key=lambda each: _GRAVITY[each.action], default=None)
        if self._strategy.num_processes == 1:
            return verdict
        flag = torch.tensor([float(verdict is not None)])
        if not self._strategy.all_reduce(flag, "max").item():
            return None
        agreed: Verdict | None = self._strategy.broadcast_object(verdict)
        return agreed


class _Watched(Generic[B]):
    def __init__(self, source: BatchSource[B], runner: GuardRunner) -> None:
        self._source = source
        self._runner = runner

    def episode(self, index: int) -> EpisodeBatches[B]:
        self._runner.skips_rest = False
        data = self._source.episode(index)
        return EpisodeBatches(map(self._until_ended, self._until_ended(data.epochs)), data.metrics)

    def _until_ended(self, parts: Iterable[P]) -> Iterator[P]:
        for part in parts:
            if self._runner.skips_rest:
                return
            yield part


def finish_facts(verdict: Verdict, resolved: ResolvedRun) -> dict[str, Any]:
    """For `RunState.finished`: who asked and why, and the options that a resume must change to go on."""
    return {"guard": verdict.guard, "reason": verdict.reason, "options": _options(resolved)}


def finished_by(state: RunState, resolved: ResolvedRun) -> Verdict | None:
    """The verdict that ended the run, where guards and hooks are still what they were then."""
    facts = state.finished
    if facts is None or facts.get("options") != _options(resolved):
        return None
    return Verdict(action="finish", guard=str(facts["guard"]), reason=str(facts["reason"]))


def keys_of(guard: str, resolved: ResolvedRun) -> str:
    """The keys of the run file that a guard, or a hook plugin that acts as one, is set by: for hints."""
    run = resolved.to_mapping()
    for section in ("guards", "hooks"):
        options = run[section].get(guard)
        if isinstance(options, dict) and guard != "rollback":
            return f"{section}.{guard} ({', '.join(options)})"
    return f"a hook plugin that calls itself {guard}: hooks.disable turns one off by the name it is installed by"


def _options(resolved: ResolvedRun) -> dict[str, Any]:
    run = resolved.to_mapping()
    options: dict[str, Any] = redact_mapping({"guards": run["guards"], "hooks": run["hooks"]})
    return options
