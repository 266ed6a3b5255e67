"""Pictures of digits: a task with one right answer that `builtin:tiny-vision` learns in minutes on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.components import TaskContext
from rlhf_core.protocols import PromptSource
from rlhf_core.util import derive_seed
from rlhf_images import ImageLimits, ImageReader, read_images

from .config import DrawnDigitsConfig

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

SIZE = 32
_SCALE = 3
_FONT = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""Seven rows of five pixels for each digit."""


class DrawnDigits:
    """Problem i is a picture of a digit, and the question which one it is.

    Example:
        >>> record = DrawnDigits(DrawnDigitsConfig(size=3))[0]
        >>> record["prompt"][0]["content"].startswith("Which digit?"), record["images"][0]["width"]
        (True, 32)
    """

    def __init__(self, config: DrawnDigitsConfig) -> None:
        self.config = config
        self._reader = ImageReader(ImageLimits(), Path())

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self.config.size:
            raise IndexError(index)
        answer = str(self.digit(index))
        drawn = derive_seed(index, "drawn-digits", "shuffled") % 10 if self.config.shuffled else int(answer)
        image = {"type": "image", "image": self.draw(index, drawn)}
        content = [{"type": "text", "text": "Which digit?"}, image]
        prompt = [{"role": "user", "content": content}]
        record = {
            "prompt": prompt,
            "answer": answer,
            "completion": self._read(index, int(answer)),
            "chosen": answer,
            "rejected": str((int(answer) + 1) % 10),
        }
        return read_images(record, self._reader)

    def describe(self, index: int) -> str:
        return f"drawn-digits problem {index}"

    def digit(self, index: int) -> int:
        """Return the digit that is the answer of a problem."""
        return derive_seed(self.config.picture_seed, "drawn-digits", "digit", index) % 10

    def _read(self, index: int, digit: int) -> str:
        """Return the reading of the teacher."""
        draw = derive_seed(self.config.picture_seed, "drawn-digits", "read", index) % 1000 / 1000
        return str((digit + 1) % 10 if digit > 2 and draw < self.config.misread else digit)

    def draw(self, index: int, digit: int) -> Image:
        """Return a gray picture of a digit, with the brightness, place and noise of a problem."""
        import numpy as np
        from PIL import Image

        random = np.random.default_rng(derive_seed(self.config.picture_seed, "drawn-digits", "picture", index))
        glyph, picture = _glyph(digit), np.zeros((SIZE, SIZE))
        top, left = (
            (SIZE - side) // 2 + random.integers(-self.config.shift, self.config.shift + 1) for side in glyph.shape
        )
        picture[top : top + glyph.shape[0], left : left + glyph.shape[1]] = glyph
        dark, bright = random.uniform(0, 0.35), random.uniform(0.65, 1)
        picture = dark + (bright - dark) * picture + random.normal(0, self.config.noise, picture.shape)
        return Image.fromarray((picture.clip(0, 1) * 255).round().astype(np.uint8), "L")


@cache
def _glyph(digit: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    import numpy as np

    rows = [[float(pixel) for pixel in row] for row in _FONT[digit].split()]
    return np.kron(np.array(rows), np.ones((_SCALE, _SCALE)))


def build(config: DrawnDigitsConfig, context: TaskContext) -> PromptSource:
    """Build the prompt source `drawn-digits`."""
    return DrawnDigits(config)
