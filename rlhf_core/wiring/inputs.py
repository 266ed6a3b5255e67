"""The inputs of a run that exist before any weights are loaded: tokenizer, algorithm, prompts."""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..algorithm import Algorithm, DatasetAlgorithm
from ..components import AlgorithmContext, TaskContext
from ..config.resolve import ResolvedRun
from ..config.resolved import Configured
from ..config.section import Section
from ..config.sections import PromptsConfig
from ..errors import ConfigError, PluginError
from ..models.kinds import model_kind_for
from ..plugins.errors_of import errors_of
from ..plugins.functions import function_from_file
from ..prompts.encoder import PromptEncoder
from ..prompts.records import Check, RecordRules
from ..prompts.stream import PromptStream
from ..protocols import Sampler
from ..rewards.combiner import combined_score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RunInputs:
    """Tokenizer, algorithm and prompts of a run. Each is built on first use.

    The process that checks a run passes them to the transport. Other processes build their own.

    Args:
        resolved: the run.
        checks_records: whether the algorithm checks every record of the prompts.
        measured: number of records whose length is measured, None for all.
    """

    def __init__(self, resolved: ResolvedRun, *, checks_records: bool = False, measured: int | None = None) -> None:
        """Build nothing yet."""
        self.resolved = resolved
        self._checks_records = checks_records
        self._measured = measured

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return cast("PreTrainedTokenizerBase", model_kind_for(self.resolved.run.model).load_tokenizer())

    @cached_property
    def algorithm(self) -> Algorithm[Any, Any]:
        """The algorithm, with the run's sampling parameters."""
        resolved = self.resolved
        context = AlgorithmContext(
            resolved.sampling,
            resolved.run.train.samples_per_prompt,
            self.tokenizer,
            score=partial(combined_score, resolved.reward_weights, resolved.run.reward_scaling.clip),
            kind=model_kind_for(resolved.run.model),
        )
        return cast("Algorithm[Any, Any]", resolved.algorithm.build(resolved.algorithm.config, context))

    @cached_property
    def prompts(self) -> PromptStream:
        """The prompts to train on. Evaluation prompts are held out, unless they have a separate source."""
        options = self.resolved.run.eval
        holds_out = options is not None and None not in self.resolved.eval_prompts
        return self.stream_of(None, held_out=options.num_prompts if options is not None and holds_out else 0)

    @cached_property
    def eval_prompts(self) -> dict[str | None, PromptStream]:
        """Evaluation prompts that have a separate source, by the name of their set. None is the section `eval`."""
        checked = {None} if self.resolved.measures_eval_records else set()
        sources = self.resolved.eval_prompts.items()
        return {name: self.stream_of(source, is_checked=name in checked) for name, source in sources}

    def sampler(self) -> Sampler | None:
        """Return a new sampler of the run's prompts from a section, or None if all are drawn in turn.

        Raises `ConfigError` if two sections provide one.
        """
        samplers: dict[str, Sampler] = {}
        for name, section in self.resolved.sections.items():
            with errors_of(section.label, f"sampler of the section {name}", kind=PluginError):
                if (sampler := section.typed(Section).sampler(self.prompts)) is not None:
                    samplers[name] = sampler
        if len(samplers) > 1:
            owners = " and ".join(self.resolved.sections[name].label for name in samplers)
            raise ConfigError(f"{owners} both draw the prompts", where=list(samplers)[-1], hint="remove one of them")
        return next(iter(samplers.values()), None)

    def stream_of(self, source: Configured | None, *, held_out: int = 0, is_checked: bool = True) -> PromptStream:
        """Return the endless stream of prompts of `source`, or of the run's own, with `held_out` records kept apart."""
        resolved = self.resolved
        selected = source or resolved.prompts
        limits = selected.typed(PromptsConfig)
        has_template = bool(getattr(self.tokenizer, "chat_template", None))
        context = TaskContext(resolved.run.train.seed, has_chat_template=has_template)
        built = selected.build(selected.config, context)
        columns = getattr(built, "columns", {})
        rules = RecordRules(
            PromptEncoder(self.tokenizer, kind=model_kind_for(resolved.run.model), columns=columns),
            max_prompt_tokens=limits.max_prompt_tokens,
            too_long=limits.too_long,
            may_be_empty=any(each.typed(Section).needs_no_prompts for each in resolved.sections.values()),
            skip_duplicates=limits.duplicates == "skip",
            keep=None if limits.filter is None else function_from_file(limits.filter, Path(), "prompts.filter"),
            check=self._record_check() if is_checked and self._checks_records else None,
            measured=self._measured,
        )
        return PromptStream.of(built, rules, seed=resolved.run.train.seed, held_out=held_out)

    def _record_check(self) -> Check | None:
        algorithm = self.algorithm
        if not isinstance(algorithm, DatasetAlgorithm):
            return None
        return lambda record, name: algorithm.check_record(record)
