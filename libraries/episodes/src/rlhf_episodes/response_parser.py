"""Parse replies in a child process that can be killed, with transformers' `parse_response` or the package `renderers`.

Regular expressions of both run on untrusted model output. The length of the text is bounded, and a process that takes
too long is killed. Requests and answers are JSON.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rlhf_containment.processes.asked import ProcessFault, ProcessTimeout, RequestProcess, serve_requests

from . import renderer_parser
from .contract import Tool

MAX_CHARS = 200_000
"""Maximum length of a reply."""
TIMEOUT_SECONDS = 5.0


class UnreadableReply(ValueError):
    """The reply does not match the response template or could not be parsed. The message contains the reason."""


class ResponseParser:
    """Parses replies of one family. Thread-safe. The child process starts with the first reply."""

    def __init__(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._worker: RequestProcess | None = None

    def message(self, template: Mapping[str, Any], text: str, tools: Sequence[Tool] = ()) -> dict[str, Any]:
        """Parse a reply into a message with the fields of the template (`content`, `tool_calls` and others).

        `template` is a response template, or the `reader` of `renderer_parser.parse`.
        Raises `UnreadableReply`. A process that was too slow or died is replaced at the next reply.
        """
        if len(text) > MAX_CHARS:
            raise UnreadableReply(f"the reply has {len(text):,} characters, more than {MAX_CHARS:,}")
        request = json.dumps([template, text, list(tools)]).encode()
        with self._lock:
            try:
                kind, message = json.loads(self._process(template).ask(request, self._timeout_seconds))
            except (OSError, ProcessFault, TypeError, ValueError, RecursionError) as error:
                self._end()
                raise UnreadableReply(self._describe(error)) from error
        if kind != "message" or not isinstance(message, dict):
            raise UnreadableReply(str(message))
        return message

    def _process(self, template: Mapping[str, Any]) -> RequestProcess:
        if self._worker is None:
            self._worker = RequestProcess("rlhf_episodes.response_parser")
            weakref.finalize(self, self._worker.end)
            self._worker.start(json.dumps([template, "", []]).encode())  # imports the parser
        return self._worker

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.end()
        self._worker = None

    def _describe(self, error: Exception) -> str:
        if isinstance(error, ProcessTimeout):  # without the stack trace, since the policy may read this
            return f"it was not read within {self._timeout_seconds:g} s"
        if isinstance(error, OSError):
            return f"no process could be started to read it: {error}"
        return (
            f"the process that reads replies {error if isinstance(error, ProcessFault) else 'did not answer in JSON'}"
        )


def answer(request: bytes) -> bytes:
    """Answer a request in the child process."""
    template, text, tools = json.loads(request)
    try:
        parse = renderer_parser.parse if "renderer" in template else _parse
        return json.dumps(["message", parse(template, text, tools)]).encode()
    except Exception as error:  # parsers raise arbitrary errors on text in another format
        return json.dumps(["failed", f"{type(error).__name__}: {error}"[:500]]).encode()


def _parse(template: dict[str, Any], text: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Parse a reply with a response template of transformers."""
    from transformers.utils.chat_parsing import parse_response

    message = parse_response(text, template, prefix="", tools=[*tools] or None)
    if message.get("tool_calls"):
        message["tool_calls"] = list(chain.from_iterable(map(_plain_calls, message["tool_calls"])))
    return message


def _plain_calls(call: Any) -> list[Any]:
    """Return a parsed call in a list, or convert a list of Python calls: `[add(a=1, text='x')]`."""
    if not isinstance(call, str):
        return [call]
    tree = ast.parse(call, mode="eval").body
    calls = []
    for each in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(each, ast.Call) or each.args:
            raise ValueError("a call is written NAME(KEY=VALUE, …)")
        arguments = {str(keyword.arg): ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in each.keywords}
        calls.append({"function": {"name": ast.unparse(each.func), "arguments": arguments}})
    return calls


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's constants, which templates write in Python calls."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node


if __name__ == "__main__":
    serve_requests(int(sys.argv[1]), int(sys.argv[2]), answer)
