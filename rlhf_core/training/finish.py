"""The end that a guard or a hook plugin asked for: what a checkpoint keeps of it, and whether a resume goes on."""

from __future__ import annotations

from typing import Any

from ..config.resolve import ResolvedRun
from ..hookspecs import Verdict
from ..runfolder.checkpoint_state import RunState
from ..util.redact import redact_mapping


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
