"""Errors of requests, as clients receive them."""

from __future__ import annotations

import logging

from rlhf_core.errors import RlhfError

from .store import JSON_RESULT, Store, StoredRequest, failure
from .wire import InvalidRequest

logger = logging.getLogger("rlhf.serve_training")


def is_known(error: Exception) -> bool:
    """Whether an error is foreseen, so that the same request fails in the same way again."""
    return isinstance(error, InvalidRequest | RlhfError)


def fail(store: Store, request: StoredRequest, error: Exception, *, keep_body: bool = False) -> None:
    """Store an error as the result of a request. An unforeseen one is logged, and its text is not sent to the client.

    Args:
        store: the journal.
        request: the request.
        error: the error.
        keep_body: whether the request is carried out again when its model is restored.
    """
    if not is_known(error):
        logger.error("the request %s failed", request.id, exc_info=error)
    result = failure(_message(error), "user" if is_known(error) else "server")
    store.finish(request.id, result, JSON_RESULT, failed=True, keep_body=keep_body)


def _message(error: Exception) -> str:
    if not isinstance(error, RlhfError):
        return str(error) if isinstance(error, InvalidRequest) else f"the server failed ({type(error).__name__})"
    hint = f" ({error.hint})" if error.hint else ""
    return f"{error.message}{hint}"
