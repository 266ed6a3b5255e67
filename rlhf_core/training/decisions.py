"""Collects the decisions of hook plugins about the run, and executes them on all ranks together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.resolve import ResolvedRun
from ..config.section import options_of
from ..errors import GuardStop, RlhfError
from ..hooks.relay import HookRelay
from ..hookspecs import Action, Moment
from ..place import Place
from ..plugins.discovery import discover
from ..runfolder.checkpoint_state import RunState
from ..runfolder.folder import RunFolder
from ..util.did_you_mean import fold
from ..util.redact import redact_mapping

logger = logging.getLogger("rlhf")

ROLLBACK = "rollback"
DECISION = "decision"
"""Kinds of events in the manifest."""
_SEVERITY = {"skip": 1, "finish": 2, "rollback": 3, "stop": 4}
"""Only the most severe of these actions is executed. All actions of other kinds are."""
_PAUSED_POLL_SECONDS = 0.25


class RollBack(Exception):
    """Raised on every rank to leave the loop, so that the session can return to a checkpoint."""

    def __init__(self, action: Action, moment: Moment) -> None:
        super().__init__(action.reason)
        self.action = action
        self.moment = moment


@dataclass
class Decisions:
    """Fires `rlhf_decide` on rank 0 and executes the actions on every rank."""

    place: Place
    hooks: HookRelay
    resolved: ResolvedRun
    folder: RunFolder
    set_option: Callable[[str, float], str]
    """Sets an option, by its key, on this rank and returns a message. Raises `RlhfError` if it is fixed."""
    has_signal: Callable[[], bool]
    """Whether this rank received a signal."""
    is_paused: bool = False
    interrupted: bool = False
    """Whether a signal or an action ends the run after the episode."""
    checkpoint_requested: bool = False
    finished: Action | None = None
    """The action that ends the run as done."""
    rollbacks: int = 0
    """Number of rollbacks of the run so far."""

    def may_roll_back(self) -> bool:
        """Whether a hook plugin sets `may_roll_back`, and so needs a checkpoint to return to. Collective."""
        plugins = self.hooks.plugins.values() if self.place.is_main else ()
        return bool(self.place.broadcast_object(any(getattr(each, "may_roll_back", False) for each in plugins)))

    def take(self, moment: Moment) -> bool:
        """Execute the decisions about `moment`. While paused, wait here and collect further decisions. Collective.

        Returns whether to skip the episode's remaining updates. Raises `GuardStop`, `RollBack`, or the moment's `error`
        if no action skips the failed update or rolls back.
        """
        skips = self._end(self._execute_actions(moment), moment)
        while self.is_paused and not self.interrupted:
            time.sleep(_PAUSED_POLL_SECONDS)
            waiting = replace(moment, at="paused", error=None)
            skips = self._end(self._execute_actions(waiting), waiting) or skips
        return skips

    def allow_rollback(self, request: RollBack, target: Path | None) -> Path:
        """Count a rollback to `target`. Raises `GuardStop` if that is None, or after `max_times` rollbacks."""
        if self.rollbacks >= request.action.max_times or target is None:
            why = "there is no complete checkpoint" if target is None else f"it was rolled back {self.rollbacks} times"
            raise self._stop(request.action, request.moment, f", and {why}") from request
        self.rollbacks += 1
        return target

    def log_rollback(self, request: RollBack, state: RunState, factors: Mapping[str, float]) -> None:
        """Record in the log and the manifest that the run was rolled back to `state`."""
        if not self.place.is_main:
            return
        action, moment = request.action, request.moment
        logger.warning(
            "guard %s, update %d (episode %d): %s. Rollback %d: back to update %d, with learning rates x %s",
            action.by, moment.step, moment.episode + 1, action.reason, self.rollbacks, state.step,
            ", ".join(f"{factor:g} ({role})" for role, factor in factors.items()),
        )  # fmt: skip
        facts = {"guard": action.by, "reason": action.reason, "from_step": moment.step, "to_step": state.step}
        self.folder.add_event(ROLLBACK, {**facts, "lr_factors": dict(factors)})

    def _execute_actions(self, moment: Moment) -> Action | None:
        """Execute all actions except those in `_SEVERITY`. Returns the most severe of these, the same on all ranks."""
        actions = self._share_actions(moment)
        for action in actions:
            if action.kind not in _SEVERITY:
                self._execute(action, moment)
        ending = [replace(action, answer=None) for action in actions if action.kind in _SEVERITY]
        return max(ending, key=lambda each: _SEVERITY[each.kind], default=None)

    def _share_actions(self, moment: Moment) -> list[Action]:
        """Return the actions of rank 0's hooks on every rank. Also sets `interrupted` if any rank received a signal."""
        answers = self.hooks.fire("decide", moment=moment) if self.place.is_main else []
        lists = [[each] if isinstance(each, Action) else each for each in answers]
        actions: list[Action] = [action for each in lists for action in each]
        if self.place.num_processes == 1:
            self.interrupted |= self.has_signal()
            return actions
        import torch

        flags = torch.tensor([float(bool(actions)), float(self.has_signal())])
        has_actions, has_signal = self.place.all_reduce(flags, "max").tolist()
        self.interrupted |= bool(has_signal)
        if not has_actions:
            return []
        shared: list[Action] = self.place.broadcast_object([replace(each, answer=None) for each in actions])
        return actions if self.place.is_main else shared

    def _execute(self, action: Action, moment: Moment) -> None:
        try:
            text, refused = self._apply(action, moment.episode), False
        except RlhfError as error:
            text, refused = error.message, True
        if not self.place.is_main:
            return
        logger.warning("%s: %s, after update %d: %s", action.by, action.reason, moment.step, text)
        if action.answer is not None:
            action.answer(text, refused)
        if action.answer is not None and action.kind != "interrupt":
            return
        facts = {"by": action.by, "action": action.kind, "reason": action.reason, "answer": text}
        self.folder.add_event(DECISION, {**facts, "step": moment.step, "episode": moment.episode})

    def _apply(self, action: Action, episode: int) -> str:
        """Apply an action on this rank. Returns a message."""
        if action.kind == "pause":
            self.is_paused = True
            return "paused: `resume` continues the run, `stop` ends it with a checkpoint"
        if action.kind == "resume":
            was_paused, self.is_paused = self.is_paused, False
            return "resumed" if was_paused else "was not paused"
        if action.kind == "checkpoint":
            self.checkpoint_requested = True
            return f"a checkpoint is written at the end of episode {episode + 1}"
        if action.kind == "interrupt":
            self.interrupted = True
            return f"stops at the end of episode {episode + 1}, with a checkpoint and the model"
        assert action.key is not None and action.value is not None
        return self.set_option(action.key, action.value)

    def _end(self, action: Action | None, moment: Moment) -> bool:
        """Leave the loop if the action requires it. Returns whether to skip the rest of the episode."""
        if moment.error is not None and (action is None or action.kind in ("stop", "finish")):
            raise moment.error
        if action is None:
            return False
        if action.kind == "rollback":
            raise RollBack(action, moment) from moment.error
        if action.kind == "stop":
            raise self._stop(action, moment)
        if action.kind == "finish":
            self.finished = action
            return True
        if moment.error is not None:
            logger.warning("guard %s: update %d is skipped: %s", action.by, moment.step, action.reason)
            return False
        if moment.at != "episode":
            logger.warning(
                "guard %s, update %d: %s; the rest of episode %d is skipped",
                action.by, moment.step, action.reason, moment.episode + 1,
            )  # fmt: skip
        return True

    def _stop(self, action: Action, moment: Moment, why: str = "") -> GuardStop:
        return GuardStop(
            f"{action.reason}{why} (update {moment.step}, episode {moment.episode + 1})",
            where=f"guard {action.by}",
            hint=f"set by {keys_of(action.by, self.resolved)}{f': {action.hint}' if action.hint else ''}. "
            "--resume auto continues from the newest checkpoint",
        )


def finish_facts(action: Action, resolved: ResolvedRun) -> dict[str, Any]:
    """Return `RunState.finished`: origin and reason of the action, and the options that a resume must change."""
    return {"guard": action.by, "reason": action.reason, "options": _options(resolved)}


def finished_by(state: RunState, resolved: ResolvedRun) -> Action | None:
    """Return the action that ended the run, or None if none did or the hook plugins' options have changed since."""
    facts = state.finished
    if facts is None or facts.get("options") != _options(resolved):
        return None
    return Action(kind="finish", by=str(facts["guard"]), reason=str(facts["reason"]))


def keys_of(who: str, resolved: ResolvedRun) -> str:
    """Return the keys of the run file that configure a guard or hook plugin, for hints."""
    for section, options in _options(resolved).items():
        if isinstance(own := options.get(who), dict):
            return f"{section}.{who} ({', '.join(own)})"
    return f"a hook plugin with the name {who}: `hooks.disable` turns it off by its entry-point name"


def _options(resolved: ResolvedRun) -> dict[str, Any]:
    """Return the sections of the run that contain options of hook plugins, without secrets."""
    options = {n: options_of(resolved.section(n)) for n in resolved.sections if fold(n) in discover("hooks")}
    options["hooks"] = resolved.to_mapping()["hooks"]
    redacted: dict[str, Any] = redact_mapping(options)
    return redacted
