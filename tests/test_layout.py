"""How the package is laid out: who may import whom, and that what is written in several places agrees."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "deepseek_lab"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# What each room may import besides itself.  `slots` is free to all.
GROUND = {"slots", "model", "data", "plan", "viz"}
MAY_IMPORT = {
    "slots": set(),
    "model": set(),
    "data": set(),
    "plan": {"model", "data"},
    "viz": {"model", "data", "plan"},
    "parallel": GROUND,
    "train": GROUND | {"parallel"},
    "align": GROUND | {"parallel", "train"},
    "learn": GROUND | {"parallel", "train", "align"},
}


def room(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(file: Path) -> set[str]:
    """Absolute names of everything that a source file imports, also inside functions."""
    package = ["deepseek_lab", *file.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names} | {origin}
    return names


ROOMED = [file for file in SOURCES if room(file) in MAY_IMPORT]


@pytest.mark.parametrize("file", ROOMED, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_run_one_way(file):
    rooms = {name.split(".")[1] for name in imported_modules(file) if name.startswith("deepseek_lab.")}
    known = (rooms & set(MAY_IMPORT)) - {room(file), "slots"}
    assert known <= MAY_IMPORT[room(file)], f"{file.relative_to(ROOT)} must not import {known - MAY_IMPORT[room(file)]}"


@pytest.mark.parametrize("file", [f for f in SOURCES if room(f) == "plan"], ids=lambda f: f.name)
def test_plan_is_paper_and_pencil(file):
    assert not [name for name in imported_modules(file) if name.startswith("torch.distributed")]


def test_every_room_has_a_place_in_the_order():
    rooms = {room(f) for f in SOURCES} - {"__init__", "__main__", "doctor"}
    assert rooms <= set(MAY_IMPORT), f"add {rooms - set(MAY_IMPORT)} to the order of imports"


def test_ranks_start_light():
    """Every rank imports the chapters' graders: drawing and JupyterLab's widgets must not come along."""
    code = "import sys, deepseek_lab.learn.chapters as c; c.chapters(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"matplotlib", "matplotlib.pyplot", "ipywidgets", "transformers", "accelerate", "torch._dynamo"}
    assert not heavy & set(loaded), "import these inside the function that needs them, or keep drawings in viz/"


# Written twice


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_conda_and_pip_ask_for_the_same_versions():
    project = pyproject()
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["test"], *extras["hf"]}
    wanted.add(f"python{project['requires-python']}")
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (by_pip,) = [entry["pip"] for entry in listed if isinstance(entry, dict)]
    have = {entry for entry in [*listed, *by_pip] if isinstance(entry, str)} - {"pip", "-e ."}
    assert {re.sub(r"^pytorch(?=[<>=])", "torch", entry) for entry in have} == wanted


def test_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_nothing_points_to_one_machine():
    """Text files and stored outputs carry no path of the machine that made them."""
    places = [r"\.\./" + r"shared\b", r"/home/\w", r"/Users/\w", "/root" + "/", re.escape(f"{ROOT}/")]
    suspicious = re.compile("|".join(places))
    found = []
    for file in tracked_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{file.relative_to(ROOT)}: {hit[0]}" for hit in [suspicious.search(text)] if hit]
    assert not found


def test_large_files_are_few():
    """A clone stays quick: nothing above 8 MiB, and less than 40 MiB in all."""
    sizes = {file.relative_to(ROOT): file.stat().st_size for file in tracked_files()}
    assert max(sizes.values()) < 8 * 2**20, max(sizes, key=sizes.__getitem__)
    assert sum(sizes.values()) < 40 * 2**20


def test_every_exercise_slot_is_called_through_its_module():
    """`from module import exercise_function` would keep the package's own function when a learner fills the slot."""
    from deepseek_lab.learn.chapters import exercises

    paths = {task.path for task in exercises()}
    found = []
    for file in SOURCES:
        if file.name == "__init__.py" or room(file) == "learn":
            continue
        found += [f"{file.relative_to(ROOT)} imports {name}" for name in imported_modules(file) & paths]
    assert not found
