"""Request options of a client's call: the structure that its answer must have."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.protocols import RolloutEngine

from .call_grammars import calls_grammar, names_of
from .chat import ChatFormat
from .endpoint import Call, CallRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STRUCTURE = "structure"
_SCHEMA = "json_schema"


class AnswerStructures:
    """Structures of answers to calls, for one engine and one format of conversations.

    Example:
        options = await structures.options(call)  # CallRefused if the engine cannot sample such an answer
    """

    def __init__(self, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase) -> None:
        """Store engine and tokenizer.

        Args:
            engine: The engine. If its method `check_options` exists, it raises an error for invalid request options. It
                is called on another thread, since it may take seconds.
            tokenizer: The policy's tokenizer.
        """
        self._accepts = _STRUCTURE in getattr(engine, "request_options", {})
        self._check = getattr(engine, "check_options", None)
        self._tokenizer = tokenizer

    async def options(self, call: Call, chat: ChatFormat) -> dict[str, Any]:
        """Return the request options of a call.

        Args:
            call: A client's call.
            chat: Format of its conversation.

        Raises:
            CallRefused: The structure is invalid, or the engine or the format of tool calls does not support it.
        """
        if call.answer_schema is None and not call.forced_tools:
            return {}
        if not self._accepts:
            problem = "the engine that answers does not sample structured answers: omit response_format, text.format, "
            raise CallRefused(400, "unsupported_parameter", problem + "output_config.format and a forced tool_choice")
        options = {_STRUCTURE: self._structure(call, chat)}
        if self._check is not None:
            try:
                await asyncio.to_thread(self._check, options)
            except RlhfError as error:
                raise CallRefused(400, "invalid_request", error.message) from error
        return options

    def _structure(self, call: Call, chat: ChatFormat) -> dict[str, Any]:
        schema, forced = call.answer_schema, call.forced_tools
        if not forced and (schema is not None and not call.tools):
            return {_SCHEMA: schema}
        unknown = sorted(set(forced) - set(names_of(call.tools)))
        if unknown:
            raise CallRefused(400, "invalid_request", f"tool_choice: there is no tool {unknown[0]!r:.100} in tools")
        tools = [tool for tool in call.tools if not forced or tool["function"]["name"] in forced]
        try:
            tool_format = chat.tool_format()
        except ConfigError as error:
            raise CallRefused(400, "invalid_request", error.message) from error
        answer = None if forced else schema
        grammar = calls_grammar(tool_format, self._tokenizer, tools, several=call.several_calls, answer=answer)
        if grammar is None:
            problem = f"calls in the format {tool_format.name} cannot be forced or combined with a format of answers"
            raise CallRefused(400, "unsupported_parameter", f"tool_choice: {problem}")
        return {"lark": grammar}
