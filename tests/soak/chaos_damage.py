"""What happens to a folder while no session goes on in it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from chaos_chain import DONE, Chain, Missed
from chaos_placement import ELSEWHERE
from chaos_session import Session, Wrong

_GARBAGE = (b"", b"\x00" * 64, b"{", b"[1, 2]", b'{"a": 1}', b"null", b"\xff\xfe\x00garbage")


def _spoil(path: Path, chance: random.Random) -> str:
    """Change a file as a bad disk, an editor or a half copy does."""
    content = path.read_bytes()
    how = chance.choice(["a flipped bit", "cut", "empty", "removed"] if content else ["removed"])
    if how == "removed":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[: chance.randrange(len(content))])
    else:
        place = chance.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :])
    return f"{path.name} {how}"


def _refused(chain: Chain, named: str, *allowed: tuple[int, str]) -> None:
    """A session that must not go on, and says why."""
    session = chain.start()
    chain.end(*allowed)
    if named not in session.error:
        raise Wrong(f"refused without a word of {named}: {session.error}")


def damaged_checkpoint(chain: Chain) -> str:
    """The newest; the one before is taken, or, where there is none, the resume is refused until it is whole again."""
    steps = chain.whole()
    if not steps:
        raise Missed
    newest = chain.folder / f"checkpoints/step-{steps[-1]}"
    kept = chain.root / "kept"
    shutil.copytree(newest, kept)
    said = _spoil(chain.chance.choice([path for path in sorted(newest.rglob("*")) if path.is_file()]), chain.chance)
    if len(steps) > 1:
        chain.damaged.add(steps[-1])
        chain.falls_back(steps[-2])
        chain.is_done = False
        session = chain.start()
        if not session.wait_for(session.has_begun, "its summary"):
            chain.end(DONE)
    else:
        chain.damaged.add(steps[-1])
        _refused(chain, "no checkpoint", (2, "before"))
        shutil.rmtree(newest)
        shutil.copytree(kept, newest)
        chain.damaged.discard(steps[-1])
        said += ", the only one"
    shutil.rmtree(kept)
    return said


def damaged_pointer(chain: Chain) -> str:
    last = chain.folder / "checkpoints/last"
    if not last.exists():
        raise Missed
    return _spoil(last, chain.chance)


def torn_lines(chain: Chain) -> str:
    """Half a line behind the last ones."""
    torn = []
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = chain.folder / name
        if path.exists() and chain.chance.random() < 0.7:
            content = path.read_bytes()
            half = chain.chance.choice([content[: chain.chance.randrange(1, 60)].split(b"\n")[0], b"\x00" * 40, b"{"])
            path.write_bytes(content + half)
            torn.append(name)
    if not torn:
        raise Missed
    return ", ".join(torn)


def removed_lines(chain: Chain) -> str:
    """Of those that the checkpoint counts: the resume is refused until they are back."""
    steps = chain.whole()
    if not steps:
        raise Missed
    name, number = chain.chance.choice([("metrics.jsonl", steps[0]), ("samples.jsonl", steps[0] * 4)])
    path = chain.folder / name
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    first = chain.chance.randrange(number)
    few = chain.chance.randint(1, 3)
    path.write_bytes(b"".join(lines[:first] + lines[first + few :]))
    session = chain.start()
    try:
        session.end((1, "failed"))
    finally:
        chain.session = None
        path.write_bytes(content)
    if name not in session.error:
        raise Wrong(f"refused without a word of {name}: {session.error}")
    chain.is_done = False
    return f"{few} lines of {name}"


def broken_record(chain: Chain) -> str:
    """A file about the run: the resume goes on, or names it and is refused until it is whole again."""
    path = chain.folder / chain.chance.choice(["summary.json", "manifest.json", "config.yaml"])
    if not path.exists():
        raise Missed
    content = path.read_bytes()
    if chain.chance.random() < 0.3:
        path.write_bytes(chain.chance.choice(_GARBAGE))
        said = f"{path.name} other"
    else:
        said = _spoil(path, chain.chance)
    spoilt = _content(path)
    chain.is_done = False
    # An option that was changed by a flipped bit is another option, so that the run file has to say what is meant.
    session = chain.start(with_run_file=path.name == "config.yaml" and "other" not in said)
    if not session.wait_for(session.has_begun, "its summary") and session.process.returncode in (1, 2):
        session.end(*((code, status) for code in (1, 2) for status in ("before", "failed")))
        chain.session = None
        # What a config lacks is told by option.
        named = (path.name, "--trust", f"{chain.folder}: a resume keeps", f"config of {chain.folder}")
        if not any(each in session.error for each in named):
            raise Wrong(f"refused without a word of {path.name}: {session.error}")
        path.write_bytes(content)
        said += ": refused"
    elif not session.is_over and not session.wait_for(lambda: _content(path) not in (spoilt, b""), "its own record"):
        chain.end(DONE)
    return said


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def left_overs(chain: Chain) -> str:
    """What a session that was killed leaves half done."""
    half = chain.folder / "checkpoints/.partial-step-99"
    half.mkdir(parents=True, exist_ok=True)
    (half / "state.json").write_text("{")
    (chain.folder / ".summary.json.tmp").write_text("{")
    (chain.folder / "control").mkdir(exist_ok=True)
    (chain.folder / "control" / "00000000000000000001-1.json").write_bytes(chain.chance.choice(_GARBAGE))
    return ""


def two_drivers_at_once(chain: Chain) -> str:
    """One goes on, the other is refused; or comes when the first is done, which changes nothing."""
    other = chain.root / "other"
    other.mkdir(exist_ok=True)
    first = chain.start()
    second = Session(other, chain.folder, chain.placement, *chain.flags())
    try:
        codes = [each.end(DONE, *((2, status) for status in _ANY))[0] for each in (second, first)]
        for each in (first, second):
            if each.process.returncode == 2 and "another process" not in each.error:
                raise Wrong(f"the loser was refused by {each.error}")
    finally:
        second.kill()
    if 0 not in codes:
        raise Wrong("neither of two drivers went on")
    chain.session = None
    chain.check_done()
    return f"{sorted(codes)}"


_ANY = ("before", "running", "done", "failed", "interrupted")


def elsewhere(chain: Chain) -> str:
    """Another strategy, number of processes or transport takes over."""
    if chain.is_done or chain.placement.name != chain.base:
        raise Missed
    chain.moved(chain.chance.choice(ELSEWHERE[chain.base]))
    chain.start()
    return chain.placement.name
