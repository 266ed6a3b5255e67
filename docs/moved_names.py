"""The page docs/reference/moved-names.md, from `rlhf_core/plugins/moved.json`."""

from __future__ import annotations

from collections import defaultdict

from rlhf_core.plugins.names import moved_names


def moved_names_page(note: str) -> str:
    """Return the page with a row for each moved module, or for the names that moved out of one."""
    modules = {old: new for old, new in moved_names().items() if old.rpartition(".")[2].islower()}
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for old, new in moved_names().items():
        module, _, name = old.rpartition(".")
        if old not in modules and modules.get(module) != new.rpartition(".")[0]:
            new_module, _, new_name = new.rpartition(".")
            names[module, new_module].append(f"`{name}`" if new_name == name else f"`{name}` (`{new_name}`)")
    rows = [f"| `{old}` | | `{new}` |" for old, new in modules.items()]
    rows += [f"| `{old}` | {', '.join(moved)} | `{new}` |" for (old, new), moved in names.items()]
    intro = (
        "A plugin that imports an old name gets an error that contains the new one. If the second column is empty, the "
        "first one is a function or an entire module. [upgrading.md](../upgrading.md) describes the steps."
    )
    table = "\n".join(["| in core | names | now in |", "| --- | --- | --- |", *sorted(rows)])
    return "\n\n".join(["# Moved names", note, intro, table]) + "\n"
