"""The table of moved names in docs/upgrading.md, from `rlhf_core/plugins/moved.json`."""

from __future__ import annotations

from collections import defaultdict

from rlhf_core.plugins.names import moved_names

BEGIN = "<!-- The table of moved names is written by docs/generate_reference.py. -->"
END = "<!-- End of the table. -->"


def moved_table() -> str:
    """Rows of old module, names (empty: the whole module), and new module."""
    modules = {old: new for old, new in moved_names().items() if old.rpartition(".")[2].islower()}
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for old, new in moved_names().items():
        module, _, name = old.rpartition(".")
        if old not in modules and modules.get(module) != new.rpartition(".")[0]:
            room, _, now = new.rpartition(".")
            names[module, room].append(f"`{name}`" if now == name else f"`{name}` (`{now}`)")
    rows = [f"| `{old}` | | `{new}` |" for old, new in modules.items()]
    rows += [f"| `{old}` | {', '.join(found)} | `{new}` |" for (old, new), found in names.items()]
    return "\n".join(["| in core | names | now in |", "| --- | --- | --- |", *sorted(rows)])


def with_moved_table(page: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{moved_table()}\n\n{END}{after}"
