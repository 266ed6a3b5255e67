"""Rules for every component that can be checked without a run, for contracts and `plugins check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from rlhf_core.plugins.selected import Selected

MAX_SUMMARY = 160
_UNKNOWN = "no_such_option"


def broken_rules(selected: Selected) -> Iterator[str]:
    """Each rule that the plugin breaks, as a sentence without its name."""
    yield from summary_problems(selected)
    if accepts_unknown(selected, {}):
        yield UNKNOWN_UNSEEN
    yield from undescribed(selected)
    if selected.function is None and selected.kind != "sections":
        module, _, attribute = selected.component.build.partition(":")
        if not module or not attribute:
            yield f'build is "module:attr", not {selected.component.build!r}'


UNKNOWN_UNSEEN = (
    "a misspelled option goes unseen; derive its config from rlhf_core.Section "
    '(or set model_config = ConfigDict(extra="forbid"))'
)


def summary_problems(selected: Selected) -> Iterator[str]:
    """The summary is one line; a function may have none."""
    summary = selected.component.summary
    if not summary.strip() and selected.function is None:
        yield "say in one line what it is: summary=…"
    elif "\n" in summary or len(summary) > MAX_SUMMARY:
        yield f"its summary is for one line of `rlhf plugins list`, at most {MAX_SUMMARY} characters"


def accepts_unknown(selected: Selected, options: Mapping[str, Any]) -> bool:
    """Whether an option that it does not have goes unseen beside `options`."""
    try:
        selected.component.config.model_validate({**options, _UNKNOWN: 1})
    except ValidationError as error:
        return not any(problem["loc"] == (_UNKNOWN,) for problem in error.errors())
    return True


def undescribed(selected: Selected) -> Iterator[str]:
    """Options without a description; a function's are described by its docstring."""
    fields = selected.component.config.model_fields if selected.function is None else {}
    silent = [name for name, field in fields.items() if not field.description]
    if silent:
        yield f"add Field(…, description=…) to {', '.join(silent)}"
