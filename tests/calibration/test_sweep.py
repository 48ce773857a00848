"""Cells as real ranks measure them, groups of some of the ranks, and the summary of codecs' times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain, count, product, repeat
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from _memory_transport import MemoryTransport, integers, run_threads
from _ranks import run_ranks

from pipesgd.calibration import codec_speeds, sweep
from pipesgd.calibration.codec_speeds import OPERATIONS, SMALL_NUMEL
from pipesgd.calibration.groups import Part, groups_to_measure, places
from pipesgd.calibration.sweep import Cell, Sizes, Sweep
from pipesgd.codecs.floats import Uncompressed
from pipesgd.comm.all_reduce import ScheduledAllReduce
from pipesgd.comm.transport import TorchTransport, communication_group
from pipesgd.ranks import Ranks
from timing_model.all_reduce import messages_meet
from timing_model.schedules import ring

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("members", [[0, 1], [1, 3], [2, 0, 3], [3, 2, 1, 0]])
def test_some_of_the_ranks_reduce_among_themselves(members: list[int]) -> None:
    def reduce(transport: MemoryTransport) -> torch.Tensor | None:
        if transport.rank not in members:
            return None
        part = Part(transport, members)
        flat = integers(50, transport.rank)
        ScheduledAllReduce(part, ring(part.rank, part.world_size), Uncompressed())(flat)
        assert part.bytes_sent == transport.bytes_sent > 0
        assert part.bytes_received == transport.bytes_received > 0
        return flat

    results, network = run_threads(4, reduce)
    expected = sum(integers(50, rank) for rank in members)
    for rank, flat in enumerate(results):
        assert (flat is None) == (rank not in members)
        assert flat is None or torch.equal(flat, expected)
    assert {sender for sender, *_ in network.log} == set(members)


ALL_REDUCES = ("ring", "halving-doubling", "native")


def _sweep_by_steps(
    ranks: Ranks, largest_bytes: int, seconds: float, were_quiet: Sequence[bool]
) -> tuple[list[Cell], list[float], list[float], list[int]]:
    """Run ``_sweep`` by a clock that advances by a millisecond whenever it is read, however busy the machine is."""
    clock = count()
    with patch.object(sweep, "time", SimpleNamespace(perf_counter=lambda: 1e-3 * next(clock))):
        return _sweep(ranks, largest_bytes, seconds, were_quiet)


def _sweep(
    ranks: Ranks, largest_bytes: int, seconds: float, were_quiet: Sequence[bool] = ()
) -> tuple[list[Cell], list[float], list[float], list[int]]:
    """Run a sweep in which all laps after those of ``were_quiet`` are quiet."""
    quiet = chain(were_quiet, repeat(True))
    told: list[float] = []
    laps: list[float] = []
    transport = TorchTransport([communication_group(ranks, ranks.timeout, "gloo")], ranks.timeout)
    groups = groups_to_measure(places([0] * ranks.world_size))
    sweep = Sweep(ranks, transport, groups, ALL_REDUCES, uneven=messages_meet, timeout=ranks.timeout)
    sizes = sweep.choose_sizes(largest_bytes, seconds)
    cells, counted = sweep.run(
        sizes=sizes,
        seconds=seconds,
        between=laps.append,
        quiet=lambda: next(quiet),
        advance=told.append,
    )
    return cells, told, laps, counted


def test_all_ranks_get_the_same_cells() -> None:
    found = run_ranks(3, _sweep, 48 << 10, 2.0)
    cells, told, laps, counted = found[0]
    kinds = [(cell.world_size, cell.all_reduce, cell.nbytes) for cell in cells]
    sizes = sorted({cell.nbytes for cell in cells})  # as many as there was time for
    assert sizes[0] == 1 << 10
    assert kinds == [(p, name, nbytes) for p in (2, 3) for name in ALL_REDUCES for nbytes in sizes]
    assert all(np.all(cell.seconds > 0) and len(cell.seconds) >= 2 for cell in cells)
    assert all(0 <= share <= 1 for share in told)
    assert len(laps) >= 3
    assert sum(laps) > 0
    assert counted == list(range(len(laps)))
    for other, *_ in found[1:]:
        assert all(np.array_equal(one.seconds, cell.seconds) for one, cell in zip(other, cells, strict=True))


def test_sizes_end_where_the_time_does() -> None:
    cells, *_ = run_ranks(2, _sweep, 16 << 20, 1e-3)[0]
    assert max(cell.nbytes for cell in cells) < 16 << 20
    assert min(cell.nbytes for cell in cells) == 1 << 10


def _sweep_with_a_large_one(ranks: Ranks) -> tuple[Sizes, list[Cell]]:
    transport = TorchTransport([communication_group(ranks, ranks.timeout, "gloo")], ranks.timeout)
    sweep = Sweep(ranks, transport, [[0, 1]], ALL_REDUCES, uneven=messages_meet, timeout=ranks.timeout)
    chosen = sweep.choose_sizes(64 << 20, 0.5)
    sizes = Sizes([1 << 10, 4 << 10], [64 << 10], chosen.largest_seconds)
    ignore = lambda *_: None  # noqa: E731
    cells, _ = sweep.run(sizes=sizes, seconds=0.2, between=ignore, quiet=lambda: True, advance=ignore)
    return chosen, cells


def test_a_gradient_that_is_too_large_for_laps_is_timed_once() -> None:
    chosen, cells = run_ranks(2, _sweep_with_a_large_one)[0]
    assert max(chosen.in_laps) < 64 << 20
    assert chosen.once in ([64 << 20], [])  # as the machine's speed has it
    assert chosen.largest_seconds > 0
    assert {cell.nbytes: len(cell.seconds) for cell in cells if cell.nbytes == 64 << 10} == {64 << 10: 1}
    assert min(len(cell.seconds) for cell in cells if cell.nbytes < 64 << 10) >= 3


def test_laps_that_were_disturbed_do_not_count_and_others_come_for_them() -> None:
    """The time suffices only for the fewest laps, and for half as many again to replace disturbed ones."""
    disturbed = (False, True, False)
    for cells, _, laps, counted in run_ranks(2, _sweep_by_steps, 4 << 10, 0.2, (*disturbed, True, True)):
        assert counted == [lap for lap in range(len(laps)) if lap not in (0, 2)]
        assert {len(one.seconds) % len(counted) for one in cells} == {0}


def test_where_nearly_all_laps_were_disturbed_all_count_and_it_ends_all_the_same() -> None:
    for cells, _, laps, counted in run_ranks(2, _sweep, 4 << 10, 1e-3, (False, True, *[False] * 100)):
        assert counted == list(range(len(laps)))
        assert len(laps) >= 3
        assert {len(one.seconds) % len(laps) for one in cells} == {0}


def test_fixed_cost_and_rates_of_a_codec_are_told_apart() -> None:
    rates = dict(zip(OPERATIONS, (1e-9, 2e-9, 3e-9, 4e-9), strict=True))
    call = 5e-6
    times = {
        "small": {name: [call + SMALL_NUMEL * rate] * 3 for name, rate in rates.items()},
        "memory": {name: [rate] * 3 for name, rate in rates.items()},
    }
    speed = codec_speeds.summarize("int8", [times, times])
    assert speed.bits == pytest.approx(8 + 32 / 1024)
    assert dataclasses.astuple(speed.call) == pytest.approx((call,) * 3)
    assert [speed.memory[name].value for name in OPERATIONS] == pytest.approx(list(rates.values()))


def test_a_sum_costs_an_addition_of_most_bytes_and_the_finish_of_all() -> None:
    times = {"fp32": {"memory": {"add": [4e-9], "decode": [8e-9]}}}
    assert codec_speeds.sum_seconds([times], 4).value == pytest.approx(1e-9 + 2e-9 * 4 / 3)


def test_every_codec_is_measured_in_every_place() -> None:
    found = codec_speeds.measure(["int4"], 0.0, lambda share: None)
    assert found.keys() == {"fp32", "int4"}
    for times in found.values():
        assert times.keys() == {"small", "memory"}
        assert all(own.keys() == set(OPERATIONS) for own in times.values())
        assert all(len(own) == codec_speeds.LEAST_ROUNDS for one in times.values() for own in one.values())


def test_topk_is_timed_by_its_exchange_and_summed_up_as_a_gather() -> None:
    times = codec_speeds.measure(["topk"], 0.0, lambda share: None)["topk"]
    assert times.keys() == {"memory"}
    assert [len(own) for own in times["memory"].values()] == [codec_speeds.LEAST_ROUNDS] * 2
    made = {"memory": {"encode": [3e-9], "add": [1e-9]}}
    speed = codec_speeds.summarize("topk", [made, made])
    assert speed.gathered
    assert (speed.memory["encode"].value, speed.memory["add"].value) == (3e-9, 1e-9)
    assert speed.bits == pytest.approx(0.01 * 64)


def _calls(ranks: Ranks) -> dict[tuple[int, str], int]:
    """Return the number of calls of each all-reduce in a block of two, by the size of the group."""
    transport = TorchTransport([communication_group(ranks, ranks.timeout, "gloo")], ranks.timeout)
    sweep = Sweep(ranks, transport, [[0, 1], [0, 1, 2]], ALL_REDUCES[:2], uneven=messages_meet, timeout=ranks.timeout)
    mocks = [{name: Mock(wraps=one) for name, one in own.items()} for own in sweep._all_reduces]
    sweep._all_reduces = mocks  # type: ignore[assignment]
    for group, name in product(range(2), ALL_REDUCES[:2]):
        sweep._block(group, name, torch.ones(1000), 2)
    return {
        (group + 2, name): sum(call.args[0].numel() == 1000 for call in mock.call_args_list)
        for group, own in enumerate(mocks)
        for name, mock in own.items()
    }


def test_ranks_with_less_to_do_have_begun_the_next_one_where_a_block_begins() -> None:
    of_three = {(3, "ring"): 2, (3, "halving-doubling"): 3}
    both = {(2, "ring"): 2, (2, "halving-doubling"): 2} | of_three
    assert run_ranks(3, _calls) == [both, both, of_three]


def _bytes_of_native_blocks(ranks: Ranks) -> list[int]:
    """Return the bytes that this rank sends next to torch's own all-reduces, in blocks of 1 and of 3."""
    transport = TorchTransport([communication_group(ranks, ranks.timeout, "gloo")], ranks.timeout)
    sweep = Sweep(ranks, transport, [[0, 1]], ["ring", "native"], uneven=messages_meet, timeout=ranks.timeout)
    found = []
    for calls in (1, 3):
        before = transport.bytes_sent
        sweep._block(0, "native", torch.ones(10), calls)
        found.append(transport.bytes_sent - before)
    return found


def test_torchs_own_all_reduce_waits_for_a_header_as_in_training() -> None:
    header = torch.tensor([0, 0]).nbytes
    for one, three in run_ranks(2, _bytes_of_native_blocks):
        assert three - one == 2 * header
