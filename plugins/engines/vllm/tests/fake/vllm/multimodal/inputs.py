"""How vLLM divides arguments of a forward pass by images, with the signatures of vLLM 0.32."""

from dataclasses import dataclass
from itertools import accumulate


@dataclass
class PlaceholderRange:
    offset: int
    length: int
    is_embed: object = None


class MultiModalFieldConfig:
    def __init__(self, parts):
        self.parts = parts

    @staticmethod
    def flat_from_sizes(modality, size_per_item):
        ends = list(accumulate(size_per_item.tolist()))
        return MultiModalFieldConfig([slice(start, end) for start, end in zip([0, *ends], ends, strict=False)])

    @staticmethod
    def batched(modality, *, keep_on_cpu=False):
        return MultiModalFieldConfig(None)


class MultiModalKwargsItems(dict):
    """`image` -> for each image, argument -> its part."""

    @staticmethod
    def from_hf_inputs(hf_inputs, config_by_key):
        count = len(next(each.parts for each in config_by_key.values() if each.parts))
        return MultiModalKwargsItems(
            image=[
                {
                    name: hf_inputs[name][config.parts[number] if config.parts else number]
                    for name, config in config_by_key.items()
                }
                for number in range(count)
            ]
        )
