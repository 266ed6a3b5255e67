"""The plugins of this project by name, for telling a user what to install."""

from __future__ import annotations

import json
from pathlib import Path

KNOWN: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Kind -> name -> the distribution that brings it."""
