"""The pages: options, messages and examples in them are those of the code."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import itertools
import re
from pathlib import Path

import pytest

from experiments.quotes import QUOTE
from pipesgd.calibration.options import CalibrateConfig
from pipesgd.cli import parse
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.run.metrics import SECONDS, IterationMetrics
from pipesgd.run.summary import summarize
from timing_model.arguments import Parser
from timing_model.cli import COMMANDS
from timing_model.cluster_profile import FORMAT

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parent.parent


def test_a_sentence_that_begins_with_a_number_is_not_a_list() -> None:
    """Markdown reads "2. A larger one ..." as a list, and shows it as 1."""
    pages = [REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")]
    begins = [
        (page.name, line) for page in pages for line in re.findall(r"\n\n(\d+)\. ", page.read_text(encoding="utf-8"))
    ]
    assert [(name, number) for name, number in begins if number != "1"] == []


def test_the_changelog_names_the_format_of_profiles() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"The format of `cluster.toml` is (\d+)", text) == [str(FORMAT)]


def test_examples_give_what_they_say() -> None:
    page = (REPOSITORY / "docs" / "equations.md").read_text(encoding="utf-8")
    examples = "".join(re.findall(r"^```python\n(>>>.*?)^```$", page, re.DOTALL | re.MULTILINE))
    test = doctest.DocTestParser().get_doctest(examples, {}, "equations.md", "equations.md", 0)
    assert len(test.examples) > 5
    assert doctest.DocTestRunner().run(test).failed == 0


ELSEWHERE = {
    *("nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "max-restarts"),  # torchrun's
    *("rdzv-backend", "rdzv-conf", "rdzv-endpoint", "local-addr", "signals-to-handle"),
    *("nodes", "rate", "loss", "slow-node", "only", "quick", "finished"),  # of experiments
    *("from", "link"),  # of plan, for a program
    "tls",  # of keys
    *("help", "help-all", "config", "logdir"),  # of all; TensorBoard's
}


def test_options_that_are_spoken_of_are_there() -> None:
    known = {*TrainConfig().options(), *CalibrateConfig().options(), *ELSEWHERE}
    for add_options, _ in COMMANDS.values():
        parser = Parser()
        add_options(parser)
        known |= {name[2:] for action in parser._actions for name in action.option_strings if name.startswith("--")}
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    texts = {page.name: re.sub(r"<!--.*?-->", "", QUOTE.sub("", page.read_text(encoding="utf-8"))) for page in pages}
    spoken = {(name, option) for name, text in texts.items() for option in re.findall(r"(?<!-)--([a-z][a-z-]*)", text)}
    assert sorted((name, option) for name, option in spoken if option not in known) == []


def together(*configs: TrainConfig) -> TrainConfig:
    """Return the configuration with what each of ``configs`` has other than by default."""
    default, sections = TrainConfig(), {}
    for name in [item.name for item in dataclasses.fields(default)]:
        usual = getattr(default, name)
        fields = [item.name for item in dataclasses.fields(usual)]
        given = [(field, getattr(getattr(config, name), field)) for config in configs for field in fields]
        changed = {field: value for field, value in given if value != getattr(usual, field)}
        sections[name] = dataclasses.replace(usual, **changed)
    return TrainConfig(**sections)


def test_options_go_together_unless_their_page_says_otherwise() -> None:
    page = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
    table = page.partition("| option | use it when |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    refused = {row[0].strip("`"): re.findall(r"`(--[^`]+)`", row[-1]) for row in rows}
    assert len(refused) > 10
    expected = {frozenset((one, other)) for one, others in refused.items() for other in others}
    pairs = {frozenset(pair) for pair in itertools.combinations(refused, 2)} | expected
    alone = {words: parse(words.split()) for words in set().union(*pairs)}  # alone, each is accepted
    wrong = []
    for one, other in sorted(map(sorted, pairs)):
        if one.split()[0] == other.split()[0]:  # two values of one option
            assert {one, other} not in expected
            continue
        try:
            if "auto" in one or "auto" in other:  # what --width auto leaves open depends on the other options
                parse([*one.split(), *other.split()])
            else:
                together(alone[one], alone[other])
            is_refused = False
        except UserInputError:
            is_refused = True
        if is_refused != ({one, other} in expected):
            wrong.append((one, other, is_refused))
    assert wrong == []


def test_the_page_of_reference_has_every_field() -> None:
    page = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
    line = [*(item.name for item in dataclasses.fields(IterationMetrics)), *(f"seconds.{name}" for name in SECONDS)]
    summary = re.findall(r'^        "(\w+)": ', inspect.getsource(summarize), re.MULTILINE)
    assert len(summary) > 15
    assert [name for name in [*line, *summary] if f"`{name}`" not in page] == []


def texts_in_the_code() -> list[str]:
    """Return every string in the code, with … for what is filled in."""
    files = [
        path
        for name in ("pipesgd", "timing_model", "experiments/testbed")
        for path in (REPOSITORY / name).rglob("*.py")
    ]

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return text(node.left) + text(node.right)
        if isinstance(node, ast.IfExp):
            return text(node.body)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "…"

    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    said = [node for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp)]
    return [text(node) for node in said if id(node) not in docstrings]


def test_every_message_of_the_troubleshooting_page_is_in_the_code() -> None:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    code = "\n".join(texts_in_the_code())
    wanted = {message: ".*".join(map(re.escape, message.split("…"))) for message in messages}
    assert len(messages) > 40
    assert [message for message, pattern in wanted.items() if not re.search(pattern, code)] == []


def test_every_example_is_listed() -> None:
    examples = REPOSITORY / "examples"
    listed = re.findall(r"\[(\w+\.py)\]\((\w+\.py)\)", (examples / "README.md").read_text(encoding="utf-8"))
    assert sorted(name for name, _ in listed) == sorted(path.name for path in examples.glob("*.py"))
    assert all(name == target for name, target in listed)
