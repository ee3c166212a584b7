"""The builder's promises, and each chapter's student notebook with one exercise solved and the others left as stubs.

Both folders of notebooks are also executed cell by cell by nbval; see the Makefile.
"""

import ast
import re
import sys
import types

import nbformat
import pytest

from deepseek_lab.learn.chapters import chapters
from tools import notebooks

SOURCES = notebooks.sources([])
CHAPTER_00 = next(source for source in SOURCES if source.stem == "00_start_here")
MARK = "# %% exercise: deepseek_lab.parallel.data_parallel.global_token_mean"


# The chapters as they are


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_source_and_notebooks_agree(source):
    assert notebooks.drift(source) == []


def test_every_chapter_has_a_source_and_every_notebook_too():
    assert {chapter.name for chapter in chapters()} == {source.stem for source in SOURCES}
    assert notebooks.orphans() == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_student_notebook_is_unsolved(source):
    """Stubs only, no outputs: the student file is never already solved."""
    _, learner = notebooks.targets(source)
    cells = [cell for cell in nbformat.read(learner, as_version=4).cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    assert not any("nbval" in str(cell.metadata) or "NBVAL" in cell.source for cell in cells)
    stubs = [cell for cell in cells if cell.source.count("raise NotImplementedError(")]
    assert len(stubs) == sum("@exercise(" in cell.source for cell in cells)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_complete_notebook_stores_outputs_and_passes_all_checks(source):
    solution, _ = notebooks.targets(source)
    cells = nbformat.read(solution, as_version=4).cells
    assert any(output.get("data", {}).get("image/png") for cell in cells for output in cell.get("outputs", []))
    checks = [cell for cell in cells if cell.cell_type == "code" and cell.source.startswith("check(")]
    assert checks or not next(c for c in chapters() if c.name == source.stem).exercises
    for cell in checks:
        assert ": passed" in str(cell.outputs), cell.source


@pytest.mark.notebooks
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_one_solved_exercise_among_stubs(source):
    """A learner who has done the first exercise only: it passes, the others say "not yet", and no cell raises.

    From the third exercise on only the exercises and their checks are run; nbval runs all cells, without any solved.
    """
    cells = notebooks.read_chapter(source)
    notebook = notebooks.assemble(cells, full=False)
    tasks = [i for i, cell in enumerate(cells) if cell.full != cell.stub and "@exercise(" in cell.full]
    if not tasks:
        pytest.skip(f"{source.stem} has no exercise")
    notebook.cells[tasks[0]].source = cells[tasks[0]].full
    all_until = tasks[2] if len(tasks) > 2 else len(cells)
    notebook.cells = [
        cell for i, cell in enumerate(notebook.cells) if i < all_until or i in tasks or cell.source.startswith("check(")
    ]
    notebooks.execute(notebook, source.stem, strict=False)
    said = [_text(cell) for cell in notebook.cells if cell.source.startswith("check(")]
    assert len(said) == len(tasks)
    assert ": passed" in said[0]
    assert all(": not yet" in text for text in said[1:])


def _text(cell) -> str:
    return "".join(output.get("data", {}).get("text/plain", "") for output in cell.outputs)


# The builder on sources that are wrong


def refused(tmp_path, text: str) -> str:
    source = tmp_path / CHAPTER_00.name
    source.write_text(text)
    with pytest.raises(notebooks.Refused) as refusal:
        notebooks.read_chapter(source)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.replace(MARK, MARK + "x"), "is no exercise of chapter 00"),
        (lambda s: s.replace(MARK, "# %% exercises deepseek_lab.parallel"), "cannot read the marker"),
        (lambda s: s.replace(MARK, f"{MARK}\n\n{MARK}"), "stands there twice"),
        (lambda s: s.replace(MARK, f"{MARK}\nx = 1"), "must be empty"),
        (lambda s: s.replace(MARK, "# %%"), "no cell '# %% exercise:"),
        (lambda s: s.replace("check(global_token_mean)", "pass"), "has no cell with check(global_token_mean)"),
    ],
    ids=["unknown", "unreadable", "twice", "not empty", "missing", "unchecked"],
)
def test_a_wrong_source_is_refused(tmp_path, change, message):
    original = CHAPTER_00.read_text()
    assert change(original) != original
    assert message in refused(tmp_path, change(original))


def test_a_source_without_its_chapter_module_is_refused(tmp_path):
    stray = tmp_path / "77_nowhere.py"
    stray.write_text("# %%\n1\n")
    with pytest.raises(notebooks.Refused, match=r"no deepseek_lab/learn/chapters/c77_nowhere\.py"):
        notebooks.read_chapter(stray)


def test_a_drifted_notebook_is_noticed(tmp_path, monkeypatch):
    """A changed cell, a changed id, outputs of other code, a missing file: each is reported."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    for folder in ("solutions", "notebooks"):
        (tmp_path / folder).mkdir()
    source = tmp_path / "solutions" / CHAPTER_00.name
    source.write_text(CHAPTER_00.read_text())
    solution, learner = notebooks.targets(source)
    assert [line for line in notebooks.drift(source) if "missing" in line] == notebooks.drift(source)
    for copy in (solution, learner):
        copy.write_text((CHAPTER_00.parent.parent / copy.relative_to(tmp_path)).read_text())
    assert notebooks.drift(source) == []

    learner.write_text(learner.read_text().replace("# 00 · Start here", "# 00 · Start there"))
    assert "first in cell 0" in notebooks.drift(source)[0]
    source.write_text(CHAPTER_00.read_text().replace("rank * rank", "rank + rank"))
    assert any("outputs of other code" in line or "first in cell" in line for line in notebooks.drift(source))


def test_ids_come_from_the_content_and_are_unique():
    cells = notebooks.read_chapter(CHAPTER_00)
    again = notebooks.read_chapter(CHAPTER_00)
    assert [cell.id for cell in cells] == [cell.id for cell in again]
    assert len({cell.id for cell in cells}) == len(cells)
    assert all(re.fullmatch(r"[a-zA-Z0-9-_]{1,64}", cell.id) for cell in cells)


# The text of an exercise


EXAMPLE = '''
import torch
import torch.nn.functional as F
from torch import Tensor
from . import neighbour
from .neighbour import far as near

LIMIT = 3

def _private(x):
    return x

def answer(x: Tensor, limit=LIMIT):
    """What it does."""
    # why
    parts = [near(p) for p in F.relu(x)]
    def inner(q):
        return _private(q) + neighbour.one + len(parts)
    return inner(torch.stack(parts))
'''


def test_free_names_cover_body_annotations_defaults_and_inner_functions():
    source = EXAMPLE[EXAMPLE.index("def answer") :]
    assert notebooks.free_names(source) == {"Tensor", "LIMIT", "near", "F", "_private", "neighbour", "torch"}


def test_imports_are_those_of_the_module_made_absolute(monkeypatch):
    module = types.ModuleType("deepseek_lab.somewhere.example")
    module.__package__ = "deepseek_lab.somewhere"
    module.LIMIT, module._private = 3, print
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = notebooks.free_names(EXAMPLE[EXAMPLE.index("def answer") :])
    assert notebooks.imports_for(names, ast.parse(EXAMPLE), module, "deepseek_lab.somewhere.example.answer") == [
        "import torch",
        "import torch.nn.functional as F",
        "from deepseek_lab.somewhere import neighbour",
        "from deepseek_lab.somewhere.example import LIMIT, _private",
        "from deepseek_lab.somewhere.neighbour import far as near",
        "from torch import Tensor",
    ]
    with pytest.raises(notebooks.Refused, match="uses nowhere, which neither"):
        notebooks.imports_for({"nowhere"}, ast.parse(EXAMPLE), module, "the.path")


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_stub_and_solution_have_the_same_head(chapter):
    for task in chapter.exercises:
        full = notebooks.exercise_cell(task, (), full=True)
        stub = notebooks.exercise_cell(task, (), full=False)
        (whole,), (bare,) = (
            [n for n in ast.parse(s).body if isinstance(n, ast.FunctionDef | ast.ClassDef)] for s in (full, stub)
        )
        assert ast.get_docstring(whole) == ast.get_docstring(bare) is not None
        if isinstance(whole, ast.FunctionDef):
            assert ast.dump(whole.args) == ast.dump(bare.args)
            assert len(bare.body) == 2, "a docstring and a raise"
        assert f"Exercise {task.number}" in stub


def test_outputs_are_sanitised():
    data = {
        "text/plain": f"<object at 0x7f0123456789> {notebooks.ROOT}/notebooks/x.py {notebooks.Path.home()}/y",
        "application/vnd.jupyter.widget-view+json": {"model_id": "abc"},
    }
    output = nbformat.from_dict({"output_type": "display_data", "data": data, "metadata": {}})
    assert notebooks.sanitised(output).data == {"text/plain": "<object at 0x…> notebooks/x.py ~/y"}
