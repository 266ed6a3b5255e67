"""One episode: the policy that its environment calls, and the rows of tokens it produces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import EpisodeError
from rlhf_core.types import Completion, GenerationRequest, Message, ToolCall

from .compaction import Compaction, ContextFull
from .contents import images_of
from .contract import Endpoint, EpisodeTruncated, Messages, Options, Reply, Task, Tool
from .endpoint import Endpoints
from .progress import Progress
from .row import EpisodeRow
from .rows import EpisodeRows
from .rules import Rules
from .sight import Seen, Sight
from .workers import Workers

if TYPE_CHECKING:
    from .clock import Clock

SampleTurn = Callable[[GenerationRequest, tuple[str, ...]], Coroutine[Any, Any, Completion]]
"""Samples one turn with the engine. The second argument is stop texts in addition to those of the run."""


OVER = "the episode is over"
NO_FORK = "call fork() after a turn: before the first, there is nothing to share"


class Episode(EpisodeRows):
    """Rows, limits and counts of one episode."""

    def __init__(
        self,
        rules: Rules,
        task: Task,
        sample_turn: SampleTurn,
        clock: Clock,
        endpoints: Endpoints,
        workers: Workers,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(rules, task)
        self.progress = progress or Progress()
        self._sample_turn = sample_turn
        self._clock = clock
        self._endpoints = endpoints
        self._workers = workers
        self._endpoint: asyncio.Task[Endpoint] | None = None
        self.num_turns = 0
        """Number of the policy's turns."""
        self.bad_tool_calls = 0
        """Number of calls that are unreadable or name an unknown tool."""
        self.was_refused = False
        """Whether a call at the endpoint was refused because no turn or token was left."""
        self._num_reserved = 0
        """Sum of the token limits of all turns being sampled."""
        self._pending: set[asyncio.Future[Completion]] = set()
        self.is_over = False
        self.compacts = False
        """Whether the environment shortens conversations, so that `max_tokens` limits each context."""

    def close(self) -> None:
        """End the episode: cancel pending turns and refuse new ones."""
        self.is_over = True
        opened = self._endpoint
        if opened is not None and not (opened.cancel() or opened.cancelled() or opened.exception()):
            self._endpoints.end(opened.result())
        for turn in self._pending:
            turn.cancel()

    def check_open(self) -> None:
        """Raise `RuntimeError` after `close`."""
        if self.is_over:
            raise RuntimeError(OVER)

    async def endpoint(self) -> Endpoint:
        self.check_open()
        if self._endpoint is None:
            self._endpoint = asyncio.ensure_future(self._endpoints.open(self))
        return await asyncio.shield(self._endpoint)

    async def read(self, messages: Messages, *, opens: bool) -> Messages:
        """Return messages with references in place of their images, which are decoded on a thread.

        Args:
            messages: Messages of the environment or of an agent.
            opens: Whether they may open a row, which needs the images of the prompt and of earlier messages too.

        Raises:
            EpisodeError: The model does not see.
            DataError: An image cannot be used.
        """
        sight, is_text = self.rules.sight, not images_of(messages)
        if sight is None and not is_text:
            raise EpisodeError(
                "a message has an image, but the model does not see",
                where=f"sample {self.task.sample_id}",
                hint="return text, or use a model that sees (docs/images.md)",
            )
        if sight is None or (is_text and not (opens and self.seen.references.keys() - self.seen.encoded.keys())):
            return messages
        given = [] if messages is None or isinstance(messages, str) else messages
        read, error = await self._workers.submit(partial(_read, sight, given, self.seen, opens))
        if error is not None:
            raise error
        self.check_open()
        return messages if is_text else read

    async def _generate(self, request: GenerationRequest, stop: tuple[str, ...]) -> Completion:
        """Sample a turn with the engine while the environment's clock is paused."""
        turn = asyncio.ensure_future(self._sample_turn(request, stop))
        self._pending.add(turn)
        turn.add_done_callback(self._pending.discard)
        with self._clock.paused():
            return await turn

    def policy(self) -> EpisodePolicy:
        """Return the policy in the episode's first branch."""
        return EpisodePolicy(self, None)

    @property
    def remaining_turns(self) -> int:
        return self.rules.options.max_turns - self.num_turns

    @property
    def tokens_left(self) -> int | None:
        """Response tokens left of `max_tokens`, or None without that limit.

        The limit is for all branches together, and shared tokens count once. A turn being sampled counts as its limit.
        If the environment shortens conversations, the limit is that of the latest branch.
        """
        bound, rows = self.rules.options.max_tokens, self.rows[-1:] if self.compacts else self.rows
        return None if bound is None else bound - sum(row.num_own for row in rows) - self._num_reserved

    def context_left(self, row: EpisodeRow | None) -> int | None:
        """Return the number of tokens that still fit in the model's context after `row`, or None without a limit."""
        length = row.num_tokens if row else len(self.task.prompt.prompt_ids)
        return None if self.rules.context_tokens is None else self.rules.context_tokens - length

    def token_limit(self, row: EpisodeRow, wanted: int | None = None) -> int:
        """Return the maximum length of the next turn in `row`, at most `wanted`.

        Raises `EpisodeTruncated` if no token is left.
        """
        turn = self.rules.sampling.max_new_tokens
        limit = min(turn, remaining_tokens(self.tokens_left, self.context_left(row), turn))
        if limit < 1:
            raise EpisodeTruncated("no token is left")
        return limit if wanted is None else min(limit, wanted)

    async def sample(self, row: EpisodeRow, limit: int, stop: tuple[str, ...], options: Options = None) -> Reply:
        """Sample a turn of at most `limit` tokens at the end of `row`."""
        number = self.num_turns
        self.num_turns += 1
        request = GenerationRequest(
            sample_id=self.task.sample_id,
            prompt_ids=row.sequence,
            branch=row.branch,
            offset=row.num_sampled,
            max_new_tokens=limit,
            inputs=(self.task.prompt.columns | self.changed_columns(row)).model_inputs,
            goes_on=self.remaining_turns > 0,
            options=options or {},
        )
        ends = self.chat.ends(self.rules.eos_token_ids) if row.messages is not None else ()
        self._num_reserved += limit
        try:
            completion = await self._generate(request, (*stop, *ends))
        except asyncio.CancelledError:
            if self.num_turns == number + 1:
                self.num_turns = number  # the caller canceled the turn, so its number is free again
            raise
        finally:
            self._num_reserved -= limit
        self.progress.took_turn(number, completion.token_ids, completion.policy_version)
        text = self.rules.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        calls = self._read_calls(completion, row)
        row.sample(completion, text, calls, number)
        if row.messages is not None:
            row.add_reply(self.chat.reply_message(row.replies[-1]))
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
        # Keep special tokens, since some models mark calls with them.
        text = self.rules.tokenizer.decode(list(completion.token_ids), skip_special_tokens=False)
        assert isinstance(text, str)
        calls = self.chat.tool_format().parse(text, row.tools)
        names = {tool.get("function", {}).get("name") for tool in row.tools}
        self.bad_tool_calls += sum(call.error is not None or call.name not in names for call in calls)
        return calls

    def is_full(self, row: EpisodeRow) -> bool:
        """Whether a turn of the maximum length no longer fits after `row`."""
        turn = self.rules.sampling.max_new_tokens
        return remaining_tokens(self.tokens_left, self.context_left(row), turn) < turn


@dataclass(frozen=True, slots=True)
class State:
    """State of one branch. `tokens_left` and `context_left` are those of `Episode`."""

    remaining_turns: int
    max_new_tokens: int
    """Maximum length of a turn in tokens."""
    tokens_left: int | None
    context_left: int | None
    can_fork: bool
    """Whether a turn was sampled and none is being sampled."""
    sees_images: bool = False

    @property
    def remaining_tokens(self) -> int:
        return remaining_tokens(self.tokens_left, self.context_left, self.remaining_turns * self.max_new_tokens)


def _read(
    sight: Sight, messages: Sequence[Message], seen: Seen, opens: bool
) -> tuple[Sequence[Message], Exception | None]:
    """Return messages with references, or the error of an image, which `Workers` must not raise."""
    try:
        return sight.read(messages, seen, opens), None
    except Exception as error:  # an image processor may raise anything
        return (), error


class EpisodePolicy:
    """The policy in one branch (`Policy`)."""

    def __init__(self, episode: Episode, row: EpisodeRow | None) -> None:
        self._episode = episode
        self._row = row
        self._is_idle = True
        """False while a turn is being sampled, and after one was canceled."""

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
            tokens_left=episode.tokens_left,
            context_left=episode.context_left(self._row),
            can_fork=self._row is not None and self._is_idle,
            sees_images=self.sees_images,
        )

    @property
    def sees_images(self) -> bool:
        return self._episode.rules.sight is not None

    async def turn(
        self,
        messages: Messages = None,
        tools: Sequence[Tool] = (),
        stop: Sequence[str] = (),
        options: Options = None,
        compaction: Compaction = None,
    ) -> Reply:
        episode = self._episode
        episode.compacts |= compaction is not None
        episode.check_open()
        is_first = self._row is None and bool(messages or tools)
        is_anew = compaction == "restart" or episode.rules.options.history == "branch"
        messages = await episode.read(messages, opens=is_first or is_anew)
        if not self._is_idle:
            raise ValueError("this branch has an unfinished turn: fork() first to sample two at a time")
        if episode.remaining_turns < 1:
            raise EpisodeTruncated(f"no turn is left of {episode.rules.options.max_turns}")
        if episode.tools is None:
            episode.tools = tuple(tools)
        elif tools and tuple(tools) != episode.tools:
            raise ValueError("tools cannot change after the first turn of an episode")
        row = self._row
        if row is None:
            row = episode.open_row(messages)
        elif compaction == "restart":
            row = episode.reopen_row(row, messages)
        else:
            row = episode.continue_row(row, messages)
            if compaction == "ask" and episode.is_full(row):
                whole = row.whole
                row.drop_last_observation()
                episode.remove(row)
                raise ContextFull(whole)
        self._row = row
        try:
            limit = episode.token_limit(row)
        except EpisodeTruncated:
            row.drop_last_observation()
            raise
        self._is_idle = False
        reply = await episode.sample(row, limit, tuple(stop), options)
        self._is_idle = True
        return reply

    async def endpoint(self) -> Endpoint:
        return await self._episode.endpoint()

    def fork(self) -> EpisodePolicy:
        """See `Policy.fork`. Raises `ValueError` before the first turn, when there is nothing to share."""
        if self._row is None or not self._is_idle:
            raise ValueError(NO_FORK)
        return EpisodePolicy(self._episode, self._episode.add(self._row.fork(len(self._episode.rows))))


def remaining_tokens(tokens_left: int | None, context_left: int | None, turn_tokens: int) -> int:
    """Return the response tokens left in a branch.

    Args:
        tokens_left: Tokens left to the episode, or None without a limit.
        context_left: Tokens left in the branch's context, or None without a limit.
        turn_tokens: Maximum tokens of all remaining turns, used if both limits are None.

    Example:
        >>> remaining_tokens(100, 60, 512), remaining_tokens(None, None, 512)
        (60, 512)
    """
    return max(0, min([limit for limit in (tokens_left, context_left) if limit is not None], default=turn_tokens))
