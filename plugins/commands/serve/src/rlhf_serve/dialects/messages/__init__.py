"""Anthropic's Messages."""

from ...wire import Dialect
from .replies import error_body, models_body
from .requests import CountBody, MessagesBody

DIALECT = Dialect(
    requests={"/v1/messages": MessagesBody, "/v1/messages/count_tokens": CountBody},
    error_body=error_body,
    models_body=models_body,
    version_header="anthropic-version",
)
