"""`rlhf export`: writes the policy of a run or checkpoint as a plain model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .model import Dtype


@click.command("export")
@click.argument("source", metavar="RUN|CHECKPOINT", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--to", "target", metavar="DIR", required=True, type=click.Path(path_type=Path), help="The new model folder."
)
@click.option("--merge-lora", is_flag=True, help="For a LoRA run, write the whole model, not only its adapter.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the stored weights.  [default: as they were trained]",
)
def export(source: Path, target: Path, merge_lora: bool, dtype: Dtype | None) -> None:
    """Write the policy of a run's newest checkpoint, or of the given one, as a folder that transformers loads.

    The folder includes the tokenizer. Checkpoints of all strategies are supported. A run that was finished or stopped
    already has its model in model/.

    \b
    Examples:
      rlhf export runs/first --to my-model
      rlhf export runs/first/checkpoints/step-200 --to my-model --dtype bfloat16
      rlhf export runs/lora --to my-model --merge-lora
    """
    from rlhf_core.util import printable

    from .model import export_model

    checkpoint = export_model(source, target, merge_lora=merge_lora, dtype=dtype)
    click.echo(printable(f"{target}: the policy of {checkpoint}"))
