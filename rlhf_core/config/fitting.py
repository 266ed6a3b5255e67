"""Sections held against the run that they are in: `Section.check` and `Section.adapt` of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pydantic import BaseModel

from ..errors import PluginError, RlhfError
from ..util.error_text import error_text
from ..util.redact import redact_mapping
from .changes import Change, option_changes
from .problems import Problem, Problems
from .resolved import ReadsInvalid, ResolvedRun, map_options
from .section import Section, options_of


def check_sections(run: ResolvedRun, problems: Problems) -> None:
    """Add the problems that each valid section of the run reports."""

    def check(place: str, options: BaseModel, owner: str) -> BaseModel:
        if isinstance(options, Section):
            try:
                with named_code(f"checking the section {place}", owner):
                    for each in _problems_of(options, run):
                        problems.add(".".join(filter(None, (place, each.path))), each.message, each.hint)
            except ReadsInvalid:
                pass  # what it reads is reported already
            except PluginError as error:
                problems.add_error(place, error)
        return options

    map_options(run, check)


def _problems_of(section: Section, run: ResolvedRun) -> Iterator[Problem]:
    """What the `check` of its class and of each base of it reports; a base of core is checked, whoever overrides it."""
    for owner in type(section).__mro__:
        if "check" in vars(owner):
            yield from owner.check(section, run)  # type: ignore[attr-defined]


def adapt_sections(run: ResolvedRun) -> ResolvedRun:
    """The run with each section adapted to it. Raises `PluginError` if one cannot be."""
    changes: list[Change] = []

    def adapt(place: str, options: BaseModel, owner: str) -> BaseModel:
        if not isinstance(options, Section):
            return options
        with named_code(f"checking the section {place}", owner):
            adapted = options.adapt(run)
            before, after = redact_mapping(options_of(options)), redact_mapping(options_of(adapted))
        reasons = options.adapt_reasons
        for each in option_changes(before, after):
            why = reasons.get(each.key.partition(".")[0]) or reasons.get("", "as the rest of the run needs it")
            changes.append(replace(each, key=f"{place}.{each.key}", why=why))
        return adapted

    return replace(map_options(run, adapt), adapted=changes)


@contextmanager
def named_code(what: str, owner: str) -> Iterator[None]:
    """Turn an exception of a section's own code into a `PluginError` that names the code and its owner."""
    try:
        yield
    except (RlhfError, ReadsInvalid):
        raise
    except Exception as error:  # a plugin's code may raise anything
        hint = "the plugin is broken: tell its authors"
        raise PluginError(f"{what} raised {error_text(error)}", where=owner, hint=hint) from error
