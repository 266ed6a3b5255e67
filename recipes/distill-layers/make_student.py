"""Create a student: a model with some of its layers removed.

    .venv/bin/python recipes/distill-layers/make_student.py

The first and last layers are kept, because they convert tokens to the internal representation and back.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = HERE.parent / "smollm2" / "model"
STUDENT = HERE / "student"


def kept_layers(layers: int, every: int, ends: int) -> list[int]:
    """Indices of the layers to keep. One in `every` is removed between the first and the last `ends`."""
    return [i for i in range(layers) if not (ends <= i < layers - ends and (i - ends) % every == every // 2)]


def write_student(model: Path, folder: Path, every: int, ends: int) -> tuple[int, int]:
    """Write the smaller model with the tokenizer of the larger. Return the numbers of layers of both."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(model)
    layers = policy.model.layers
    kept = kept_layers(len(layers), every, ends)
    policy.model.layers = torch.nn.ModuleList(layers[index] for index in kept)
    policy.config.num_hidden_layers = len(kept)
    if getattr(policy.config, "layer_types", None):
        policy.config.layer_types = [policy.config.layer_types[index] for index in kept]
    policy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    record = {"model": str(model), "kept layers": kept, "parameters": policy.num_parameters()}
    (folder / "student.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    return len(layers), len(kept)


def main() -> None:
    """Parse the arguments and write the folder. Exit code 2 if the model is missing."""
    parser = argparse.ArgumentParser(description="Write a model folder with some of its layers removed.")
    parser.add_argument("model", nargs="?", type=Path, default=MODEL, metavar="DIR", help="folder of the whole model")
    parser.add_argument("--to", type=Path, default=STUDENT, metavar="DIR", help=f"output folder, by default {STUDENT}")
    parser.add_argument("--every", type=int, default=3, help="remove one layer in this many")
    parser.add_argument("--ends", type=int, default=3, help="number of first and of last layers to keep")
    options = parser.parse_args()
    if options.every < 2 or options.ends < 0:
        parser.error("--every must be at least 2, --ends at least 0")
    if not (options.model / "config.json").is_file():
        print(f"make_student.py: no model in {options.model}: run python recipes/smollm2/fetch.py", file=sys.stderr)
        sys.exit(2)
    whole, kept = write_student(options.model, options.to, options.every, options.ends)
    print(f"wrote {options.to}: {kept} of {whole} layers")


if __name__ == "__main__":
    main()
