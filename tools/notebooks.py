"""Build the course's notebooks from `solutions/NN_topic.py` (percent format).

    python tools/notebooks.py build [NN ...]    write both notebooks of each chapter; execute only what changed
    python tools/notebooks.py check [NN ...]    say what `build` would change, and fail if that is anything
    python tools/notebooks.py run   [NN ...]    build, and execute the solutions even if nothing changed

One source gives two notebooks: `solutions/NN_topic.ipynb`, complete and executed, and `notebooks/NN_topic.ipynb`, in
which the body of every exercise is replaced by a stub.  An exercise stands in the source as an empty cell

    # %% exercise: deepseek_lab.model.norm.rms_norm

and its text is read from the package, so that solution and package cannot drift apart.  Cell ids are derived from the
source, outputs are kept as long as the code is the same, and so building twice changes nothing.
"""

import argparse
import ast
import builtins
import hashlib
import importlib
import inspect
import os
import re
import symtable
import sys
import tempfile
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from deepseek_lab import slots
from deepseek_lab.learn.chapters import Chapter, chapters
from deepseek_lab.learn.exercises import Exercise

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^exercise:\s*(\S+)$")
COMPARED = re.compile(r"^# NBVAL_CHECK_OUTPUT\n", re.MULTILINE)  # a comment or a tag; only solutions have outputs


class Refused(Exception):
    """A chapter's source that cannot become a notebook; the message says where and what to do."""


@dataclass
class Cell:
    """One cell of a chapter.  `full` and `stub` differ for exercises only."""

    kind: str  # "markdown" or "code"
    full: str
    stub: str
    id: str
    tags: list[str]


# Reading a chapter


def read_chapter(source: Path) -> list[Cell]:
    """Parse one percent-format source into cells.

    Raises Refused for an unknown, repeated or misplaced exercise, one that is missing, and one without a check.
    """
    chapter = next((c for c in chapters() if c.name == source.stem), None)
    if chapter is None:
        raise Refused(f"{source.name}: there is no deepseek_lab/learn/chapters/c{source.stem}.py")
    cells: list[Cell] = []
    done: list[Exercise] = []
    used_ids: set[str] = set()
    for node in jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent").cells:
        title = node.metadata.get("title", "")
        if "exercise" in title.split(":")[0].lower():
            task = _exercise_of(title, node.source, chapter, done, source.name)
            full = exercise_cell(task, done, full=True)
            stub = exercise_cell(task, done, full=False)
            done.append(task)
            key = task.path
        else:
            full = stub = key = node.source
        kind = "markdown" if node.cell_type == "markdown" else "code"
        cells.append(
            Cell(kind, full, COMPARED.sub("", stub), _cell_id(kind, key, used_ids), node.metadata.get("tags", []))
        )
    _refuse_gaps(chapter, done, cells, source.name)
    return cells


def _exercise_of(title: str, body: str, chapter: Chapter, done: list[Exercise], name: str) -> Exercise:
    match = MARK.match(title)
    if not match:
        raise Refused(f"{name}: cannot read the marker '# %% {title}'; write '# %% exercise: dotted.path.of.function'")
    path = match[1]
    task = next((e for e in chapter.exercises if e.path == path), None)
    if task is None:
        known = ", ".join(e.path for e in chapter.exercises) or "none"
        raise Refused(f"{name}: {path} is no exercise of chapter {chapter.number} (it has: {known})")
    if task in done:
        raise Refused(f"{name}: exercise {task.number} ({path}) stands there twice")
    if body.strip():
        raise Refused(f"{name}: the cell of exercise {task.number} must be empty; its text comes from the package")
    return task


def _refuse_gaps(chapter: Chapter, done: list[Exercise], cells: list[Cell], name: str) -> None:
    for task in chapter.exercises:
        if task not in done:
            raise Refused(f"{name}: no cell '# %% exercise: {task.path}' for exercise {task.number}")
        if not any(re.search(rf"^check\({task.name}\)", c.full, re.MULTILINE) for c in cells if c.kind == "code"):
            raise Refused(f"{name}: exercise {task.number} has no cell with check({task.name})")


def _cell_id(kind: str, key: str, used: set[str]) -> str:
    for n in range(1000):
        name = hashlib.sha256(f"{kind}\n{n}\n{key}".encode()).hexdigest()[:12]
        if name not in used:
            used.add(name)
            return name
    raise Refused("the same cell stands there a thousand times")


# Writing the text of an exercise


def exercise_cell(task: Exercise, earlier: Iterable[Exercise], *, full: bool) -> str:
    """The cell of one exercise: imports of its free names, the mark, and the whole function or its stub.

    `earlier` are the exercises above it in the notebook: the learner's own versions, not to be imported over.
    Raises Refused for a decorated definition, and for free names that no import can bring.
    """
    module, name = slots.resolve(task.path)
    text = inspect.getsource(module)
    tree = ast.parse(text)
    found = [n for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name]
    if not found:
        raise Refused(f"{task.path} is not defined at the top level of {module.__name__}")
    if found[0].decorator_list:
        raise Refused(f"{task.path} is decorated, which a learner's own version would not be; decorate its caller")
    lines = text.splitlines()[found[0].lineno - 1 : found[0].end_lineno]
    mine = {e.name for e in earlier if slots.resolve(e.path)[0] is module} | {name}
    imports = imports_for(free_names("\n".join(lines)) - mine, tree, module, task.path)
    if not full:
        lines = _stub(lines, found[0], task)
    head = "\n".join(imports) + "\n\n\n" if imports else ""
    return f'{head}@exercise("{task.path}")\n' + "\n".join(lines)


def _stub(lines: list[str], definition: ast.FunctionDef | ast.ClassDef, task: Exercise) -> list[str]:
    """Replace each body after its docstring by a raise."""
    first = definition.lineno
    inner = definition.body if isinstance(definition, ast.ClassDef) else [definition]
    for function in reversed([f for f in inner if isinstance(f, ast.FunctionDef)]):
        what = "body" if function is definition else f"body of {function.name}"
        has_doc = ast.get_docstring(function) is not None
        start = (function.body[0].end_lineno or 0) + 1 if has_doc else _first_line(function, lines, first)
        message = f"Exercise {task.number}: write the {what}, then run check({task.name})"
        indent = " " * function.body[0].col_offset
        lines[start - first : (function.end_lineno or 0) - first + 1] = [
            f'{indent}raise NotImplementedError("{message}")'
        ]
    return lines


def _first_line(function: ast.FunctionDef, lines: list[str], first: int) -> int:
    """The line after the signature: comments above the first statement belong to the body, too."""
    line = function.body[0].lineno
    while lines[line - 1 - first].strip().startswith("#"):
        line -= 1
    return line


def free_names(source: str) -> set[str]:
    """Names that a definition takes from outside: in its body, its annotations and its defaults; no builtins."""
    names: set[str] = set()

    def visit(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned())):
                names.add(symbol.get_name())
        for child in table.get_children():
            visit(child, False)

    visit(symtable.symtable(source, "exercise", "exec"), True)
    return {n for n in names if not hasattr(builtins, n)}


def imports_for(names: set[str], tree: ast.Module, module: types.ModuleType, path: str) -> list[str]:
    """The import lines that give a notebook these names: as the module imports them, or from the module itself."""
    plain: set[str] = set()
    grouped: dict[str, set[str]] = {}
    for statement in ast.walk(tree):
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            continue
        for alias in statement.names:
            bound = alias.asname or alias.name.split(".")[0]
            if bound not in names:
                continue
            written = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
            if isinstance(statement, ast.Import):
                plain.add(f"import {written}")
            else:
                grouped.setdefault(_absolute(statement, module), set()).add(written)
            names = names - {bound}
    here = {n for n in names if hasattr(module, n)}
    if here:
        grouped.setdefault(module.__name__, set()).update(here)
    if missing := sorted(names - here):
        raise Refused(f"{path} uses {', '.join(missing)}, which neither an import nor {module.__name__} provides")
    return sorted(plain) + [
        f"from {source} import {', '.join(sorted(some))}" for source, some in sorted(grouped.items())
    ]


def _absolute(statement: ast.ImportFrom, module: types.ModuleType) -> str:
    if not statement.level:
        return statement.module or ""
    package = module.__package__ or module.__name__
    return importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)


# From cells to notebooks


def assemble(cells: list[Cell], *, full: bool) -> NotebookNode:
    """A notebook without outputs, its metadata reduced to what does not depend on the machine."""
    notebook = nbformat.v4.new_notebook(
        metadata={
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in cells:
        make = nbformat.v4.new_markdown_cell if cell.kind == "markdown" else nbformat.v4.new_code_cell
        node = make(cell.full if full else cell.stub, id=cell.id)
        tags = [tag for tag in cell.tags if full or not tag.startswith("nbval")]
        if tags:
            node.metadata["tags"] = tags
        notebook.cells.append(node)
    if full:
        notebook.metadata["deepseek_lab"] = {"outputs_of": digest(notebook)}
    return notebook


def digest(notebook: NotebookNode) -> str:
    """What the stored outputs depend on: the code cells, exercises included."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def keep_outputs(notebook: NotebookNode, old: NotebookNode | None) -> bool:
    """Take over the outputs of an earlier build; False when its code was another."""
    if old is None or old.metadata.get("deepseek_lab") != notebook.metadata.deepseek_lab:
        return False
    before = {cell.id: cell for cell in old.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if cell.id not in before:
                return False
            cell.outputs, cell.execution_count = before[cell.id].outputs, before[cell.id].execution_count
    return True


def execute(notebook: NotebookNode, name: str, *, strict: bool = True, seconds: int = 300) -> None:
    """Run every cell in a fresh kernel, in a lab folder of its own, and store sanitised outputs.

    Raises Refused, with the cell and its error, when a cell raises.
    """
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "DEEPSEEK_LAB_HOME": home, "DEEPSEEK_LAB_STRICT": str(int(strict)), "PYTHONHASHSEED": "0"}
        where = {"metadata": {"path": str(ROOT / "solutions")}}
        options: dict[str, Any] = {
            "record_timing": False,
            "store_widget_state": False,
            "coalesce_streams": True,
            "resources": where,
        }
        options["extra_arguments"] = ["--log-level=ERROR"]
        client = NotebookClient(notebook, timeout=seconds, kernel_name="python3", **options)
        try:
            client.execute(env=env)
        except CellExecutionError as error:
            raise Refused(f"{name}: a cell raised.\n{error}") from error
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [sanitised(output) for output in cell.outputs if not _empty(output)]
    notebook.metadata["language_info"] = {"name": "python"}


def sanitised(output: NotebookNode) -> NotebookNode:
    """An output without this machine in it: no paths, no addresses, no live widgets (their picture stays)."""
    if "data" in output:
        output.data = {mime: _clean(value) for mime, value in output.data.items() if "jupyter.widget" not in mime}
    if "text" in output:
        output.text = _clean(output.text)
    output.pop("transient", None)
    return output


def _empty(output: NotebookNode) -> bool:
    return set(output.get("data", {"keep": 1})) == {"application/vnd.jupyter.widget-view+json"}


def _clean(value: object) -> object:
    if not isinstance(value, str):
        return value
    value = value.replace(str(ROOT) + os.sep, "").replace(str(ROOT), ".").replace(str(Path.home()), "~")
    value = re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w.+-]+", "/tmp/…", value)
    value = re.sub(r"[\w./~-]*/site-packages/", "site-packages/", value)
    return re.sub(r"\b0x[0-9a-f]{6,}\b", "0x…", value)


# The three commands


def sources(numbers: list[str]) -> list[Path]:
    """The chapter sources, all or those whose names begin with one of `numbers`."""
    every = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))
    chosen = [s for s in every if not numbers or any(s.stem.startswith(n) for n in numbers)]
    if not chosen:
        raise Refused(f"no chapter {' '.join(numbers)}; there are {', '.join(s.stem for s in every) or 'none'}")
    return chosen


def targets(source: Path) -> tuple[Path, Path]:
    """Where a chapter's notebooks go: (the complete one, the learner's)."""
    return source.with_suffix(".ipynb"), ROOT / "notebooks" / f"{source.stem}.ipynb"


def build(source: Path, *, rerun: bool = False) -> list[str]:
    """Write a chapter's two notebooks; returns what was done, in words."""
    cells = read_chapter(source)
    full, stub = assemble(cells, full=True), assemble(cells, full=False)
    solution, learner = targets(source)
    done = []
    if rerun or not keep_outputs(full, _read(solution)):
        execute(full, source.name)
        done.append("executed")
    for notebook, file in ((full, solution), (stub, learner)):
        text = nbformat.writes(notebook).rstrip("\n") + "\n"
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
            done.append(f"wrote {file.relative_to(ROOT)}")
    return done


def drift(source: Path) -> list[str]:
    """Differences between a chapter's source and its notebooks: cells, ids, and outputs of other code."""
    cells = read_chapter(source)
    found = []
    for full, file in zip((True, False), targets(source), strict=True):
        wanted, there = assemble(cells, full=full), _read(file)
        name = file.relative_to(ROOT)
        if there is None:
            found.append(f"{name} is missing or cannot be read")
        elif [_identity(c) for c in wanted.cells] != [_identity(c) for c in there.cells]:
            pairs = zip(wanted.cells, there.cells, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if _identity(a) != _identity(b)), "the last")
            found.append(f"{name} differs from {source.relative_to(ROOT)}, first in cell {at}")
        elif full and there.metadata.get("deepseek_lab") != wanted.metadata.deepseek_lab:
            found.append(f"{name} holds the outputs of other code")
    return found


def orphans() -> list[str]:
    """Notebooks without a source."""
    known = {file for source in sources([]) for file in targets(source)}
    every = [*(ROOT / "solutions").glob("*.ipynb"), *(ROOT / "notebooks").glob("*.ipynb")]
    return [f"{file.relative_to(ROOT)} has no source in solutions/" for file in sorted(every) if file not in known]


def _identity(cell: NotebookNode) -> tuple[str, str, str, list[str]]:
    return cell.cell_type, cell.id, cell.source, cell.metadata.get("tags", [])


def _read(file: Path) -> NotebookNode | None:
    try:
        return nbformat.read(file, as_version=4)
    except (OSError, ValueError, nbformat.reader.NotJSONError):
        return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=["build", "check", "run"])
    parser.add_argument("chapter", nargs="*", help="numbers or beginnings of names; all when left out")
    options = parser.parse_args(arguments)
    try:
        chosen = sources(options.chapter)
        if options.command == "check":
            found = [line for source in chosen for line in drift(source)] + orphans()
            print("\n".join(found) or f"{len(chosen)} chapters: sources and notebooks agree")
            if found:
                print("Run: python tools/notebooks.py build")
            return int(bool(found))
        for source in chosen:
            done = build(source, rerun=options.command == "run")
            print(f"{source.stem}: {', '.join(done) or 'up to date'}", flush=True)
    except Refused as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
