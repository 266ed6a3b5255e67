"""OpenAI's Responses."""

from ...wire import Dialect
from ..openai import error_body, models_body
from .requests import CountBody, ResponsesBody

DIALECT = Dialect(
    requests={"/v1/responses": ResponsesBody, "/v1/responses/input_tokens": CountBody},
    error_body=error_body,
    models_body=models_body,
)
