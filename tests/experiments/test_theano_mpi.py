"""Theano-MPI's published exchange times, and the number that is fitted to them."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.theano_mpi import FITTED, NETWORKS, compute, fit, formula, per_exchange


def test_times_of_5120_images_become_those_of_an_exchange() -> None:
    assert per_exchange(2.01, 128) == pytest.approx(2.01 / 5)
    assert per_exchange(8.03, 32) == pytest.approx(8.03 / 20)


def test_each_exchange_moves_the_bytes_that_its_formula_says() -> None:
    numel = 8_000_000
    assert formula("AR", numel, 1.0) == pytest.approx(2 * 7 / 8 * 4 * numel)
    assert formula("ASA", numel, 1.0) == pytest.approx(2 * 7 / 8 * 4 * numel)
    assert formula("ASA16", numel, 1.0) == pytest.approx(formula("ASA", numel, 0.5), rel=0.06)


@pytest.mark.parametrize("exchange", FITTED)
def test_the_fit_leaves_no_common_factor(exchange: str) -> None:
    rows = [row for row in compute() if row["exchange"] == exchange]
    assert len(rows) == len(NETWORKS)
    ratios = [row[f"fitted_to_{exchange}_s"] / row["published_s"] for row in rows]
    assert np.mean(np.log(ratios)) == pytest.approx(0, abs=1e-9)
    assert fit(exchange) == pytest.approx(8e-9 / rows[0][f"gbit_per_s_fitted_to_{exchange}"])
