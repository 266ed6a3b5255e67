from .stream import PromptEncoder as PromptEncoder
from .stream import PromptStream as PromptStream
