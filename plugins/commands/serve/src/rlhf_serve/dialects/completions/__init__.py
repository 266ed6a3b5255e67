"""OpenAI's chat completions and completions."""

from ...wire import Dialect
from ..openai import error_body, models_body
from .requests import ChatBody, TextBody

DIALECT = Dialect(
    requests={"/v1/chat/completions": ChatBody, "/v1/completions": TextBody},
    error_body=error_body,
    models_body=models_body,
)
