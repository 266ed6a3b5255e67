"""The contract of a prompt source: a finite, constant list of records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from pydantic import BaseModel

from rlhf_core.components import TaskContext
from rlhf_core.plugins.selected import SelectedPlugin
from rlhf_core.protocols import PromptSource

from ..episodes import episode_tokenizer, prompt_stream
from .base import ComponentContract

_LOOKED_AT = 20


class PromptsContract(ComponentContract):
    """Override `make_options` where options name files."""

    kind = "prompts"
    may_be_empty: ClassVar[bool] = False
    """Whether a prompt may be empty, because an environment gives the first text."""

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, selected: SelectedPlugin, config: BaseModel, folder: Path) -> PromptSource:
        return _build(selected, config, folder)

    def test_it_is_a_prompt_source(self, selected: SelectedPlugin, source: PromptSource) -> None:
        assert isinstance(source, PromptSource), (
            f"{selected.label}: build returns a {type(source).__name__}, which needs __len__ and __getitem__(index)"
        )
        assert len(source) > 0, f"{selected.label}: it has no record under these options"

    def test_records_are_prompts(self, source: PromptSource) -> None:
        for index in _indices(source):
            record = source[index]
            assert isinstance(record, Mapping), f"record {index} is a {type(record).__name__}, not a mapping"
            assert "prompt" in record, f"record {index} has no `prompt`, its keys are {sorted(record)}"

    def test_core_reads_it_to_the_end(self, source: PromptSource) -> None:
        """The stream of a run encodes every record once and gives each once in an epoch."""
        stream = prompt_stream(source, episode_tokenizer(chat=False), seed=0, may_be_empty=self.may_be_empty)
        prompts = [stream.prompt(position) for position in range(min(len(stream), _LOOKED_AT))]
        assert self.may_be_empty or all(prompt.prompt_ids for prompt in prompts)

    def test_a_record_stays_the_same(self, source: PromptSource) -> None:
        """A prompt that has to be made again, after a crash say, is read again."""
        for index in _indices(source):
            assert dict(source[index]) == dict(source[index]), f"record {index} differs when it is read twice"

    def test_every_process_builds_the_same(
        self, selected: SelectedPlugin, config: BaseModel, folder: Path, source: PromptSource
    ) -> None:
        """Each trainer and a resumed run rebuild the source and must find the same records in the same order."""
        other = _build(selected, config, folder)
        assert len(other) == len(source), f"built twice, it has {len(source)} and then {len(other)} records"
        for index in _indices(source):
            assert dict(other[index]) == dict(source[index]), f"record {index} differs in a source built anew"


def _build(selected: SelectedPlugin, config: BaseModel, folder: Path) -> PromptSource:
    built: Any = selected.build(config, TaskContext(0, folder))
    return cast(PromptSource, built)


def _indices(source: PromptSource) -> list[int]:
    """The first records and the last."""
    return sorted({*range(min(_LOOKED_AT, len(source))), len(source) - 1})
