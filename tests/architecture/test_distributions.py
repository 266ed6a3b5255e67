"""What each distribution holds, depends on and installs."""

import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import pytest
from hatchling.build import build_wheel
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from running import PATIENCE_SECONDS

from rlhf_core.plugins.names import KNOWN

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [
    ROOT,
    *(path.parent for kind in ("libraries/*", "plugins/*/*") for path in sorted(ROOT.glob(f"{kind}/pyproject.toml"))),
    ROOT / "start",
]


def manifest(folder: Path) -> dict[str, Any]:
    with (folder / "pyproject.toml").open("rb") as stream:
        return tomllib.load(stream)


def import_package(name: str) -> str:
    return name.replace("-", "_")


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name if folder != ROOT else "core")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A folder and the names of the files in the wheel built from it."""
    folder: Path = request.param
    target = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        path = target / build_wheel(str(target))  # as pip calls it, without a process for each distribution
    with zipfile.ZipFile(path) as archive:
        return folder, set(archive.namelist())


def test_wheel_holds_its_packages_and_nothing_else(wheel: tuple[Path, set[str]]) -> None:
    folder, names = wheel
    packages = {"rlhf_core", "rlhf_cli"} if folder == ROOT else {import_package(manifest(folder)["project"]["name"])}
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == packages
    for package in packages:
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names
    assert not [name for name in names if re.search(r"(^|/)(tests?|conftest\.py|__pycache__)(/|$)", name)]


def test_wheel_holds_every_file_of_its_packages(wheel: tuple[Path, set[str]]) -> None:
    folder, names = wheel
    sources = [ROOT / "rlhf_core", ROOT / "cli" / "rlhf_cli"] if folder == ROOT else [folder / "src"]
    for source in sources:
        base = source if source.name == "src" else source.parent
        files = {
            path.relative_to(base).as_posix()
            for path in source.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert files <= names


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name if folder != ROOT else "core")
def test_distribution_is_well_formed(folder: Path) -> None:
    project = manifest(folder)["project"]
    assert project["version"] == manifest(ROOT)["project"]["version"], "versions go in lock-step"
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert (folder / project["readme"]).read_text(encoding="utf-8").strip()
    assert version(project["name"]) == project["version"], "run `make setup`: the installed version is another"
    if folder != ROOT:
        package = import_package(project["name"])
        assert f"rlhf-core=={project['version']}" in project["dependencies"]
        assert (folder / "src" / package / "__init__.py").is_file()
        assert "scripts" not in project


def test_every_manifest_has_the_version_of_the_file_version() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "release" / "version.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_only_script_is_rlhf() -> None:
    names = {manifest(folder)["project"]["name"] for folder in FOLDERS}
    scripts = {
        (entry.name, entry.value)
        for installed in distributions()
        if installed.metadata["Name"] in names
        for entry in installed.entry_points
        if entry.group in {"console_scripts", "gui_scripts"}
    }
    assert scripts == {("rlhf", "rlhf_cli.main:main")}


def test_all_names_every_plugin() -> None:
    project = manifest(ROOT)["project"]
    plugins = {f"{manifest(folder)['project']['name']}=={project['version']}" for folder in FOLDERS[1:-1]}
    listed = project["optional-dependencies"]["all"]
    named = {re.sub(r"\[.*?\]", "", item) for item in listed if not item.startswith("rlhf-core[")}
    assert named == plugins


def test_no_page_tells_to_install_what_is_not_ours() -> None:
    """The name `rlhf` on the package index belongs to somebody else."""
    pages = [path for glob in ("*.md", "docs/**/*.md", "*/*/README.md", "*/*/*/README.md") for path in ROOT.glob(glob)]
    wrong = [
        path for path in pages if re.search(r"pip install (?:\S+ )*rlhf(?![\w-])", path.read_text(encoding="utf-8"))
    ]
    assert len(pages) > 50 and not wrong


def test_the_workspace_has_every_distribution() -> None:
    sources = manifest(ROOT)["tool"]["uv"]["sources"]
    assert sources == {manifest(folder)["project"]["name"]: {"workspace": True} for folder in FOLDERS}


def test_the_lock_has_each_dependency_within_its_range() -> None:
    """A changed manifest needs `python release/lock.py`, which needs uv."""
    locks = [ROOT / "requirements" / name for name in ("lock.txt", "extras.txt", "clients.txt")]
    pins = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", "".join(path.read_text() for path in locks), flags=re.M))
    pins |= dict(each.split("==") for each in manifest(ROOT)["tool"]["uv"]["constraint-dependencies"])
    wrong = []
    for folder in FOLDERS:
        project = manifest(folder)["project"]
        extras = itertools.chain.from_iterable(project.get("optional-dependencies", {}).values())
        for each in map(Requirement, (*project["dependencies"], *extras)):
            pin = pins.get(canonicalize_name(each.name))
            if not each.name.startswith("rlhf-") and (pin is None or not each.specifier.contains(pin)):
                wrong.append(f"{project['name']} needs {each}, and the lock has {pin}: python release/lock.py")
    assert not wrong, "\n".join(wrong)


def test_what_is_installed_is_pinned_with_hashes() -> None:
    files = sorted((ROOT / "requirements").iterdir())
    assert len(files) < 5
    for path in files:
        pins = re.split(r"\n(?=\S)", path.read_text(encoding="utf-8").strip())
        unhashed = [
            pin for pin in pins if not re.match(r"[a-z0-9-]+==\S+( ; .*)? \\\n +--hash=sha256:[0-9a-f]{64}", pin)
        ]
        assert pins and not unhashed, path


def test_every_entry_point_names_a_file_that_is_there() -> None:
    missing = []
    for folder in FOLDERS:
        roots = [ROOT, ROOT / "cli"] if folder == ROOT else [folder / "src"]
        for group, entries in manifest(folder)["project"].get("entry-points", {}).items():
            for name, target in entries.items():
                module = target.partition(":")[0].replace(".", "/")
                if not any((root / f"{module}.py").is_file() or (root / module).is_dir() for root in roots):
                    missing.append(f"{group} {name} = {target}")
    assert not missing


def test_what_is_not_installed_is_told_where_to_get() -> None:
    """`KNOWN` has every plugin of the project."""
    missing = [
        f"{group}: {name}"
        for folder in FOLDERS
        for group, entries in manifest(folder)["project"].get("entry-points", {}).items()
        for name in entries
        if KNOWN.get(group.removeprefix("rlhf."), {}).get(name) != manifest(folder)["project"]["name"]
        and group.startswith("rlhf.")
    ]
    assert not missing
