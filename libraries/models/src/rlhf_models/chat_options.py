"""`model.chat`: options of a tokenizer's chat template, written into the template itself.

They therefore apply wherever the template is used: in training, evaluation, generation and serving, and in any program
that loads the tokenizer saved with the final policy. Tools and a system message passed by the caller take precedence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config.sections import ChatConfig
from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def set_chat_options(tokenizer: PreTrainedTokenizerBase, options: ChatConfig) -> None:
    """Apply `options` to the tokenizer's chat template.

    Raises `ConfigError` if there is no template, or a file cannot be read or has the wrong content.
    """
    if options.template is not None:
        tokenizer.chat_template = _read_text(options.template, "model.chat.template")
    if not tokenizer.chat_template:
        raise ConfigError(
            "this model's tokenizer lacks a chat template", where="model.chat", hint="set model.chat.template"
        )
    defaults = _default_statements(options)
    template: Any = tokenizer.chat_template
    if isinstance(template, str):
        tokenizer.chat_template = defaults + template
        _check_syntax(tokenizer, options)
    else:  # several, by name
        tokenizer.chat_template = {name: defaults + each for name, each in template.items()}


def _default_statements(options: ChatConfig) -> str:
    """Jinja statements that set the variables which the template's caller omits, without adding a line.

    Values are written with Python's `repr`, since Jinja has the same literals.
    """
    defaults = [(f"{name} is not defined", f"{name} = {value!r}") for name, value in options.kwargs.items()]
    if options.tools is not None:
        defaults.append(("not tools", f"tools = {_read_tools(options.tools)!r}"))
    if options.system is not None:
        message = [{"role": "system", "content": options.system}]
        defaults.append(
            ("not messages or messages[0]['role'] != 'system'", f"messages = {message!r} + (messages | list)")
        )
    return "".join(f"{{%- if {unset} %}}{{%- set {default} %}}{{%- endif -%}}" for unset, default in defaults)


def _check_syntax(tokenizer: PreTrainedTokenizerBase, options: ChatConfig) -> None:
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    except TemplateSyntaxError as error:
        where = "model.chat" if options.template is None else f"model.chat.template: {options.template}"
        message = f"the chat template cannot be read: {error.message} (line {error.lineno})"
        raise ConfigError(message, where=where) from None
    except Exception:
        return  # the template rejects this conversation. Errors for actual prompts are reported with their lines.


def _read_text(file: str, where: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"cannot read {file}: {reason}", where=where, hint="paths are relative to the current folder"
        ) from None


def _read_tools(file: str) -> list[Any]:
    where = "model.chat.tools"
    try:
        tools = json.loads(_read_text(file, where))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}", where=where) from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{file} is not a list of tools", where=where, hint='[{"type": "function", "function": {…}}]')
    return tools
