"""The rows of one episode: how they are opened, and continued with an environment's messages."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.columns import Columns
from rlhf_core.errors import EpisodeError
from rlhf_core.types import Message

from .contents import images_of, marked, text_of
from .contract import Messages, Task, Tool
from .row import EpisodeRow
from .rules import Rules
from .sight import IMAGES, Seen


class EpisodeRows:
    """The branches of an episode."""

    def __init__(self, rules: Rules, task: Task) -> None:
        """Start without rows.

        Args:
            rules: Settings that episodes share.
            task: Task of the episode.
        """
        self.rules = rules
        self.chat = rules.chat
        self.task = task
        self.rows: list[EpisodeRow] = []
        self.tools: tuple[Tool, ...] | None = None
        """Tools of the first turn, or None before it."""
        own = task.prompt.metadata.get(IMAGES) if rules.sight is not None else None
        self.seen = Seen({each["sha256"]: each for each in own or ()})
        """Images of the prompt and of messages. Empty if the model does not see."""

    def changed_columns(self, row: EpisodeRow) -> Columns:
        """Return the columns of a row that differ from those of the prompt."""
        return Columns() if self.rules.sight is None else self.rules.sight.columns(row)

    def open_row(self, messages: Messages) -> EpisodeRow:
        """Add and return the first row: the prompt, followed by the environment's messages before the first turn."""
        prompt = self.task.prompt
        # Without a prompt, the row is a conversation if the model has a chat template or there are tools.
        is_chat = self.tools or (not prompt.text and self.rules.tokenizer.chat_template)
        if prompt.messages is None and not is_chat and (messages is None or isinstance(messages, str)):
            if not messages:
                return self.open_text(prompt.text, prompt.prompt_ids)
            self._check_text()
            return self.open_text(prompt.text + messages)
        if prompt.messages is not None and not messages and not self.tools:
            return self.open_chat(prompt.messages, ())
        before = prompt.messages or (as_messages(prompt.text) if prompt.text else ())
        if self.rules.sight is not None:
            before = self.rules.sight.with_images(before, prompt)
        return self.open_chat((*before, *as_messages(messages)), self.tools or ())

    def open_text(self, text: str, ids: tuple[int, ...] | None = None) -> EpisodeRow:
        """Add and return a row that starts with plain text. `ids` are its tokens, if they are known."""
        sight = self.rules.sight
        opening = sight.place("", (), self.seen) if sight is not None and ids is None else None
        ids = self.rules.encoder.encode(text) if ids is None else ids
        return self.add(EpisodeRow(branch=len(self.rows), text=text, prompt_ids=ids, messages=None, opening=opening))

    def _check_text(self) -> None:
        """Raise `EpisodeError` if the prompt is plain text with images, to which only replies can be added."""
        if self.seen.references:
            raise EpisodeError(
                "text with images cannot be extended or shortened",
                where=f"sample {self.task.sample_id}",
                hint="give the prompt and the observations as chat messages",
            )

    def open_chat(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> EpisodeRow:
        """Add and return a row that starts with a whole conversation."""
        prompt, sight, opening = self.task.prompt, self.rules.sight, None
        text, ids = self.chat.open(marked(messages), tools)
        if prompt.columns.model_inputs and messages == prompt.messages and not tools:
            ids = prompt.prompt_ids  # which may have tokens for these inputs, such as those of images
            messages = messages if sight is None else sight.with_images(messages, prompt)
        elif sight is not None:
            opening = sight.place(self.chat.rendered(sight.bare(messages), tools), messages, self.seen)
            ids = self.chat.encoded(opening.text)
        return self.add(
            EpisodeRow(
                branch=len(self.rows),
                text=text,
                prompt_ids=ids,
                messages=marked(messages),
                tools=tools,
                conversation=list(messages),
                opening=opening,
            )
        )

    def open_call(self, messages: Sequence[Message] | str, tools: tuple[Tool, ...]) -> EpisodeRow:
        """Add and return a row for an agent's call, whose images were read."""
        if isinstance(messages, str):
            if any(each.marker in messages for each in self.seen.references.values()):
                self._check_text()
            return self.open_text(messages)
        return self.open_chat(tuple(messages) if self.is_prompt(messages, tools) else self.with_images(messages), tools)

    def is_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Whether a call repeats the prompt, whose tokens and inputs are known."""
        return tuple(messages) == self.task.prompt.messages and not tools

    def with_images(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return an agent's messages with images in place of the markers of the prompt's images."""
        sight = self.rules.sight
        return tuple(messages) if sight is None else sight.with_images(messages, self.task.prompt)

    def add(self, row: EpisodeRow) -> EpisodeRow:
        """Add and return a row. Raises `EpisodeError` if its prompt is empty."""
        if not row.prompt_ids:
            raise EpisodeError(
                "the first turn has nothing to continue: neither the prompt nor the environment provided text",
                where=f"sample {self.task.sample_id}",
                hint="return an observation from reset, or add prompts to the run",
            )
        self.rows.append(row)
        return row

    def remove(self, row: EpisodeRow) -> None:
        """Remove a row in which no turn was sampled, if it is the last one. Otherwise its number stays taken."""
        if row is self.rows[-1] and not row.own_turns:
            self.rows.pop()

    def reopen_row(self, row: EpisodeRow, messages: Messages) -> EpisodeRow:
        """Add and return a row that starts with a shorter conversation than `row` has."""
        if row.messages is not None:
            return self.open_chat(as_messages(messages), row.tools)
        self._check_text()
        return self.open_text(messages if isinstance(messages, str) else "")

    def continue_row(self, row: EpisodeRow, messages: Messages) -> EpisodeRow:
        """Append new messages after the last turn and return the row.

        With `history: branch`, return a new row if the template renders earlier replies differently than sampled.
        """
        if row.messages is None:
            if messages is None:
                return row
            if images_of(messages):
                self._check_text()
            text = messages if isinstance(messages, str) else "".join(text_of(each["content"]) for each in messages)
            row.give(self.chat.text_ids(text), text)
            return row
        new = as_messages(messages)
        if self.rules.options.history == "branch" and self._is_cut(row, new):
            return self.open_chat((*row.conversation, *new), row.tools)
        sight, placed = self.rules.sight, None
        if sight is not None and images_of(new):
            placed = sight.place(self.chat.rendered_after(sight.bare(new), row.tools), new, self.seen)
            ids = self.chat.encoded_after(placed.text, row.last_sampled)
        else:
            ids = self.chat.after_reply(new, tools=row.tools, sampled_ids=row.last_sampled)
        row.conversation += new
        if ids:
            if placed is not None:
                row.observed[len(row.turns)] = placed
            row.give(ids, "\n".join(text_of(each.get("content", "")) for each in new))
        return row

    def _is_cut(self, row: EpisodeRow, new: Sequence[Message]) -> bool:
        """Whether the template renders replies of this row differently than sampled once `new` follows."""
        return self.chat.check(row.tools).cuts(new, thinking=any(map(self.chat.thinks, row.replies)))


def as_messages(content: Messages, role: str = "user") -> tuple[Message, ...]:
    """Return an observation as chat messages. Text becomes one message of `role`.

    Example:
        >>> as_messages("Too low.")
        ({'role': 'user', 'content': 'Too low.'},)
    """
    if content is None:
        return ()
    return ({"role": role, "content": content},) if isinstance(content, str) else tuple(content)
