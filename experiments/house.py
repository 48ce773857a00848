"""Sizes and structure of the code: what one step enters, what an import loads, arguments, private names, lines, words.

    python -m experiments.house              all figures, next to the bounds in tests/house_budget.toml
    python -m experiments.house --files      also the files that a step enters, each with its functions

A step is the sixth one of ``Pipelined`` at width 2, of a small MLP on two ranks. Calls are counted in its main thread
and its communication thread, from the call of ``step`` until the gradient that it hands over has arrived: so the counts
are the same in every run. ``tests/test_house.py`` compares every figure with its bound.
"""

from __future__ import annotations

import ast
import functools
import io
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import pipesgd
from experiments import command
from experiments.results import REPOSITORY
from pipesgd.ranks import Ranks

BUDGET = REPOSITORY / "tests" / "house_budget.toml"
PACKAGES = ("pipesgd", "timing_model", "experiments")
AT_LEAST = {"share of comments and docstrings of pipesgd"}
"""Figures whose bound is the least value; that of the others is the largest one."""
CODECS = ("fp32", "int8")
STEPS = 6
"""Number of the step that is counted, by which all that is made once is there."""
MOST_LINES = 550
"""Lines above which a file counts as long."""
COMMUNICATION_THREAD = "pipesgd-communication"
AS_IT_ARRIVES = ("_Peer.", "_Message.move", "TcpLinks._poll_all")
"""Functions of comm/tcp.py that are called as often as bytes happen to arrive, which are not counted."""
ROOMS = ("pipesgd/pipeline", "pipesgd/ddp")
"""Folders in which private names of other files are counted."""

Figures = dict[str, float]


# ---- What a step enters


@dataclass(frozen=True)
class Entered:
    """Calls of functions of pipesgd and the timing model, by file and function."""

    calls: Mapping[tuple[str, str], int]

    @property
    def files(self) -> dict[str, list[str]]:
        """Functions that were entered, by file."""
        files: dict[str, list[str]] = {}
        for file, function in sorted(self.calls):
            files.setdefault(file, []).append(function)
        return files

    def figures(self) -> Figures:
        """Return the numbers of files, functions and calls."""
        return {"files": len(self.files), "functions": len(self.calls), "calls": sum(self.calls.values())}


class Counting:
    """Counts calls of functions of pipesgd and the timing model in the threads that are ``counted``."""

    def __init__(self) -> None:
        self.counted: set[str] = set()
        """Names of the threads whose calls are counted."""
        self.calls: Counter[tuple[str, str]] = Counter()
        self._root = f"{Path(pipesgd.__file__).parents[1]}/"

    def begin(self) -> None:
        """Look at the calls of this thread, and of those that start later."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def end(self) -> None:
        """Look at no calls any more."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or threading.current_thread().name not in self.counted:
            return
        file = frame.f_code.co_filename.removeprefix(self._root)
        function = frame.f_code.co_qualname
        if file.startswith(("pipesgd/", "timing_model/")) and not (
            file.endswith("comm/tcp.py") and function.startswith(AS_IT_ARRIVES)
        ):
            self.calls[file, function] += 1


def trace_step(ranks: Ranks | None, codec: str) -> Entered:
    """Return what a step of ``Pipelined`` with this codec enters on this rank. Collective."""
    main = threading.current_thread().name
    counting = Counting()
    counting.begin()
    try:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        samples = torch.randn(16, 64)
        with pipesgd.Pipelined(model, optimizer, width=2, codec=codec, ranks=ranks) as pipeline:
            for step in range(1, STEPS + 1):
                model(samples).square().mean().backward()
                if step == STEPS:
                    pipeline.state_dict()  # until all that is in flight has arrived
                    counting.counted = {main, COMMUNICATION_THREAD}
                pipeline.step()
                counting.counted.discard(main)
            pipeline.state_dict()
            counting.counted.clear()
    finally:
        counting.end()
    return Entered(dict(counting.calls))


def entered_by_a_step(codec: str) -> Entered:
    """Return what ``trace_step`` returns on rank 0 of two, each in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.house"])
    with tempfile.TemporaryDirectory() as folder, context.Pool(2) as pool:
        return pool.starmap(_trace_on_rank, [(rank, folder, codec) for rank in range(2)], chunksize=1)[0]


def _trace_on_rank(rank: int, folder: str, codec: str) -> Entered:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return trace_step(None, codec)


# ---- What an import loads, and what calls take


def modules_loaded() -> int:
    """Return the number of modules of pipesgd and the timing model that ``import pipesgd.train`` loads."""
    program = "import sys, pipesgd.train; print(*sys.modules)"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return sum(name.partition(".")[0] in ("pipesgd", "timing_model") for name in done.stdout.split())


def arguments_of(tree: ast.Module, name: str) -> int:
    """Return the number of arguments of a function, or of a class's constructor, ``**options`` being one.

    Raises:
        ValueError: ``tree`` defines neither.
    """
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            constructors = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            return _number_of_arguments(constructors[0]) - 1  # self
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _number_of_arguments(node)
    raise ValueError(f"a module must define {name}; got none")


def _number_of_arguments(function: ast.FunctionDef) -> int:
    arguments = function.args
    many = [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *many])


# ---- Private names, circles


@dataclass(frozen=True)
class Source:
    """A file of Python, read."""

    path: Path
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The file, parsed."""
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """Name by which others import it."""
        name = ".".join(self.path.relative_to(REPOSITORY).with_suffix("").parts)
        return name.removesuffix(".__init__")


def sources(folder: str) -> list[Source]:
    """Return the files of Python in a folder of the repository."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / folder).rglob("*.py"))}
    return [Source(path, text) for path, text in texts.items()]


def private_names_crossed(files: Sequence[Source], among: Iterable[Source]) -> set[tuple[str, str]]:
    """Return (file, name) of the private names of another file's classes and modules that each of ``files`` uses.

    A name is another file's if a class in it has the attribute or a module imports it, and no class of the file itself
    defines it. ``among`` are the files whose classes are known.
    """
    attributes = {one.path: _private_attributes(one.tree) for one in among}
    crossed = set()
    for one in files:
        elsewhere = set().union(*(names for path, names in attributes.items() if path != one.path))
        foreign = elsewhere - attributes.get(one.path, set())
        used = {node.attr for node in ast.walk(one.tree) if isinstance(node, ast.Attribute)} & foreign
        for node in ast.walk(one.tree):
            if isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
                used |= {alias.name for alias in node.names if _is_private(alias.name)}
        crossed |= {(one.module, name) for name in used}
    return crossed


def _private_attributes(tree: ast.Module) -> set[str]:
    """Return the private attributes and methods that the classes of a module define."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            names |= {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return set(filter(_is_private, names))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def modules_in_circles(files: Sequence[Source]) -> set[str]:
    """Return the modules that import themselves, by way of others."""
    known = {one.module for one in files}
    imports = {one.module: _imported(one.tree) & known - {one.module} for one in files}
    return {module for module in known if module in _reachable(imports, module)}


def _imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _reachable(imports: Mapping[str, set[str]], module: str) -> set[str]:
    """Return the modules that ``module`` imports, directly or not."""
    found: set[str] = set()
    left = set(imports[module])
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left |= imports[one]
    return found


# ---- Sizes


def lines_of(files: Sequence[Source]) -> int:
    """Return the number of lines of these files."""
    return sum(len(one.text.splitlines()) for one in files)


def lines_of_words(one: Source) -> int:
    """Return the number of lines of a file that a comment or a docstring has to itself or shares with code."""
    numbers: set[int] = set()
    for node in ast.walk(one.tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                numbers |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(one.text).readline):
        if token.type == tokenize.COMMENT:
            numbers.add(token.start[0])
    return len(numbers)


def words_of_pages() -> int:
    """Return the number of words of all Markdown files under version control."""
    words = ["git", "ls-files", "-z", "*.md"]
    listed = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    pages = [REPOSITORY / name for name in listed.split("\0") if name]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages if page.exists())


# ---- All of it


@functools.cache
def figures_of_sources() -> Figures:
    """Return all figures that are read from the sources, by name."""
    files = {folder: sources(folder) for folder in (*PACKAGES, "tests")}
    by_module = {one.module: one for one in files["pipesgd"]}
    figures: Figures = {}
    for module, name in (
        ("pipesgd.pipeline.pipelined", "Pipelined"),
        ("pipesgd.pipeline.local_steps", "LocalSteps"),
        ("pipesgd.ddp.attached", "attach"),
    ):
        figures[f"arguments of {name}"] = arguments_of(by_module[module].tree, name)
    in_rooms = [one for one in files["pipesgd"] if one.path.is_relative_to(REPOSITORY / ROOMS[0])]
    in_rooms += [one for one in files["pipesgd"] if one.path.is_relative_to(REPOSITORY / ROOMS[1])]
    figures["private names of other files in pipeline and ddp"] = len(private_names_crossed(in_rooms, files["pipesgd"]))
    all_files = [one for folder in PACKAGES for one in files[folder]]
    figures["modules in import circles"] = len(modules_in_circles(all_files))
    long = [one for one in all_files if lines_of([one]) > MOST_LINES]
    figures[f"files over {MOST_LINES} lines"] = len(long)
    figures |= {f"lines of {folder}": lines_of(of_folder) for folder, of_folder in files.items()}
    figures["words of pages"] = words_of_pages()
    share = sum(map(lines_of_words, files["pipesgd"])) / lines_of(files["pipesgd"])
    figures["share of comments and docstrings of pipesgd"] = round(share, 4)
    return figures


def figures_of_step(codec: str, entered: Entered) -> Figures:
    """Return the figures of a step with this codec, by name."""
    return {f"{what} of a step with {codec}": number for what, number in entered.figures().items()}


def bounds() -> dict[str, float]:
    """Return the bound of every figure, by its name."""
    found: dict[str, float] = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    return found


def broken(figures: Mapping[str, float], within: Mapping[str, float]) -> list[str]:
    """Return a line for each of ``figures`` that has no bound or is not ``within`` it."""
    lines = []
    for name, figure in figures.items():
        if (bound := within.get(name)) is None:
            lines.append(f"{name} must have a bound in {BUDGET.name}; got none")
        elif name in AT_LEAST and figure < bound:
            lines.append(f"{name} must be at least {bound:g}; got {figure:g}")
        elif name not in AT_LEAST and figure > bound:
            lines.append(f"{name} must be at most {bound:g}; got {figure:g}")
    return lines


def main(words: Sequence[str], ranks: Ranks, console: Console) -> None:
    """Run the command."""
    options = command.bare_parser("python -m experiments.house", __doc__)
    options.add_argument("--files", action="store_true", help="also show the files that a step enters")
    arguments = ranks.raise_together("options", lambda: options.parse_args(words))
    command.check_alone("house", ranks.by_torchrun, "it starts ranks of its own")
    entered = {codec: entered_by_a_step(codec) for codec in CODECS}
    figures: Figures = {}
    for codec, of_codec in entered.items():
        figures |= figures_of_step(codec, of_codec)
    figures["modules that pipesgd.train loads"] = modules_loaded()
    figures |= figures_of_sources()
    within = bounds()
    rows: list[dict[str, Any]] = [
        {"figure": name, "is": f"{figure:g}", "bound": f"{within[name]:g}" if name in within else "none"}
        for name, figure in figures.items()
    ]
    command.show("The house", rows)
    if arguments.files:
        for codec, of_codec in entered.items():
            files = [{"file": file, "functions": ", ".join(names)} for file, names in of_codec.files.items()]
            command.show(f"Files that a step with {codec} enters", files)


if __name__ == "__main__":
    command.run(main)
