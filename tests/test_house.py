"""The house: what a step enters, what an import loads, structure and sizes stay within tests/house_budget.toml."""

from __future__ import annotations

import functools

import pytest
from _ranks import run_ranks
from conftest import REPOSITORY

from experiments import house
from experiments.house import AT_LEAST, BUDGET, CODECS, Source, bounds, broken
from pipesgd.ranks import Ranks


@functools.cache
def figures_of_sources() -> dict[str, float]:
    return house.figures_of_sources()


@pytest.mark.slow
def test_sources_are_within_the_budget() -> None:
    assert broken(figures_of_sources(), bounds()) == []


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_step_enters_no_more_than_the_budget_says(codec: str) -> None:
    for entered in run_ranks(2, house.trace_step, codec):
        assert broken(house.figures_of_step(codec, entered), bounds()) == []


def _traced_twice(ranks: Ranks) -> bool:
    return house.trace_step(ranks, "fp32") == house.trace_step(ranks, "fp32")


@pytest.mark.slow
def test_what_a_step_enters_is_the_same_in_every_run() -> None:
    assert run_ranks(2, _traced_twice) == [True, True]


@pytest.mark.slow
def test_an_import_loads_no_more_than_the_budget_says() -> None:
    assert broken({"modules that pipesgd.train loads": house.modules_loaded()}, bounds()) == []


def test_a_figure_beyond_its_bound_or_without_one_is_told() -> None:
    share = next(iter(AT_LEAST))
    assert broken({"a": 2, share: 0.5}, {"a": 2, share: 0.5}) == []
    assert broken({"a": 3, share: 0.4, "b": 1}, {"a": 2, share: 0.5}) == [
        "a must be at most 2; got 3",
        f"{share} must be at least 0.5; got 0.4",
        f"b must have a bound in {BUDGET.name}; got none",
    ]


@pytest.mark.slow
def test_every_bound_is_that_of_a_figure() -> None:
    entered = house.Entered({})
    steps = [name for codec in CODECS for name in house.figures_of_step(codec, entered)]
    figures = {*steps, "modules that pipesgd.train loads", *figures_of_sources()}
    assert bounds().keys() == figures


def _source(name: str, text: str) -> Source:
    return Source(REPOSITORY / "pipesgd" / f"{name}.py", text)


def test_private_names_and_circles_of_other_files_are_found() -> None:
    base = _source(
        "base", "import pipesgd.user\nclass Base:\n    def __init__(self):\n        self._own = self._it = 1\n"
    )
    user = _source(
        "user", "from pipesgd.base import Base, _helper\nclass User(Base):\n    _it: int\n    x = Base()._own\n"
    )
    assert house.private_names_crossed([user], [base, user]) == {("pipesgd.user", "_own"), ("pipesgd.user", "_helper")}
    assert house.private_names_crossed([base], [base, user]) == set()
    assert house.modules_in_circles([base, user]) == {"pipesgd.base", "pipesgd.user"}
    assert house.modules_in_circles([base]) == set()


def test_arguments_and_lines_of_words_are_counted() -> None:
    text = '"""Why."""\nclass Own:\n    def __init__(self, a, *, b=1, **c):\n        # why\n        self.a = a  # so\n'
    source = _source("own", text)
    assert house.arguments_of(source.tree, "Own") == 3
    assert house.lines_of_words(source) == 3
    with pytest.raises(ValueError, match="must define Other"):
        house.arguments_of(source.tree, "Other")
