"""Uploads a model folder to the Hugging Face hub, or to another server with its protocol (`HF_ENDPOINT`)."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.errors import DeadlineError, RlhfError, UserInputError, first_line
from rlhf_core.util import redact_text

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_Result = TypeVar("_Result")

WHERE = "--push"
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_CALL_SECONDS = 60.0
"""Deadline for each request before the upload."""
_IGNORED = [".*", "**/.*", ".*/**", "**/.*/**"]
"""Hidden files and folders, which may contain keys."""


def check_ready(repo: str) -> None:
    """Raise `UserInputError` if `repo` is not `OWNER/NAME`, the hub is disabled or there is no token. No requests."""
    from huggingface_hub import constants, get_token

    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise UserInputError(f"{repo!r} is not a name on the hub", where=WHERE, hint="--push OWNER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise UserInputError("HF_HUB_OFFLINE disables the hub", where=WHERE, hint="unset HF_HUB_OFFLINE, and repeat")
    if get_token() is None:
        raise UserInputError(
            f"there is no token for {constants.ENDPOINT}",
            where=WHERE,
            hint=f"create one with write access at {constants.ENDPOINT}/settings/tokens, then type: hf auth login "
            "(or set HF_TOKEN)",
        )


def check_publishable(folder: Path) -> None:
    """Raise `UserInputError` if a folder contains a link, or is an adapter of a folder on this machine.

    The upload would follow a link, which may lead to any file, and others could not load the adapter.
    """
    if (link := next((path for path in sorted(folder.rglob("*")) if path.is_symlink()), None)) is not None:
        raise UserInputError(
            f"{link} is a link, which is not uploaded", where=WHERE, hint="copy the model first: add --to DIR"
        )
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    base = str(json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path"))
    if os.path.exists(base) or not _REPO.fullmatch(base):
        raise UserInputError(
            f"the base of this adapter, {base}, is not on the hub, so others could not load it",
            where=WHERE,
            hint="add --merge-lora to upload the whole model",
        )


def push_folder(
    folder: Path, repo: str, *, private: bool, revision: str | None, message: str | None, timeout_seconds: float
) -> str:
    """Upload a model folder, and create its repository or branch first if necessary. Hidden files are left out.

    The token is that of `HF_TOKEN` or of `hf auth login`.

    Args:
        folder: folder to upload. Files of the repository with other names stay.
        repo: `OWNER/NAME`.
        private: create a private repository. An existing public one is refused.
        revision: branch. None is the default branch.
        message: message of the commit. None is a general one.
        timeout_seconds: deadline for the upload.

    Returns:
        Address of the repository.

    Raises:
        UserInputError: the token is missing or invalid or may not write there, the hub does not respond or is disabled
            by `HF_HUB_OFFLINE`, or others could not load the model.
        DeadlineError: a request or the upload exceeded its deadline.
        RlhfError: the hub rejected the upload.
    """
    from huggingface_hub import HfApi, constants

    check_ready(repo)
    check_publishable(folder)
    endpoint = constants.ENDPOINT
    api = HfApi(endpoint=endpoint)
    _call(api.whoami, f"{endpoint} to check the token", repo)
    _call(lambda: api.create_repo(repo, private=private or None, exist_ok=True), f"{endpoint} to create {repo}", repo)
    if private and not _call(lambda: api.model_info(repo).private, f"{endpoint} to describe {repo}", repo):
        raise UserInputError(
            f"{repo} exists and is public, so nothing was uploaded",
            where="--private",
            hint=f"make it private at {endpoint}/{repo}/settings, or choose another name",
        )
    if revision is not None:
        branch = revision
        _call(lambda: api.create_branch(repo, branch=branch, exist_ok=True), f"{endpoint} to create {branch}", repo)
    _call(
        lambda: _upload(api, folder, repo, revision, message or "Upload a model trained by rlhf"),
        f"the upload to {repo}",
        repo,
        timeout_seconds,
    )
    return f"{endpoint}/{repo}" + (f"/tree/{revision}" if revision is not None else "")


def _upload(api: HfApi, folder: Path, repo: str, revision: str | None, message: str) -> None:
    api.upload_folder(
        repo_id=repo, folder_path=folder, revision=revision, commit_message=message, ignore_patterns=list(_IGNORED)
    )


def _call(function: Callable[[], _Result], what: str, repo: str, deadline_seconds: float = _CALL_SECONDS) -> _Result:
    """Call a function of the hub's library in a thread, since the library's requests do not have a deadline."""
    results: list[_Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:  # raised below, in the thread of the caller
            failures.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    thread.join(deadline_seconds)
    if results:
        return results[0]
    if failures:
        raise _explained(failures[0], repo) from failures[0]
    raise DeadlineError(
        f"waited {deadline_seconds:g} s for {what}",
        where=WHERE,
        hint="repeat the command: files that are uploaded already are not sent again. --timeout sets the deadline of "
        "the upload",
    )


def _explained(error: BaseException, repo: str) -> BaseException:
    """Return the error to raise for an error of the hub's library."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    endpoint, owner = constants.ENDPOINT, repo.partition("/")[0]
    if isinstance(error, RlhfError | MemoryError):
        return error
    if isinstance(error, LocalTokenNotFoundError) or _status(error) == 401:
        return UserInputError(
            f"{endpoint} does not accept the token",
            where=WHERE,
            hint=f"create one at {endpoint}/settings/tokens, then type: hf auth login --force (HF_TOKEN, if set, has "
            "priority)",
        )
    if _status(error) in (403, 404):
        return UserInputError(
            f"the token may not write to {repo}: {_message(error)}",
            where=WHERE,
            hint=f"use a token with write access to {owner} ({endpoint}/settings/tokens), or your own name as OWNER",
        )
    if isinstance(error, ValueError) and not isinstance(error, HfHubHTTPError):
        hint = "correct it, and repeat the command"
        return UserInputError(redact_text(" ".join(str(error).split())), where=WHERE, hint=hint)
    if _status(error) is None and (isinstance(error, OSError) or _is_of_network(error)):
        return UserInputError(
            f"{endpoint} does not respond: {_message(error)}",
            where=WHERE,
            hint="check the network and HF_ENDPOINT, and repeat the command",
        )
    return RlhfError(
        f"{endpoint} rejected the request, or the upload failed: {_message(error)}",
        where=WHERE,
        hint="correct this and repeat the command: files that are uploaded already are not sent again",
    )


def _is_of_network(error: BaseException) -> bool:
    """Whether the HTTP library of the hub's library raised the error. It changed its library between versions."""
    return any(each.__module__.startswith("httpx") for each in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    response: Any = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def _message(error: BaseException) -> str:
    """Return the hub's own message, or the first line of the library's, without secrets."""
    return redact_text(str(getattr(error, "server_message", None) or first_line(error)))
