"""A student: a model's folder with some of its layers left out.

    .venv/bin/python recipes/distill-layers/make_student.py

The first and last layers stay: they turn tokens into what the others work on, and back.
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
    """Indices of the layers that stay, where one in `every` goes between the first and the last `ends`."""
    return [i for i in range(layers) if not (ends <= i < layers - ends and (i - ends) % every == every // 2)]


def write_student(model: Path, folder: Path, every: int, ends: int) -> tuple[int, int]:
    """Write the smaller model with the tokenizer of the larger; returns the layers of both."""
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
    """Read the arguments and write the folder; exit code 2 where there is no model to take."""
    parser = argparse.ArgumentParser(description="Write a model's folder with some of its layers left out.")
    parser.add_argument("model", nargs="?", type=Path, default=MODEL, metavar="DIR", help="the whole model's folder")
    parser.add_argument("--to", type=Path, default=STUDENT, metavar="DIR", help=f"where to; by default {STUDENT}")
    parser.add_argument("--every", type=int, default=3, help="one layer in so many goes")
    parser.add_argument("--ends", type=int, default=3, help="first and last layers that stay")
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
