"""Record of the ranks that have trained: slices are given out in order, each once, whatever the ranks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pipesgd.membership.record import Record, Slices

changes = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 6)), max_size=5)
"""Changes of ranks: the iterations since the one before, and the number of ranks from there on."""


def slices(record: Record, iterations: int) -> list[tuple[int, int]]:
    """Return the slices of the first ``iterations``, in the order of iterations and ranks."""
    found = []
    for iteration in range(iterations):
        ranks = [span.ranks for span in record.spans if span.first <= iteration][-1]
        found += [record.slice_of(iteration, rank) for rank in range(ranks)]
    return found


@given(st.integers(1, 5), st.integers(1, 6), changes)
def test_slices_are_given_out_in_order_each_once(per_epoch: int, ranks: int, changes: list[tuple[int, int]]) -> None:
    record = Record.begun(per_epoch * ranks, ranks)
    iteration = 0
    for later, others in changes:
        iteration += later
        record = record.changed(iteration, others)
    found = slices(record, iteration + 20)
    in_order = ((epoch, number) for epoch in itertools.count() for number in range(record.length))
    assert found == list(itertools.islice(in_order, len(found)))
    assert record.given(iteration + 20) == len(found)
    assert Record(record.length, ()).continued(record.state_dict()) == record
    for number in range(1, len(found) + 1):
        needed = record.iterations(number)
        assert record.given(needed - 1) < number <= record.given(needed)


def test_what_a_rank_gives_back_at_the_end_is_given_out_within_it() -> None:
    """Two epochs of 12 slices end in the middle of an iteration, in whose sum another rank is lost."""
    record = Record.begun(12, 3).followed_by(Slices(2, 2, 6, (5,)))
    assert record.iterations(12) == 6
    assert [record.slice_of(5, rank) for rank in range(2)] == [(0, 11), (1, 0)]
    for back, needed in (((11,), 7), ((12,), 6), ((11, 12), 7), ((12, 11), 8), ((), 6)):
        assert record.followed_by(Slices(6, 1, 13, back)).iterations(12) == needed


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 40), st.data())
def test_the_same_ranks_take_the_same_samples_as_if_nothing_were_recorded(
    per_epoch: int, ranks: int, iteration: int, data: st.DataObject
) -> None:
    record = Record.begun(per_epoch * ranks, ranks)
    assert record.changed(iteration, ranks) is record
    rank = data.draw(st.integers(0, ranks - 1))
    epoch, of_epoch = divmod(iteration, per_epoch)
    assert record.slice_of(iteration, rank) == (epoch, of_epoch * ranks + rank)
    assert record.epoch(iteration) == epoch
    assert record.progress(iteration) == iteration
    assert record.iterations(3 * record.length) == 3 * per_epoch
