"""Creates a student: a model folder without some of its layers.

    .venv/bin/python recipes/distill-layers/make_student.py

The first and last layers stay, since they convert from and to tokens.
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
    """Return the indices of the layers to keep. One in `every` between the first and the last `ends` is dropped."""
    return [i for i in range(layers) if not (ends <= i < layers - ends and (i - ends) % every == every // 2)]


def write_student(model: Path, folder: Path, every: int, ends: int) -> tuple[int, int]:
    """Write the smaller model with the tokenizer of the larger one. Return the numbers of layers of both."""
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
    made = {"model": str(model), "kept layers": kept, "parameters": policy.num_parameters()}
    (folder / "student.json").write_text(json.dumps(made) + "\n", encoding="utf-8")
    return len(layers), len(kept)


def main() -> None:
    """Write the folder. Exit code 2 if the source model does not exist."""
    parser = argparse.ArgumentParser(description="Write a model folder without some of its layers.")
    parser.add_argument("model", nargs="?", type=Path, default=MODEL, metavar="DIR", help="folder of the whole model")
    parser.add_argument("--to", type=Path, default=STUDENT, metavar="DIR", help=f"target folder, by default {STUDENT}")
    parser.add_argument("--every", type=int, default=3, help="drop one layer in this many")
    parser.add_argument("--ends", type=int, default=3, help="number of first and of last layers that stay")
    given = parser.parse_args()
    if given.every < 2 or given.ends < 0:
        parser.error("--every is 2 or more, --ends 0 or more")
    if not (given.model / "config.json").is_file():
        print(f"make_student.py: no model in {given.model}: python recipes/smollm2/fetch.py", file=sys.stderr)
        sys.exit(2)
    whole, kept = write_student(given.model, given.to, given.every, given.ends)
    print(f"wrote {given.to}: {kept} of {whole} layers")


if __name__ == "__main__":
    main()
