from .records import RecordRules as RecordRules
from .stream import PromptEncoder as PromptEncoder
from .stream import PromptStream as PromptStream
