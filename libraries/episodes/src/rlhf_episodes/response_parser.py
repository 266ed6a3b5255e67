"""Parse replies with transformers' `parse_response` in a child process that can be killed.

A response template is a set of regular expressions that run on untrusted model output. The length of the text is
bounded, and a process that takes too long is killed. Requests and answers are JSON.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

from rlhf_core.distributed.child_process import START_SECONDS, ChildProcess
from rlhf_core.distributed.parent_watch import killed_with_parent

from .contract import Tool

MAX_CHARS = 200_000
"""Maximum length of a reply."""
TIMEOUT_SECONDS = 5.0
_MAX_ANSWER_BYTES = 16 * MAX_CHARS


class UnreadableReply(ValueError):
    """The reply does not match the response template or could not be parsed. The message contains the reason."""


class ResponseParser:
    """Parses replies with response templates. Thread-safe. The child process starts with the first reply."""

    def __init__(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def message(self, template: Mapping[str, Any], text: str, tools: Sequence[Tool] = ()) -> dict[str, Any]:
        """Parse a reply into a message with the fields of the template (`content`, `tool_calls` and others).

        Raises `UnreadableReply`. A process that was too slow or died is replaced at the next reply.
        """
        if len(text) > MAX_CHARS:
            raise UnreadableReply(f"the reply has {len(text):,} characters, more than {MAX_CHARS:,}")
        with self._lock:
            if self._worker is None:
                try:
                    self._worker = _Worker()
                except OSError as error:
                    raise UnreadableReply(f"no process could be started to read it: {error}") from error
                weakref.finalize(self, self._worker.end)
            try:
                kind, found = self._worker.ask([template, text, list(tools)], self._timeout_seconds)
            except UnreadableReply:
                self._worker.end()
                self._worker = None
                raise
        if kind != "message" or not isinstance(found, dict):
            raise UnreadableReply(str(found))
        return found


class _Worker(ChildProcess):
    def __init__(self) -> None:
        super().__init__("rlhf_episodes.response_parser")
        self._pipe = Connection(self.connection.detach())
        self._started = False

    def ask(self, request: Any, timeout_seconds: float) -> tuple[str, Any]:
        try:
            if not self._started:
                self._receive(START_SECONDS)
                self._started = True
            self._pipe.send_bytes(json.dumps(request).encode())
            kind, found = self._receive(timeout_seconds)
        except (EOFError, OSError) as error:
            raise UnreadableReply(f"the process that reads replies {self.death()}") from error
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, UnreadableReply):
                raise
            raise UnreadableReply("the process that reads replies did not answer in JSON") from error
        return str(kind), found

    def _receive(self, timeout_seconds: float) -> Any:
        if not self._pipe.poll(timeout_seconds):
            raise UnreadableReply(f"it was not read within {timeout_seconds:g} s")
        return json.loads(self._pipe.recv_bytes(_MAX_ANSWER_BYTES))

    def end(self) -> None:
        self._pipe.close()
        super().end()


def main(descriptor: int, parent: int) -> None:
    """Answer requests on the connection with this file descriptor until the other side closes it."""
    killed_with_parent(parent)
    from transformers.utils.chat_parsing import parse_response

    pipe = Connection(descriptor)
    try:
        pipe.send_bytes(b'["ready", null]')
        while True:
            template, text, tools = json.loads(pipe.recv_bytes())
            try:
                found = parse_response(text, template, prefix="", tools=tools or None)
                if found.get("tool_calls"):
                    found["tool_calls"] = list(chain.from_iterable(map(_plain_calls, found["tool_calls"])))
                answer = json.dumps(["message", found])
            except Exception as error:  # parsers raise arbitrary errors on text in another format
                answer = json.dumps(["failed", f"{type(error).__name__}: {error}"[:500]])
            pipe.send_bytes(answer.encode())
    except (EOFError, BrokenPipeError):
        return


def _plain_calls(call: Any) -> list[Any]:
    """Return a parsed call in a list, or convert a list of Python calls: `[add(a=1, text='x')]`."""
    if not isinstance(call, str):
        return [call]
    listed = ast.parse(call, mode="eval").body
    found = []
    for each in listed.elts if isinstance(listed, ast.List) else [listed]:
        if not isinstance(each, ast.Call) or each.args:
            raise ValueError("a call is written NAME(KEY=VALUE, …)")
        arguments = {str(keyword.arg): ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in each.keywords}
        found.append({"function": {"name": ast.unparse(each.func), "arguments": arguments}})
    return found


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's constants, which templates write in Python calls."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
