"""Settings of Sphinx for docs/build_site.py."""

from pathlib import Path

project = "rlhf"
release = version = (Path(__file__).resolve().parents[1] / "VERSION").read_text(encoding="utf-8").strip()
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"rlhf {release}"
html_copy_source = False
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.xref_ambiguous"]
