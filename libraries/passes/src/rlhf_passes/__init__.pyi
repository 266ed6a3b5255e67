from .chunked import VocabularyPart as VocabularyPart
from .fast_linear import IS_FASTER_HERE as IS_FASTER_HERE
from .fast_linear import MIN_MULTIPLICATIONS as MIN_MULTIPLICATIONS
from .fast_linear import linear_product as linear_product
from .packing import Packing as Packing
from .packing import takes_packed_rows as takes_packed_rows
from .vocabulary_gradients import direct_gradients as direct_gradients
