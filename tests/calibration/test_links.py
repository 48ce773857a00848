"""The link, interface or rank that stands out: from tables as probes make them, and probes between real ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from _ranks import run_ranks

from pipesgd.calibration.groups import Placement, groups_to_measure, places
from pipesgd.calibration.interfaces import Interface, wrong_interfaces
from pipesgd.calibration.links import Probes, probe, rounds_of_pairs, slow_links
from pipesgd.comm.transport import TorchTransport, communication_group
from pipesgd.ranks import Ranks

GIGABIT = 1e9 / 8


def made(world_size: int, seed: int = 0) -> Probes:
    """Return probes of links of 1 Gbit/s and 0.1 ms, each a little different."""
    generator = np.random.default_rng(seed)
    shape = (world_size, world_size)
    diagonal = np.where(np.eye(world_size), np.nan, 1.0)
    return Probes(
        latency=1e-4 * diagonal * generator.uniform(0.9, 1.3, shape),
        rate=GIGABIT * diagonal * generator.uniform(0.9, 1.0, shape),
    )


def one_a_node(world_size: int) -> list[Placement]:
    return places([0] * world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_links_that_differ_a_little_are_not_named(world_size: int) -> None:
    assert slow_links(made(world_size), one_a_node(world_size)) == []


@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_a_rank_whose_links_are_all_slow_is_named_once(world_size: int) -> None:
    probes = made(world_size)
    probes.rate[1, :] /= 2
    probes.rate[:, 1] /= 2
    [(rank, line)] = slow_links(probes, one_a_node(world_size))
    assert rank == 1
    assert line.startswith("slow link: that of rank 1, 4")
    assert "Mbit/s, where 9" in line


def test_a_single_slow_way_is_named_by_both_of_its_ends() -> None:
    probes = made(4)
    probes.rate[2, 0] /= 10
    [(rank, line)] = slow_links(probes, one_a_node(4))
    assert rank is None
    assert line.startswith("slow link: from rank 2 to rank 0, 9")


def test_a_late_link_is_named_with_its_latency() -> None:
    probes = made(4)
    probes.latency[3, :] += 5e-3
    probes.latency[:, 3] += 5e-3
    [(rank, line)] = slow_links(probes, one_a_node(4))
    assert rank == 3
    assert line.startswith("slow link: that of rank 3, 5.")
    assert "ms one way, where 0." in line


def test_a_latency_that_only_one_end_saw_was_that_end_waiting() -> None:
    probes = made(4)
    probes.latency[2, 0] += 5e-3
    assert slow_links(probes, one_a_node(4)) == []
    probes.latency[0, 2] += 5e-3
    lines = [line for _, line in slow_links(probes, one_a_node(4))]
    assert [line.partition(",")[0] for line in lines] == [
        "slow link: from rank 0 to rank 2",
        "slow link: from rank 2 to rank 0",
    ]


def test_links_inside_a_node_are_compared_with_each_other_alone() -> None:
    """Links inside a node are faster than the network, which does not make the network slow."""
    probes = made(4)
    for one, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        probes.rate[one, other] *= 20
    where = places([0, 1, 0, 1])
    assert slow_links(probes, where) == []
    probes.rate[0, 1] /= 4
    [(rank, line)] = slow_links(probes, where)
    assert rank is None
    assert line.startswith("slow link: from rank 0 to rank 1")


@pytest.mark.parametrize("world_size", range(2, 10))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(world_size: int) -> None:
    rounds = rounds_of_pairs(world_size)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(world_size), 2))
    for pairs in rounds:
        busy = list(itertools.chain(*pairs))
        assert len(busy) == len(set(busy))


def test_a_faster_interface_that_is_not_used_is_named() -> None:
    slow = Interface(address="10.0.0.2 (eth0)", speeds={"eth0": 1000, "eth1": 10000})
    right = Interface(address="10.0.1.2 (eth1)", speeds={"eth0": 1000, "eth1": 10000})
    [line] = wrong_interfaces([right, slow], one_a_node(2))
    assert "rank 1 is at 10.0.0.2 (eth0) with 1000 Mbit/s" in line
    assert line.endswith("GLOO_SOCKET_IFNAME=eth1 chooses it")


@pytest.mark.parametrize(
    ("local_ranks", "expected"),
    [
        ([0, 0], [[0, 1]]),
        ([0, 1, 2, 3], [[0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        ([0] * 5, [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]),
        ([0, 1, 0, 1, 0, 1], [[0, 2], [0, 2, 4], [0, 1, 2, 3, 4, 5]]),
        ([0, 1, 0, 1], [[0, 2], [0, 1, 2, 3]]),
    ],
)
def test_smaller_groups_have_a_rank_on_each_node(local_ranks: list[int], expected: list[list[int]]) -> None:
    assert groups_to_measure(places(local_ranks)) == expected


def test_every_group_has_the_ranks_that_hold_all_others_up() -> None:
    assert groups_to_measure(one_a_node(5), [3]) == [[0, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_sixteen_ranks_need_few_groups() -> None:
    assert [len(group) for group in groups_to_measure(one_a_node(16))] == [2, 3, 4, 8, 16]


def _probe(ranks: Ranks, brief: bool = False) -> Probes:
    transport = TorchTransport([communication_group(ranks, ranks.timeout, "gloo")], ranks.timeout)
    return probe(ranks, transport, lambda share: None, brief=brief)


@pytest.mark.slow
def test_real_ranks_probe_every_link_and_agree_on_the_table() -> None:
    found = run_ranks(3, _probe)
    for one in found:
        for name in ("latency", "rate"):
            table = getattr(one, name)
            assert np.array_equal(table, getattr(found[0], name), equal_nan=True)
            assert np.array_equal(np.isnan(table), np.eye(3, dtype=bool))
        assert np.nanmin(one.rate) > 0


@pytest.mark.slow
@pytest.mark.parametrize("enough", [0.0, 1e9])
def test_a_brief_probe_reaches_every_rank_however_many_messages_are_enough(
    enough: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipesgd.calibration.links.ENOUGH_SECONDS", enough)
    for p, links in ((3, 2), (4, 1)):
        found, *others = run_ranks(p, _probe, True)
        assert all(np.array_equal(found.rate, one.rate, equal_nan=True) for one in others)
        probed = np.isfinite(found.rate)
        assert np.array_equal(probed, probed.T)
        assert probed.sum(axis=1).min() >= 1
        assert probed.sum(axis=1).max() == links
        assert np.nanmin(found.rate) > 0
        assert slow_links(found, one_a_node(p)) == slow_links(others[0], one_a_node(p))
