from .chunked import VocabularyPart as VocabularyPart
from .packing import Packing as Packing
from .packing import takes_packed_rows as takes_packed_rows
from .vocabulary_gradients import direct_gradients as direct_gradients
