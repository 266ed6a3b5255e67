"""Asks hook plugins what they decide about the run, and carries it out on all ranks together."""

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
"""Kinds of the manifest's events."""
_GRAVITY = {"skip": 1, "finish": 2, "rollback": 3, "stop": 4}
"""Of these one is carried out at a time; actions of other kinds all are."""
_PAUSED_POLL_SECONDS = 0.25


class RollBack(Exception):
    """Leaves the loop, on every rank, so that the session can go back to a checkpoint."""

    def __init__(self, action: Action, moment: Moment) -> None:
        super().__init__(action.reason)
        self.action = action
        self.moment = moment


@dataclass
class Decisions:
    """Fires `rlhf_decide` on rank 0 and carries out the actions on every rank."""

    place: Place
    hooks: HookRelay
    resolved: ResolvedRun
    folder: RunFolder
    set_option: Callable[[str, float], str]
    """Sets an option, by its key, on this rank and says so; raises `RlhfError` where it cannot be set."""
    has_signal: Callable[[], bool]
    """Whether this rank received a signal."""
    is_paused: bool = False
    interrupted: bool = False
    """Whether a signal or an action ends the run after the episode."""
    checkpoint_asked: bool = False
    finished: Action | None = None
    """The action that ends the run as done."""
    rollbacks: int = 0
    """Rollbacks of the run so far."""

    def may_roll_back(self) -> bool:
        """Collective. Whether a hook plugin says, by its `may_roll_back`, that it needs a checkpoint to go to."""
        plugins = self.hooks.plugins.values() if self.place.is_main else ()
        return bool(self.place.broadcast_object(any(getattr(each, "may_roll_back", False) for each in plugins)))

    def take(self, moment: Moment) -> bool:
        """Collective. Carry out what is decided at `moment`; while paused, wait here and ask again.

        Returns whether the episode's remaining updates are left out. Raises `GuardStop`, `RollBack`, or the moment's
        `error` where nobody skips the failed update or rolls back.
        """
        skips = self._end(self._ask(moment), moment)
        while self.is_paused and not self.interrupted:
            time.sleep(_PAUSED_POLL_SECONDS)
            waiting = replace(moment, at="paused", error=None)
            skips = self._end(self._ask(waiting), waiting) or skips
        return skips

    def allow_rollback(self, request: RollBack, target: Path | None) -> None:
        """Count a rollback. Raises `GuardStop` where there is no checkpoint, or too many were made."""
        if self.rollbacks >= request.action.max_times or target is None:
            why = "there is no whole checkpoint" if target is None else f"it was rolled back {self.rollbacks} times"
            raise self._stop(request.action, request.moment, f", and {why}") from request
        self.rollbacks += 1

    def tell_rollback(self, request: RollBack, state: RunState, factors: Mapping[str, float]) -> None:
        """Record in the log and the manifest that the run was rolled back to `state`."""
        if not self.place.is_main:
            return
        action, moment = request.action, request.moment
        logger.warning(
            "guard %s, update %d (episode %d): %s; rollback %d: back to update %d, with learning rates x %s",
            action.by, moment.step, moment.episode + 1, action.reason, self.rollbacks, state.step,
            ", ".join(f"{factor:g} ({role})" for role, factor in factors.items()),
        )  # fmt: skip
        facts = {"guard": action.by, "reason": action.reason, "from_step": moment.step, "to_step": state.step}
        self.folder.add_event(ROLLBACK, {**facts, "lr_factors": dict(factors)})

    def _ask(self, moment: Moment) -> Action | None:
        """Do all actions but the ending ones, of which the gravest is returned, the same on all ranks."""
        actions = self._agreed(moment)
        for action in actions:
            if action.kind not in _GRAVITY:
                self._execute(action, moment)
        ending = [replace(action, answer=None) for action in actions if action.kind in _GRAVITY]
        return max(ending, key=lambda each: _GRAVITY[each.kind], default=None)

    def _agreed(self, moment: Moment) -> list[Action]:
        """The actions of rank 0's hooks, on every rank; whether any rank received a signal is agreed on as well."""
        answers = self.hooks.fire("decide", moment=moment) if self.place.is_main else []
        given = [[each] if isinstance(each, Action) else each for each in answers]
        actions: list[Action] = [action for each in given for action in each]
        if self.place.num_processes == 1:
            self.interrupted |= self.has_signal()
            return actions
        import torch

        flags = torch.tensor([float(bool(actions)), float(self.has_signal())])
        has_actions, has_signal = self.place.all_reduce(flags, "max").tolist()
        self.interrupted |= bool(has_signal)
        if not has_actions:
            return []
        said: list[Action] = self.place.broadcast_object([replace(each, answer=None) for each in actions])
        return actions if self.place.is_main else said

    def _execute(self, action: Action, moment: Moment) -> None:
        try:
            text, refused = self._do(action, moment.episode), False
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

    def _do(self, action: Action, episode: int) -> str:
        if action.kind == "pause":
            self.is_paused = True
            return "paused; resume goes on, stop ends the run with a checkpoint"
        if action.kind == "resume":
            was_paused, self.is_paused = self.is_paused, False
            return "goes on" if was_paused else "was not paused"
        if action.kind == "checkpoint":
            self.checkpoint_asked = True
            return f"a checkpoint is written at the end of episode {episode + 1}"
        if action.kind == "interrupt":
            self.interrupted = True
            return f"stops at the end of episode {episode + 1}, with a checkpoint and the model"
        assert action.key is not None and action.value is not None
        return self.set_option(action.key, action.value)

    def _end(self, action: Action | None, moment: Moment) -> bool:
        """Leave the loop where the action says so. Returns whether the rest of the episode is skipped."""
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
            hint=f"set by {keys_of(action.by, self.resolved)}; "
            + (f"{action.hint}; " if action.hint else "")
            + "--resume auto goes on from the newest checkpoint",
        )


def finish_facts(action: Action, resolved: ResolvedRun) -> dict[str, Any]:
    """For `RunState.finished`: who asked and why, and the options that a resume must change to go on."""
    return {"guard": action.by, "reason": action.reason, "options": _options(resolved)}


def finished_by(state: RunState, resolved: ResolvedRun) -> Action | None:
    """The action that ended the run, where the hook plugins' options are still what they were then."""
    facts = state.finished
    if facts is None or facts.get("options") != _options(resolved):
        return None
    return Action(kind="finish", by=str(facts["guard"]), reason=str(facts["reason"]))


def keys_of(who: str, resolved: ResolvedRun) -> str:
    """The keys of the run file that a guard, or a hook plugin, is set by: for hints."""
    for section, options in _options(resolved).items():
        if isinstance(own := options.get(who), dict):
            return f"{section}.{who} ({', '.join(own)})"
    return f"a hook plugin that calls itself {who}: hooks.disable turns one off by the name it is installed by"


def _options(resolved: ResolvedRun) -> dict[str, Any]:
    """The sections of the run that have options of hook plugins."""
    found = {name: options_of(resolved.section(name)) for name in resolved.sections if fold(name) in discover("hooks")}
    found["hooks"] = resolved.to_mapping()["hooks"]
    options: dict[str, Any] = redact_mapping(found)
    return options
