"""Every published system that an option names is trained with by one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _ranks import run_ranks
from _runs import train_each_as_a_rank

from pipesgd.guests import HOMES

pytestmark = pytest.mark.slow

SHORT = "--dataset digits --hidden-sizes 20 --batch-size 16 --iterations 3"
TEXT = "--dataset text:{text} --model transformer --layers 1 --embedding 16 --context 8 --batch-size 2 --iterations 3"
NAMED_BY = {
    "truncate16": f"{SHORT} --codec truncate16",
    "ternary": f"{SHORT} --codec ternary",
    "qsgd": f"{SHORT} --codec qsgd --qsgd-levels 1",
    "sign": f"{SHORT} --codec sign",
    "topk": f"{SHORT} --codec topk --density 0.05 --momentum-correction 0.5 --momentum 0",
    "powersgd": f"{SHORT} --codec powersgd --low-rank 2",
    "rows": f"{TEXT} --reduce rows",
    "factors": f"{SHORT} --reduce factors",
    "fewest bytes": f"{SHORT} --reduce auto",
    "elastic": f"{SHORT} --local-steps 2 --outer elastic",
    "average state": f"{SHORT} --local-steps 1 --outer average --average-state --width 1",
    "parameter servers": f"{SHORT} --strategy ps-async --staleness-bound 1",
    "elastic servers": f"{SHORT} --strategy easgd-async --local-steps 2",
}
"""Arguments of ``pipesgd.train`` that name each guest."""


def test_every_guest_trains_when_an_option_names_it(tmp_path: Path) -> None:
    lose_ranks = {name for name, home in HOMES.items() if home.startswith("elastic.")}  # tests/elastic trains these
    assert NAMED_BY.keys() == HOMES.keys() - lose_ranks
    text = tmp_path / "text"
    text.write_text("All that glitters is not gold. " * 100, encoding="utf-8")
    words = {
        name: [*words.format(text=text).split(), "--output", str(tmp_path / name)] for name, words in NAMED_BY.items()
    }
    for errors in run_ranks(2, train_each_as_a_rank, words, process_group=False, deadline=120.0):
        assert errors == dict.fromkeys(NAMED_BY, "")
    for name in NAMED_BY:
        summary = json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8"))
        assert summary["replicas_identical"], name
