"""Builds teachers from their options, and refuses those that cannot work in the run."""

from __future__ import annotations

from typing import Any

from rlhf_core.components import AlgorithmContext
from rlhf_core.config import ModelConfig
from rlhf_core.errors import ConfigError, UserInputError
from rlhf_core.models import ModelKind, model_kind_for

from .contexts import TeacherPrompts
from .question import Teacher
from .server import TeacherServer
from .teacher_config import DEMONSTRATION, TeacherConfig

_POLICY_ROLES = {"current": "policy", "start": "reference"}


def build_teacher(place: str, config: TeacherConfig, context: AlgorithmContext, *, top_k: int) -> Teacher:
    """Build a teacher, without its model.

    Args:
        place: Place of the options in the section `algorithm`, and the role of a frozen model.
        config: Options of the teacher.
        context: Sampling, tokenizer and kind of the policy.
        top_k: Number of the teacher's most likely tokens that are compared.

    Raises:
        UserInputError: The run's sampling, tokenizers or prompts do not fit the teacher.
    """
    where = f"algorithm.{place}"
    _check_sampling(where, config, context)
    if DEMONSTRATION in config.context_names and context.samples_per_prompt < 2:
        raise ConfigError(
            "{demonstration} is another answer to the prompt, but train.samples_per_prompt is 1",
            where=f"{where}.context",
            hint="set train.samples_per_prompt to 4 or more",
        )
    if config.context is not None or config.tokenizer is not None or config.server is not None:
        _check_text_only(where, context.kind)
    own = None if config.tokenizer is None else load_own_tokenizer(config.tokenizer, where)
    tokenizer = context.tokenizer if own is None else own
    if own is not None and config.path is not None:
        _check_own_tokens(config.path, own, where)
    source: Any = place if config.policy is None else _POLICY_ROLES[config.policy]
    if config.server is not None:
        vocabulary = len(context.tokenizer)
        source = TeacherServer(
            config.server,
            where=f"{where}.server",
            top_k=top_k,
            vocabulary=vocabulary,
            text_of=lambda token: str(tokenizer.decode([token])),
        )
    prompts = None
    if config.context is not None or own is not None:
        prompts = TeacherPrompts(config, context.tokenizer, tokenizer, where=where, score=context.score)
    return Teacher(where, source, prompts, None if own is None else (context.tokenizer, own))


def load_own_tokenizer(path: str, where: str) -> Any:
    """Load the tokenizer of a teacher.

    Args:
        path: Folder, hub name or `builtin:NAME`.
        where: Place of the teacher's options, for errors.

    Raises:
        UserInputError: It cannot be loaded, returns no offsets, or lacks an EOS token.
    """
    place = f"{where}.tokenizer"
    try:
        tokenizer = model_kind_for(ModelConfig(path=path)).load_tokenizer()
    except UserInputError as error:
        raise UserInputError(error.message, where=place, hint=error.hint) from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserInputError(
            f"the tokenizer of {path!r} is not a fast one, and does not return the text of each token",
            where=place,
            hint="use a folder with tokenizer.json",
        )
    if tokenizer.eos_token_id is None:
        raise UserInputError(f"the tokenizer of {path!r} lacks an EOS token", where=place, hint="add one to its files")
    return tokenizer


def _check_own_tokens(path: str, own: Any, where: str) -> None:
    """Refuse a tokenizer that differs from that in the model's folder, if there is one."""
    try:
        known = model_kind_for(ModelConfig(path=path)).load_tokenizer().get_vocab()
    except UserInputError:
        return  # a path that is not a model is reported when it is loaded
    if different := [token for token, index in own.get_vocab().items() if known.get(token) != index]:
        raise ConfigError(
            f"is not the tokenizer of the model {path!r}: {len(different)} tokens differ, for example {different[0]!r}",
            where=f"{where}.tokenizer",
            hint=f"set tokenizer: {path}",
        )


def _check_sampling(where: str, config: TeacherConfig, context: AlgorithmContext) -> None:
    """Refuse sampling whose distribution the teacher cannot have."""
    sampling = context.sampling
    if config.server is None and config.tokenizer is None:
        return
    what = "a server" if config.server is not None else "a teacher with its own tokenizer"
    changed = [name for name, is_set in (("top_k", sampling.top_k > 0), ("top_p", sampling.top_p < 1.0)) if is_set]
    if changed := [*changed, *sampling.options]:
        raise ConfigError(
            f"{what} returns log-probs of its whole distribution, but engine.{changed[0]} changes the policy's",
            where=where,
            hint=f"remove engine.{changed[0]}",
        )
    if config.server is not None and sampling.temperature != 1.0:
        raise ConfigError(
            f"a server returns log-probs at temperature 1, but engine.temperature is {sampling.temperature:g}",
            where=f"{where}.server",
            hint="set engine.temperature: 1",
        )


def _check_text_only(where: str, kind: ModelKind | None) -> None:
    if kind is not None and (kind.columns or type(kind).encode is not ModelKind.encode):
        raise ConfigError(
            f"context, tokenizer and server encode text, but prompts of the {kind.model_kind} model have other inputs",
            where=where,
            hint="use a teacher with path alone",
        )
