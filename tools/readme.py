"""Write README.md's tables from what they are about: `python tools/readme.py build | check`.

The chapter table comes from the sources in solutions/ (their title and cost box) and the exercises that exist, the
claims table from docs/claims.csv.  Each stands between two comment markers; everything else in the file is left alone.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def chapter_table() -> str:
    from deepseek_lab.learn.chapters import chapters

    rows = ["| chapter | exercises | their work, minutes | ranks | to run it whole, seconds |", "|---|---|---|---|---|"]
    for chapter in chapters():
        source = ROOT / "solutions" / f"{chapter.name}.py"
        box = cost_box(ast.parse(source.read_text(encoding="utf-8")))
        minutes = sum(exercise.minutes for exercise in chapter.exercises)
        link = f"[{chapter.number} · {chapter.title}](notebooks/{chapter.name}.ipynb)"
        rows.append(f"| {link} | {len(chapter.exercises)} | {minutes} | {box['ranks']} | {60 * box['minutes']:.0f} |")
    return "\n".join(rows)


def cost_box(tree: ast.AST) -> dict[str, float]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cost_box":
            return {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant) and k.arg}
    raise ValueError("the chapter has no cost_box(...)")


def claims() -> str:
    from deepseek_lab.learn.widgets import read_claims

    rows = read_claims(ROOT / "docs" / "claims.csv")
    settled = [row for row in rows if row["verdict"]]
    lines = ["| claim | chapter | verdict | measured |", "|---|---|---|---|"]
    for row in settled:
        cells = (f"{row['id']}: {row['claim']}", row["chapter"], row["verdict"], row["measured"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines.append("")
    lines.append(f"{len(settled)} of {len(rows)} claims are settled; the others wait for their chapters.")
    return "\n".join(lines)


def filled(text: str) -> str:
    for name, table in (("chapters", chapter_table()), ("claims", claims())):
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md lacks the markers of the table of {name}")
        text = pattern.sub(lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text)
    return text


def main(argv: list[str]) -> int:
    if argv not in (["build"], ["check"]):
        print(__doc__, file=sys.stderr)
        return 2
    before = README.read_text(encoding="utf-8")
    after = filled(before)
    if argv == ["build"]:
        README.write_text(after, encoding="utf-8")
    elif before != after:
        print("README.md's tables are out of date; run python tools/readme.py build", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
