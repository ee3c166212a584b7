"""What a learner has done so far, kept in `.lab/progress.json`, so that it survives a restart of the kernel."""

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_lab import slots
from deepseek_lab.learn.verdict import OPEN, PASSED


def _file() -> Path:
    return slots.lab_home() / "progress.json"


def load() -> dict[str, dict[str, Any]]:
    """{exercise number: {"attempts": int, "passed": bool, "hints": int, "revealed": bool}}; empty when damaged."""
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in content.items() if isinstance(v, dict)} if isinstance(content, dict) else {}


def note_attempt(number: str, passed: bool) -> None:
    """Count one check.  An exercise that passed once stays passed."""
    everything, entry = _entry(number)
    entry.update(attempts=entry.get("attempts", 0) + 1, passed=bool(entry.get("passed")) or passed)
    _save(everything)


def note_hint(number: str, n: int) -> None:
    """The learner has opened hint `n` of an exercise."""
    everything, entry = _entry(number)
    entry["hints"] = max(entry.get("hints", 0), n)
    _save(everything)


def note_reveal(number: str) -> None:
    """The learner has looked at the solution of an exercise."""
    everything, entry = _entry(number)
    entry["revealed"] = True
    _save(everything)


def _entry(number: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    everything = load()
    return everything, everything.setdefault(number, {})


def _save(everything: dict[str, dict[str, Any]]) -> None:
    _file().parent.mkdir(parents=True, exist_ok=True)
    slots.write_atomically(_file(), (json.dumps(everything, indent=1, sort_keys=True) + "\n").encode())


@dataclass(frozen=True)
class ChapterProgress:
    """One line of the table: which exercises of a chapter there are, and which have passed."""

    number: str
    title: str
    exercises: tuple[str, ...]
    passed: frozenset[str]


class Progress:
    """A table over all chapters; draws itself in Jupyter and on a terminal."""

    def __init__(self, chapters: list[ChapterProgress]) -> None:
        self.chapters = chapters

    @property
    def passed(self) -> int:
        return sum(len(c.passed) for c in self.chapters)

    @property
    def total(self) -> int:
        return sum(len(c.exercises) for c in self.chapters)

    def __repr__(self) -> str:
        lines = [f"{self.passed} of {self.total} exercises passed"]
        for c in self.chapters:
            marks = "".join("█" if number in c.passed else "░" for number in c.exercises)
            lines.append(f"  {c.number}  {c.title:<24} {len(c.passed):>2}/{len(c.exercises):<2}  {marks}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cell = "padding:3px 14px 3px 0;text-align:left"
        rows = "".join(
            f'<tr><td style="{cell}">{c.number}</td><td style="{cell}">{html.escape(c.title)}</td>'
            f'<td style="{cell};font-variant-numeric:tabular-nums">{len(c.passed)} of {len(c.exercises)}</td>'
            f'<td style="{cell}">{"".join(_box(n, n in c.passed) for n in c.exercises)}</td></tr>'
            for c in self.chapters
        )
        return (
            f'<div class="lab-progress"><b>{self.passed} of {self.total}</b> exercises passed'
            f'<table style="color:inherit;border-collapse:collapse;margin-top:4px"><tbody>{rows}</tbody></table></div>'
        )


def _box(number: str, passed: bool) -> str:
    fill = f"background:rgb({PASSED})" if passed else f"background:rgba({OPEN},0.15)"
    style = f"display:inline-block;width:1.5em;height:0.9em;margin-right:3px;border:1px solid rgb({OPEN});{fill}"
    return f'<span title="{number} {"passed" if passed else "open"}" style="{style}"></span>'


def progress() -> Progress:
    """Every chapter with its exercises, and which of them you have passed."""
    from deepseek_lab.learn.chapters import chapters

    done = {number for number, entry in load().items() if entry.get("passed")}
    return Progress(
        [
            ChapterProgress(
                c.number,
                c.title,
                tuple(e.number for e in c.exercises),
                frozenset(e.number for e in c.exercises if e.number in done),
            )
            for c in chapters()
        ]
    )
