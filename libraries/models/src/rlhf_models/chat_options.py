"""`model.chat`: options of a tokenizer's chat template, written into the template itself.

So they hold wherever the template is used: in training, evaluation, generation and serving, and in whatever else loads
the tokenizer that is saved beside the final policy. What a caller gives (tools, a system message) still comes first.
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
    """Change the tokenizer's template as `options` say. Raises `ConfigError`: no template, or a wrong file."""
    if options.template is not None:
        tokenizer.chat_template = _text(options.template, "model.chat.template")
    if not tokenizer.chat_template:
        raise ConfigError(
            "this model's tokenizer has no chat template", where="model.chat", hint="give one: model.chat.template"
        )
    front = _front(options)
    template: Any = tokenizer.chat_template
    if isinstance(template, str):
        tokenizer.chat_template = front + template
        _check_syntax(tokenizer, options)
    else:  # several, by name
        tokenizer.chat_template = {name: front + each for name, each in template.items()}


def _front(options: ChatConfig) -> str:
    """Statements that set what the caller of a template has not given; without a line of their own.

    Values are written as Python writes them: Jinja's literals are those of Python.
    """
    defaults = [(f"{name} is not defined", f"{name} = {value!r}") for name, value in options.kwargs.items()]
    if options.tools is not None:
        defaults.append(("not tools", f"tools = {_tools(options.tools)!r}"))
    if options.system is not None:
        message = [{"role": "system", "content": options.system}]
        defaults.append(
            ("not messages or messages[0]['role'] != 'system'", f"messages = {message!r} + (messages | list)")
        )
    return "".join(f"{{%- if {unset} %}}{{%- set {it} %}}{{%- endif -%}}" for unset, it in defaults)


def _check_syntax(tokenizer: PreTrainedTokenizerBase, options: ChatConfig) -> None:
    from jinja2 import TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    except TemplateSyntaxError as error:
        where = "model.chat" if options.template is None else f"model.chat.template: {options.template}"
        told = f"the chat template cannot be read: {error.message} (line {error.lineno})"
        raise ConfigError(told, where=where) from None
    except Exception:
        return  # it refuses this conversation; of those of the prompts it is told with their lines


def _text(file: str, where: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"cannot read {file}: {reason}", where=where, hint="paths start at the current folder"
        ) from None


def _tools(file: str) -> list[Any]:
    where = "model.chat.tools"
    try:
        tools = json.loads(_text(file, where))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}", where=where) from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{file} is no list of tools", where=where, hint='[{"type": "function", "function": {…}}]')
    return tools
