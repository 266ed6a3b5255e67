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
from .problems import Problems
from .resolved import ReadsInvalid, ResolvedRun, map_options
from .section import Section, options_of


def check_sections(run: ResolvedRun, problems: Problems) -> None:
    """Add the problems that each valid section of the run reports."""

    def check(place: str, options: BaseModel, owner: str) -> BaseModel:
        if isinstance(options, Section):
            try:
                with named_code(f"checking the section {place}", owner):
                    for each in options.check(run):
                        problems.add(".".join(filter(None, (place, each.path))), each.message, each.hint)
            except ReadsInvalid:
                pass  # what it reads is reported already
            except PluginError as error:
                problems.add_error(place, error)
        return options

    map_options(run, check)


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
