"""The part of a task that a program gets: the files of its working folder, and the words that replace placeholders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from rlhf_containment.sandbox import FolderError, FolderFile, check_path
from rlhf_core.errors import DataError
from rlhf_core.types import Prompt
from rlhf_episodes import Endpoint

FILES, SCORE_FILES = "files", "score_files"
"""Keys of a record: the files of the working folder, and those that are added for the score."""


def folder_of(prompt: Prompt, key: str, max_bytes: int) -> dict[str, FolderFile]:
    """Return the files that a prompt's record has under `key`, by path. A text that starts with `#!` is executable.

    Args:
        prompt: The task's prompt.
        key: `FILES` or `SCORE_FILES`.
        max_bytes: Maximum size of all files together.

    Raises:
        DataError: it is not a mapping from safe relative paths to texts, or is too large.
    """
    found = prompt.metadata.get(key) or {}
    if not isinstance(found, Mapping):
        raise _wrong(prompt, key, f"is {type(found).__name__}, not a mapping from paths to texts")
    files = {}
    for path, text in found.items():
        if not (isinstance(path, str) and isinstance(text, str)):
            raise _wrong(prompt, key, f"has {path!r:.80}: {text!r:.80}, not a path and a text")
        try:
            check_path(path)
        except FolderError as error:
            raise _wrong(prompt, key, str(error)) from None
        if parent := next((each for each in found if path.startswith(f"{each}/")), None):
            raise _wrong(prompt, key, f"has {parent!r:.80} both as a file and as a folder")
        files[path] = FolderFile(text.encode(errors="replace"), text.startswith("#!"))
    if (size := sum(len(each.data) for each in files.values())) > max_bytes:
        raise _wrong(prompt, key, f"has {size} bytes, more than environment.max_folder_bytes")
    return files


def with_score_files(files: Mapping[str, FolderFile], scored: Mapping[str, FolderFile]) -> dict[str, FolderFile]:
    """Return the files of a folder and those of the score, which replace whatever is in their way.

    Example:
        >>> sorted(with_score_files({"a": FolderFile(b""), "b/c": FolderFile(b"")}, {"a/b": FolderFile(b"")}))
        ['a/b', 'b/c']
    """
    folders = {parent for path in scored for parent in _parents(path)}
    kept = {
        path: each
        for path, each in files.items()
        if path not in folders and not any(parent in scored for parent in _parents(path))
    }
    return {**kept, **scored}


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]


def _wrong(prompt: Prompt, key: str, problem: str) -> DataError:
    return DataError(
        f"{key!r} of the record {problem}",
        where=f"prompt {prompt.position}",
        hint=f'write the record\'s {key} as {{"path/of/file.txt": "its text"}}',
    )


def prompt_text(prompt: Prompt) -> str:
    """Return the prompt's text. Of a conversation, these are the texts of its messages of `user`."""
    if prompt.messages is None:
        return prompt.text
    texts = (message.get("content") for message in prompt.messages if message.get("role") == "user")
    return "\n\n".join(text for text in texts if isinstance(text, str))


def words_of_program(prompt: Prompt, endpoint: Endpoint) -> dict[str, str]:
    """Return the words that replace placeholders of a program."""
    return {
        "prompt": prompt_text(prompt),
        "model": endpoint.model,
        "base_url": endpoint.base_url,
        "anthropic_base_url": endpoint.anthropic_base_url,
        "api_key": endpoint.api_key,
    }


def words_of_score(prompt: Prompt) -> dict[str, str]:
    """Return the words that replace placeholders of a command that scores."""
    answer = prompt.answer if isinstance(prompt.answer, str) else json.dumps(prompt.answer, default=str)
    return {"prompt": prompt_text(prompt), "answer": answer}


def endpoint_variables(endpoint: Endpoint) -> dict[str, str]:
    """Return the environment variables from which SDKs and agents read the address of the model."""
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_BASE": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_base_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_MODEL": endpoint.model,
    }


def filled(texts: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """Return texts with the words in place of their names in braces. Other braces stay.

    Example:
        >>> filled(["{prompt}!", '{"a": 1}'], {"prompt": "Hello"})
        ['Hello!', '{"a": 1}']
    """
    names = re.compile("{(" + "|".join(map(re.escape, words)) + ")}")
    return [names.sub(lambda found: words[found[1]], text) for text in texts]
