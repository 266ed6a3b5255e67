"""One episode: the policy as its environment sees it, and the rows that come of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_core.columns import Column
from rlhf_core.errors import EpisodeError
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_core.types import Completion, GenerationRequest, Message, SamplingParams, ToolCall

from .chat import ChatFormat, chat_format
from .contract import Endpoint, EpisodeTruncated, Messages, Options, Reply, Task, Tool
from .endpoint import Endpoints
from .row import EpisodeRow
from .section import EnvironmentConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .clock import Clock

Ask = Callable[[GenerationRequest, tuple[str, ...]], Coroutine[Any, Any, Completion]]
"""Have the engine sample one turn, which the given texts end besides the run's."""


OVER = "the episode is over"
NO_FORK = "fork() comes after a turn: before the first, there is nothing to share"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings shared by the episodes of a run."""

    options: EnvironmentConfig
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingParams
    context_tokens: int | None
    """Longest sequence the engine can continue."""
    eos_token_ids: frozenset[int]
    """At which the engine ends a turn."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Those that the environment declares."""
    encoder: PromptEncoder = field(init=False)
    """Encoder of prompts, shared so that each is encoded once."""
    chat: ChatFormat = field(init=False)

    def __post_init__(self) -> None:
        """Raises what `chat_format` does."""
        object.__setattr__(self, "encoder", PromptEncoder(self.tokenizer))
        chat = chat_format(
            self.tokenizer,
            tool_format=self.options.tool_format,
            history=self.options.history,
            eos_token_ids=self.eos_token_ids,
        )
        object.__setattr__(self, "chat", chat)


class Episode:
    """The rows, bounds and counts of one episode."""

    def __init__(self, rules: Rules, task: Task, ask: Ask, clock: Clock, endpoints: Endpoints) -> None:
        self.rules = rules
        self.chat = rules.chat
        self.task = task
        self._ask = ask
        self._clock = clock
        self._endpoints = endpoints
        self._endpoint: asyncio.Task[Endpoint] | None = None
        self.rows: list[EpisodeRow] = []
        self.tools: tuple[Tool, ...] | None = None
        """Those of the first turn."""
        self.num_turns = 0
        """Turns of the policy."""
        self.bad_tool_calls = 0
        """Unreadable, or of a tool that does not exist."""
        self.was_refused = False
        """Whether a call at the endpoint was refused as no turn or token was left."""
        self._being_sampled = 0
        """Most tokens of the turns that are being sampled."""
        self._asking: set[asyncio.Future[Completion]] = set()
        self.is_over = False

    def close(self) -> None:
        """No turn is sampled any more: the episode is over, whether its environment knows or not."""
        self.is_over = True
        opened = self._endpoint
        if opened is not None and not (opened.cancel() or opened.cancelled() or opened.exception()):
            self._endpoints.end(opened.result())
        for asked in self._asking:
            asked.cancel()

    def check_open(self) -> None:
        """Raise `RuntimeError` after `close`."""
        if self.is_over:
            raise RuntimeError(OVER)

    async def endpoint(self) -> Endpoint:
        self.check_open()
        if self._endpoint is None:
            self._endpoint = asyncio.ensure_future(self._endpoints.open(self))
        return await asyncio.shield(self._endpoint)

    async def ask(self, request: GenerationRequest, stop: tuple[str, ...]) -> Completion:
        """Have the engine sample a turn; the environment's clock rests meanwhile."""
        asked = asyncio.ensure_future(self._ask(request, stop))
        self._asking.add(asked)
        asked.add_done_callback(self._asking.discard)
        with self._clock.answering():
            return await asked

    def policy(self) -> EpisodePolicy:
        """The policy in the episode's first branch."""
        return EpisodePolicy(self, None)

    @property
    def remaining_turns(self) -> int:
        return self.rules.options.max_turns - self.num_turns

    @property
    def left(self) -> int | None:
        """Response tokens left of `max_tokens`, which is for all branches together; what they share counts once.

        A turn that is being sampled counts with its limit. None where there is no such bound.
        """
        bound = self.rules.options.max_tokens
        return None if bound is None else bound - sum(row.num_own for row in self.rows) - self._being_sampled

    def room(self, row: EpisodeRow | None) -> int | None:
        """Tokens that the model's context has room for in `row`; None where it has no bound."""
        length = row.num_tokens if row else len(self.task.prompt.prompt_ids)
        return None if self.rules.context_tokens is None else self.rules.context_tokens - length

    def token_limit(self, row: EpisodeRow, wanted: int | None = None) -> int:
        """Most tokens of the next turn in `row`; `wanted` is the caller's own bound. Raises `EpisodeTruncated`."""
        turn = self.rules.sampling.max_new_tokens
        limit = min(turn, remaining_tokens(self.left, self.room(row), turn))
        if limit < 1:
            raise EpisodeTruncated("no token is left")
        return limit if wanted is None else min(limit, wanted)

    async def sample(self, row: EpisodeRow, limit: int, stop: tuple[str, ...], options: Options = None) -> Reply:
        """Have the policy take a turn of at most `limit` tokens at the end of `row`."""
        number = self.num_turns
        self.num_turns += 1
        request = GenerationRequest(
            sample_id=self.task.sample_id,
            prompt_ids=row.sequence,
            branch=row.branch,
            offset=row.num_sampled,
            max_new_tokens=limit,
            inputs=self.task.prompt.columns.model_inputs,
            goes_on=self.remaining_turns > 0,
            options=options or {},
        )
        ends = self.chat.ends(self.rules.eos_token_ids) if row.messages is not None else ()
        self._being_sampled += limit
        try:
            completion = await self.ask(request, (*stop, *ends))
        except asyncio.CancelledError:
            if self.num_turns == number + 1:
                self.num_turns = number  # whoever asked for it has left
            raise
        finally:
            self._being_sampled -= limit
        text = self.rules.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        calls = self._read_calls(completion, row)
        row.sample(completion, text, calls, number)
        if row.messages is not None:
            row.say(self.chat.reply_message(row.replies[-1]))
        return Reply(
            text=text,
            tool_calls=calls,
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            turn=number,
            policy_version=completion.policy_version,
        )

    def _read_calls(self, completion: Completion, row: EpisodeRow) -> tuple[ToolCall, ...]:
        if not row.tools:
            return ()
        # With the special tokens: some models mark a call by one.
        text = self.rules.tokenizer.decode(list(completion.token_ids), skip_special_tokens=False)
        assert isinstance(text, str)
        calls = self.chat.tool_format().parse(text, row.tools)
        names = {tool.get("function", {}).get("name") for tool in row.tools}
        self.bad_tool_calls += sum(call.error is not None or call.name not in names for call in calls)
        return calls

    def open_row(self, messages: Messages) -> EpisodeRow:
        """The first row: the prompt, and what the environment puts behind it before the first turn."""
        prompt = self.task.prompt
        # A task without a prompt is a conversation where the model has a template, or gets tools.
        speaks = self.tools or (not prompt.text and self.rules.tokenizer.chat_template)
        if prompt.messages is None and not speaks and (messages is None or isinstance(messages, str)):
            text = prompt.text + (messages or "")
            return self.open_text(text, prompt.prompt_ids if not messages else None)
        before = prompt.messages
        if before is None:
            before = as_messages(prompt.text) if prompt.text else ()
        return self.open_chat((*before, *as_messages(messages)), self.tools or ())

    def open_text(self, text: str, ids: tuple[int, ...] | None = None) -> EpisodeRow:
        """A row that begins with a plain text; `ids` where they are known."""
        ids = self.rules.encoder.encode(text) if ids is None else ids
        return self.add(EpisodeRow(branch=len(self.rows), text=text, prompt_ids=ids, messages=None))

    def open_chat(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> EpisodeRow:
        """A row that begins with a whole conversation."""
        text, ids = self.chat.open(messages, tools)
        return self.add(
            EpisodeRow(
                branch=len(self.rows),
                text=text,
                prompt_ids=ids,
                messages=messages,
                tools=tools,
                conversation=list(messages),
            )
        )

    def add(self, row: EpisodeRow) -> EpisodeRow:
        """A new row. Raises `EpisodeError` where it has nothing to continue."""
        if not row.prompt_ids:
            raise EpisodeError(
                "the first turn has nothing to continue: neither the prompt nor the environment gave a text",
                where=f"sample {self.task.sample_id}",
                hint="return an observation from reset, or give the run prompts",
            )
        self.rows.append(row)
        return row

    def forget(self, row: EpisodeRow) -> None:
        """A row that was opened for nothing; its number is free where it is the last."""
        if row is self.rows[-1] and not row.own_turns:
            self.rows.pop()

    def go_on(self, row: EpisodeRow, messages: Messages) -> EpisodeRow:
        """Put what is new behind the last turn. Returns the row that goes on: a new one where history is cut."""
        if row.messages is None:
            if messages is None:
                return row
            text = messages if isinstance(messages, str) else "".join(str(each["content"]) for each in messages)
            row.give(self.chat.text_ids(text), text)
            return row
        new = as_messages(messages)
        if self.rules.options.history == "branch" and self._is_cut(row, new):
            return self.open_chat((*row.conversation, *new), row.tools)
        ids = self.chat.after_reply(new, tools=row.tools, sampled_ids=row.last_sampled)
        row.conversation += new
        if ids:
            said = messages if isinstance(messages, str) else "\n".join(str(each.get("content", "")) for each in new)
            row.give(ids, said)
        return row

    def _is_cut(self, row: EpisodeRow, new: Sequence[Message]) -> bool:
        """Whether the template writes replies of this row otherwise than they were sampled, now that `new` follows."""
        return self.chat.check(row.tools).cuts(new, thinking=any(map(self.chat.thinks, row.replies)))


@dataclass(frozen=True, slots=True)
class State:
    """What the policy in one branch knows of its episode. `left` and `room` are those of `Episode`."""

    remaining_turns: int
    max_new_tokens: int
    """Longest turn."""
    left: int | None
    room: int | None
    can_fork: bool
    """Whether there is something to share, and no turn that is still waited for."""

    @property
    def remaining_tokens(self) -> int:
        return remaining_tokens(self.left, self.room, self.remaining_turns * self.max_new_tokens)


class EpisodePolicy:
    """The policy in one branch (`Policy`)."""

    def __init__(self, episode: Episode, row: EpisodeRow | None) -> None:
        self._episode = episode
        self._row = row
        self._answered = True
        """Whether the last turn was waited for to its end."""

    @property
    def remaining_turns(self) -> int:
        return max(0, self._episode.remaining_turns)

    @property
    def remaining_tokens(self) -> int:
        return self.state.remaining_tokens

    @property
    def state(self) -> State:
        episode = self._episode
        return State(
            remaining_turns=self.remaining_turns,
            max_new_tokens=episode.rules.sampling.max_new_tokens,
            left=episode.left,
            room=episode.room(self._row),
            can_fork=self._row is not None and self._answered,
        )

    async def turn(
        self, messages: Messages = None, tools: Sequence[Tool] = (), stop: Sequence[str] = (), options: Options = None
    ) -> Reply:
        episode = self._episode
        episode.check_open()
        if not self._answered:
            raise ValueError("a turn of this branch was not waited for; fork() first, to have two at a time")
        if episode.remaining_turns < 1:
            raise EpisodeTruncated(f"no turn is left of {episode.rules.options.max_turns}")
        if episode.tools is None:
            episode.tools = tuple(tools)
        elif tools and tuple(tools) != episode.tools:
            raise ValueError("the tools of an episode are those of its first turn")
        row = self._row
        row = episode.open_row(messages) if row is None else episode.go_on(row, messages)
        self._row = row
        try:
            limit = episode.token_limit(row)
        except EpisodeTruncated:
            row.drop_last_observation()
            raise
        self._answered = False
        reply = await episode.sample(row, limit, tuple(stop), options)
        self._answered = True
        return reply

    async def endpoint(self) -> Endpoint:
        return await self._episode.endpoint()

    def fork(self) -> EpisodePolicy:
        """See `Policy.fork`. Before the first turn there is nothing to share: both begin with the prompt."""
        if self._row is None or not self._answered:
            raise ValueError(NO_FORK)
        return EpisodePolicy(self._episode, self._episode.add(self._row.fork(len(self._episode.rows))))


def remaining_tokens(left: int | None, room: int | None, turns: int) -> int:
    """Response tokens left in a branch: of the episode's bound and of its own room; of its turns where it has neither.

    The arguments are `Episode.left`, `Episode.room`, and the tokens of all turns that are left.
    """
    return max(0, min([bound for bound in (left, room) if bound is not None], default=turns))


def as_messages(given: Messages, role: str = "user") -> tuple[Message, ...]:
    """Chat messages of what an environment says; text is one message of `role`."""
    if given is None:
        return ()
    return ({"role": role, "content": given},) if isinstance(given, str) else tuple(given)
