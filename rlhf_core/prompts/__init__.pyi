from .records import RecordRules as RecordRules
from .records import Records as Records
from .stream import PromptEncoder as PromptEncoder
from .stream import PromptStream as PromptStream
