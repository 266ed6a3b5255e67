from .known import known_line as known_line
from .known import known_sample as known_sample
from .known import known_values as known_values
from .sample_card import sample_card_script as sample_card_script
