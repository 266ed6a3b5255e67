"""Contract of a prompt source: a finite, constant list of records."""

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

_NUM_CHECKED = 20


class PromptsContract(ComponentContract):
    """Tests of a prompt source. Override `make_options` if options contain files.

    Example:
        class TestMyPrompts(PromptsContract):
            plugin = "my-prompts"
            options = {"size": 100}
    """

    kind = "prompts"
    may_be_empty: ClassVar[bool] = False
    """Whether a prompt may be empty, because an environment provides the first text."""

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, selected: SelectedPlugin, config: BaseModel, folder: Path) -> PromptSource:
        return _build(selected, config, folder)

    def test_it_is_a_prompt_source(self, selected: SelectedPlugin, source: PromptSource) -> None:
        assert isinstance(source, PromptSource), (
            f"{selected.label}: a {type(source).__name__} lacks __len__ or __getitem__(index)"
        )
        assert len(source) > 0, f"{selected.label}: the source is empty with these options"

    def test_records_are_prompts(self, source: PromptSource) -> None:
        for index in _indices(source):
            record = source[index]
            assert isinstance(record, Mapping), f"record {index} must be a mapping, got a {type(record).__name__}"
            assert "prompt" in record, f"record {index} lacks `prompt` (keys: {sorted(record)})"

    def test_core_reads_it_to_the_end(self, source: PromptSource) -> None:
        """The stream of a run encodes every record once and yields each once per epoch."""
        chat = any(not isinstance(source[index]["prompt"], str) for index in _indices(source))
        stream = prompt_stream(source, episode_tokenizer(chat=chat), seed=0, may_be_empty=self.may_be_empty)
        prompts = [stream.prompt(position) for position in range(min(len(stream), _NUM_CHECKED))]
        assert self.may_be_empty or all(prompt.prompt_ids for prompt in prompts)

    def test_a_record_stays_the_same(self, source: PromptSource) -> None:
        """A prompt is read again if its answers are sampled again, for example after a crash."""
        for index in _indices(source):
            assert dict(source[index]) == dict(source[index]), f"record {index} differs when read twice"

    def test_every_process_builds_the_same(
        self, selected: SelectedPlugin, config: BaseModel, folder: Path, source: PromptSource
    ) -> None:
        """Each trainer and a resumed run rebuild the source and must find the same records in the same order."""
        other = _build(selected, config, folder)
        assert len(other) == len(source), f"built twice, the source has {len(source)} and then {len(other)} records"
        for index in _indices(source):
            assert dict(other[index]) == dict(source[index]), f"record {index} differs after rebuilding the source"


def _build(selected: SelectedPlugin, config: BaseModel, folder: Path) -> PromptSource:
    built: Any = selected.build(config, TaskContext(0, folder))
    return cast(PromptSource, built)


def _indices(source: PromptSource) -> list[int]:
    """Indices of the first records and the last."""
    return sorted({*range(min(_NUM_CHECKED, len(source))), len(source) - 1})
