"""The dialects of the server. To add one, add a package with a `Dialect` to `DIALECTS`."""

from collections.abc import Mapping

from ..wire import Dialect
from . import completions, messages, responses

DIALECTS: tuple[Dialect, ...] = (completions.DIALECT, messages.DIALECT, responses.DIALECT)


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Return the dialect of a request. Without a sign of another one, it is OpenAI's.

    Args:
        path: Path of the request, which need not exist.
        headers: Headers of the request.
    """
    by_path = (each for each in DIALECTS if path in each.requests)
    by_header = (each for each in DIALECTS if each.version_header is not None and each.version_header in headers)
    return next(by_path, None) or next(by_header, completions.DIALECT)
