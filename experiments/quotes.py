"""Write the values that README and documentation quote from results: ``python -m experiments.quotes``.

A quote is what stands between ``<!-- KIND: WORDS -->`` and ``<!-- /KIND -->`` in a page:

``value``     a result's name, conditions, and a text with figures in braces
``table``     a result's name, conditions, and ``by`` columns if there is a line for each group of rows; then the head
              and the lines of the table, with figures in braces; a line of one cell ends as the last line does
``made by``   the commands, commits and machines of results
``equation``  the equations of a function of the timing model
``output``    what a step of the tutorial has printed, from the line that begins with a text
``plans``     a table of questions, ``timing-model plan ...``; the cells behind a question are the planner's answer
``archived``  text on a result whose experiment is archived, which stays as it is and names the commit

For example, ``systems workload=mlp rate=200mbit computes=75ms {system=ddp iteration_s 1e3 .0f} ms``. Braces hold
conditions (``=``, with ``|`` between alternatives, ``>=``, ``<=``, and ``~``, contains), a column, and then in turn
what is done with its figures: a factor, ``absolute``, ``least``, ``most``, ``mean``, ``median``, ``p95``, ``first``,
``each`` (all different ones), a format. The column ``count`` is the number of rows. After ``/`` or ``-`` come
conditions of other rows, by whose figures these are divided or lessened, row by row; after ``or``, another column, or
a text, for rows without a figure. Braces with conditions alone, at the beginning of a line, are for all of the line. A
part in double brackets is left out where it has no figure, and so is a cell.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import json
import operator
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments import command, figures
from experiments.results import REPOSITORY, RESULTS, Row, command_of, grouped, load
from pipesgd.errors import UserInputError
from pipesgd.ranks import Ranks
from pipesgd.run.console import say
from timing_model import cli as planner
from timing_model.units import format_seconds

DOCS = REPOSITORY / "docs"
PAGES = (REPOSITORY / "README.md", *(page for page in sorted(DOCS.glob("*.md")) if page.stem != "gallery"))
"""Pages with quotes; ``experiments.gallery`` writes the gallery as a whole."""
QUOTE = re.compile(r"<!-- (?P<kind>[a-z]+(?: by)?): (?P<words>.*?)\s*-->(?P<text>.*?)<!-- /(?P=kind) -->", re.DOTALL)
CONDITION = re.compile(r"(\w+)(=|>=|<=|~)(.*)", re.DOTALL)
FACTOR = re.compile(r"\d+(e-?\d+)?")
PART = re.compile(r"\[\[(?P<optional>.*?)\]\]|\{(?P<value>.*?)\}", re.DOTALL)
COMPARED: dict[str, Callable[[Any, str], bool]] = {
    "=": lambda own, text: ("" if own is None else str(own)) in text.split("|"),
    ">=": lambda own, text: own is not None and own >= float(text),
    "<=": lambda own, text: own is not None and own <= float(text),
    "~": lambda own, text: text in str(own),
}
COMBINED = {"/": operator.truediv, "-": operator.sub}
CHANGED: dict[str, Callable[[list[Any]], list[Any]]] = {
    "absolute": lambda found: [abs(one) for one in found],
    "least": lambda found: [min(found)],
    "most": lambda found: [max(found)],
    "mean": lambda found: [np.mean(found)],
    "median": lambda found: [np.median(found)],
    "p95": lambda found: [np.quantile(found, 0.95)],
    "first": lambda found: found[:1],
    "each": lambda found: [", ".join(dict.fromkeys(found))],
}
PROGRESS = re.compile(r"iteration \d+/|calibrating: |.* s left$")
"""Pattern of a line that shows progress."""


@functools.cache
def result(name: str, folder: Path) -> list[Row]:
    """Return the rows of a result."""
    files = [path for path in (folder / f"{name}.csv", folder / f"{name}.json") if path.exists()]
    if not files:
        raise UserInputError(f"a quote must name a table in {folder.name}/; got {name}")
    return load(files[0])


def described(words: str, folder: Path = RESULTS) -> list[Row]:
    """Return the rows that ``words`` describe: the name of a result, and conditions."""
    name, *conditions = shlex.split(words)
    return selected(result(name, folder), conditions)


def selected(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """Return the rows that meet all ``conditions``."""
    for condition in conditions:
        name, sign, text = re.fullmatch(CONDITION, condition).groups()  # type: ignore[union-attr]
        if rows and name not in rows[0]:
            raise UserInputError(f"a condition of a quote must be on a column of its result; got {condition}")
        rows = [row for row in rows if COMPARED[sign](row[name], text)]
    return list(rows)


def value(words: Sequence[str], rows: Sequence[Row]) -> str | None:
    """Return the value that ``words`` describe, or None if there is none among ``rows``."""
    at = words.index("or") if "or" in words else len(words)
    conditions: tuple[list[str], list[str]] = ([], [])
    sign, plain = "", []
    for word in words[:at]:
        if CONDITION.fullmatch(word):
            conditions[bool(sign)].append(word)
        elif word in COMBINED:
            sign = word
        else:
            plain.append(word)
    (own, others), (column, *changes) = conditions, plain
    chosen = selected(rows, own)
    if column == "count":
        return str(len(chosen))
    found = [row[column] for row in chosen]
    if sign:
        replaced = {re.split("[=<>~]", one)[0] for one in others}
        kept = [one for one in own if re.split("[=<>~]", one)[0] not in replaced]
        against = [row[column] for row in selected(rows, [*kept, *others])]
        found = [COMBINED[sign](one, other) for one, other in zip(found, against, strict=True)]
    found, instead = [one for one in found if one is not None], words[at + 1 :]
    if found:
        return written(found, changes)
    if not chosen or not instead:
        return None
    return value([*own, *instead], rows) if instead[0] in chosen[0] else " ".join(instead)


def written(found: list[Any], changes: Sequence[str]) -> str:
    """Return the one figure that ``changes`` leave, as the format among them has it."""
    form = ""
    for change in changes:
        if change in CHANGED:
            found = CHANGED[change](found)
        elif FACTOR.fullmatch(change):
            found = [float(change) * one for one in found]
        else:
            form = change
    texts = dict.fromkeys(format(one, form) for one in found)
    if len(texts) != 1:
        raise UserInputError(f"a quoted value must be one; got {', '.join(texts)}")
    return next(iter(texts))


def cell(template: str, rows: Sequence[Row]) -> str:
    """Return a cell with the values that it asks for, or "" if one of them is missing."""

    def filled(part: re.Match[str]) -> str:
        if part["value"] is None:
            return cell(part["optional"], rows)
        text = value(shlex.split(part["value"]), rows)
        if text is None:
            raise LookupError
        return text.replace("|", "\\|").replace("`", "'")

    try:
        return PART.sub(filled, template)
    except LookupError:
        return ""


def cells_of(line: str) -> list[str]:
    """Return the cells of a line of a table."""
    return [one.strip() for one in line.strip().removeprefix("|").removesuffix("|").split("|")]


def table(text: str, folder: Path = RESULTS) -> str:
    """Return the table that ``text`` describes."""
    first, head, *templates = text.splitlines()
    words, _, keys = first.partition(" by ")
    rows = described(words, folder)
    groups = grouped(rows, *keys.split(",")).values() if keys else [rows]
    lines = [[cell(one, rows) for one in cells_of(head)]]
    last = cells_of(templates[-1])
    for own in groups:
        if keys and any(own[0][key] is None for key in keys.split(",")):
            continue
        for template in templates:
            title, *others = cells_of(template)
            alike = re.match(r"\{([^}]*)\}", title)
            conditions = shlex.split(alike[1]) if alike else []
            if alike and all(map(CONDITION.fullmatch, conditions)):
                title, chosen = title[alike.end() :], selected(own, conditions)
            else:
                chosen = own
            lines.append([cell(one, chosen) for one in (title, *(others or last[1:]))])
    made = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([made[0], "|---" * len(lines[0]) + "|", *made[1:]])


def made_by(words: str) -> str:
    """Return the command, commit and machine that made each of these results, from its manifest."""
    lines = []
    for name in words.split():
        manifest = figures.manifest(name)
        commits = manifest.get("runs_made_with") or manifest.get("made_with") or []
        lines.append(
            f"- `{name}`: `{command_of(manifest)}`, at commit `{manifest['git']['commit'][:7]}`"
            f"{f' from runs at {len(commits)} commits' if len(commits) > 1 else ''}, {manifest['started'][:10]}, "
            f"on {manifest['machine']['cores']} cores ({manifest['machine']['cpu']})"
            f"{' and a GPU' if 'gpu' in manifest['machine'] else ''}"
        )
    return "\n".join(["Made by:", "", *lines])


def equation(name: str) -> str:
    """Return the equations in the docstring of a function of the timing model, "module.function"."""
    module, *path = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(f"timing_model.{module}"))
    blocks = re.findall(r"^\.\. math::(.*?)(?=^\S|\Z)", inspect.getdoc(owner) or "", re.DOTALL | re.MULTILINE)
    assert blocks, f"{name} has no equation"
    rows = [row for block in blocks for row in re.split(r",?\s*\\qquad\s*|\n\s*(?=\+ )", block.strip())]
    return "\n\n".join(f"$$\n{row}\n$$" for row in rows)


def output(words: str) -> str:
    """Return the output of a step of the tutorial without progress, from the line that begins with a text."""
    step, _, first = words.partition(" ")
    [row] = [row for row in result("tutorial", RESULTS) if row["step"] == step]
    lines = [line for line in row["output"] if not PROGRESS.match(line)]
    begins = [number for number, line in enumerate(lines) if line.lstrip().startswith(first)]
    assert begins, f"step {step} printed no line that begins with {first}"
    return "\n".join(["```text", *lines[begins[0] :], "```"])


def answers(question: str) -> list[str]:
    """Return an iteration with DDP, with no gradient late, and as the plan chooses, each as a cell."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert planner.main([*shlex.split(question)[1:], "--json"]) == 0
    found = json.loads(printed.getvalue())
    ddp, best = found["ddp"]["score"], found["best"]
    cells = [format_seconds(ddp)]
    for one in (found["synchronous"] if best["width"] > 1 else best, best):
        words = [one["codec"], f"{one['buckets']} buckets" if one["buckets"] != "1" else "", f"width {one['width']}"]
        named = ", ".join(word for word in words if word and word != "width 1")
        cells.append(f"{format_seconds(one['score'])}, {ddp / one['score']:.1f}x: {named}")
    return [*cells[:2], "the same" if cells[1] == cells[2] else cells[2]]


def answered(text: str) -> str:
    """Return a table whose lines end with what the planner answers now to the question in them."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        cells = cells_of(line)
        asked = [place for place, one in enumerate(cells) if one.startswith("`timing-model plan ")]
        if asked:
            lines[number] = f"| {' | '.join([*cells[: asked[0] + 1], *answers(cells[asked[0]].strip('`'))])} |"
    return "\n".join([*lines, ""])


BLOCKS: dict[str, Callable[[str], str]] = {
    "table": table,
    "made by": made_by,
    "equation": equation,
    "output": output,
}
"""Quotes that are paragraphs of their own."""
WITHIN: dict[str, Callable[[str], str]] = {"plans": answered, "archived": str}
"""Quotes that are made again from the text in them."""


def requoted(text: str) -> str:
    """Return the ``text`` of a page with all its quotes made again. Raises ``UserInputError``."""

    def quote(found: re.Match[str]) -> str:
        kind, words = found["kind"], found["words"]
        if kind in BLOCKS:
            made = f"\n\n{BLOCKS[kind](words)}\n\n"
        elif kind == "value":
            chosen, brace, template = words.partition("{")
            made = cell(brace + template, described(chosen))
            if not made:
                raise UserInputError(f"a quoted value must be one; got none for {words}")
        elif kind in WITHIN:
            made = WITHIN[kind](found["text"])
        else:
            raise UserInputError(f"a quote must be one of {', '.join(['value', *BLOCKS, *WITHIN])}; got {kind}")
        return found[0].removesuffix(f"{found['text']}<!-- /{kind} -->") + f"{made}<!-- /{kind} -->"

    return QUOTE.sub(quote, text)


def table_under(heading: str, page: str, number: int = 1) -> str:
    """Return the first table, or that with ``number``, that a page quotes under a heading; notebooks show it."""
    _, _, section = (DOCS / page).read_text(encoding="utf-8").partition(f"# {heading}\n")
    found = [one["text"].strip() for one in QUOTE.finditer(section) if one["kind"] == "table"]
    return found[number - 1]


def write(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Write all pages again."""
    command.Parser(prog="python -m experiments.quotes", description=__doc__).parse_args(words)
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = requoted(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            say(console, f"wrote {page.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    command.run(write)
