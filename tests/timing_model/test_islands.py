"""Islands: formulas compared with simulated messages, what reduces to no islands, obvious meshes, and refusals."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _refusals import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timing_model._profiles import PROFILE, about, ask, mesh
from tests.timing_model.test_predict import by_hand, compute
from timing_model.advice import advice, describe, training_arguments
from timing_model.all_reduce import all_reduce_time
from timing_model.choices import Space
from timing_model.cli import main
from timing_model.collective_time import ring_all_reduce_time
from timing_model.costs import collective_time, costs_of, inside_of
from timing_model.inside import inside_time
from timing_model.iteration import IterationTime
from timing_model.job import Job, in_groups
from timing_model.measured import LinkProfile
from timing_model.memory import rank_memory
from timing_model.params import CodecCost, LinkParams, PlacedLink, uncompressed
from timing_model.plan import plan
from timing_model.predict import predict
from timing_model.presets import CODECS
from timing_model.report import answer_text, plan_text
from timing_model.schedules import ring
from timing_model.simulate_job import simulate_job
from timing_model.simulate_messages import Network, at_once, priced, simulate_messages, steps_of

REPOSITORY = Path(__file__).resolve().parents[2]
EXACT = 1e-9
WHOLE = 1 << 40
"""Bytes of a segment that holds every chunk."""
OUTER = LinkParams(alpha=3e-4, beta=1.1e-8, gamma=0.7e-9, sync=0.0, overhead=2e-5)
INNER = LinkParams(alpha=4e-5, beta=1.7e-9, gamma=0.7e-9, sync=0.0, overhead=2e-5)
"""Links on which no term hides another."""
INT8 = CodecCost(name="int8", bits=8.5, encode=3e-9, decode=1e-9, add=1.3e-9, hop=4.1e-9, call=1e-5)
FREE = LinkParams(alpha=0.0, beta=0.0, gamma=0.0, sync=0.0)
TENSORS = (30_000,) * 4
"""Small layers, whose messages have one segment."""


def job_on(outer: LinkParams = OUTER, inner: LinkParams | None = INNER, **options: Any) -> Job:
    """Return a job of 8 ranks, on nodes of 4, unless ``options`` say otherwise."""
    cluster = by_hand(outer, inner=None if inner is None else LinkProfile.exact(inner))
    work = compute(0.05, 1, tensors=TENSORS)
    defaults: dict[str, Any] = {"world_size": 8, "ranks_per_node": 4, "split": "fsdp2", "segment_bytes": WHOLE}
    return Job(**in_groups({"cluster": cluster, "compute": work} | defaults | options))


def by_tensor(**options: Any) -> dict[str, Any]:
    return {"split": "tensor", "activations": 0.0} | options


# --- Nothing changes without islands ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"width": 3, "codec": "int8", "all_reduce": "halving-doubling"},
        {"buckets": "4", "accumulation": 3},
        {"strategy": "ddp", "all_reduce": "native"},
        {"strategy": "ps-sync", "all_reduce": None},
        {"width": 2, "local_steps": 4},
    ],
)
def test_islands_of_one_rank_are_no_islands(options: dict[str, Any]) -> None:
    alone = predict(ask(**options))
    for split in ({"split": "fsdp2"}, by_tensor(split_share=0.3)):
        one = predict(ask(**options, **split))
        assert dataclasses.replace(one, job=alone.job) == alone
        assert one.iteration.inside == 0.0
        assert describe(one.job) == describe(alone.job)


# --- Inside an island -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    members=st.integers(2, 6),
    islands=st.integers(1, 3),
    values=st.integers(1, 3000),
    layers=st.integers(1, 3),
    alpha=st.floats(0, 1),
    beta=st.floats(0, 1),
    gamma=st.floats(0, 1),
    overhead=st.floats(0, 1),
)
def test_the_time_inside_is_that_of_messages_that_are_simulated(
    members: int, islands: int, values: int, layers: int, alpha: float, beta: float, gamma: float, overhead: float
) -> None:
    """A gather and a scatter are the two halves of a ring, whose schedule is simulated with its sums; and a gather is
    simulated on links that are named one by one."""
    link = LinkParams(alpha=alpha, beta=beta, gamma=gamma, sync=0.0, overhead=overhead)
    tensors, every = [values] * layers, (PlacedLink(link=OUTER), PlacedLink(link=link, node=members))
    sizes = {"world_size": members * islands, "members": members}
    close = partial(pytest.approx, rel=EXACT, abs=1e-12)

    def ring_of(nbytes: float) -> float:
        schedules = [steps_of(ring(rank, members), 1, None) for rank in range(members)]
        programs = priced(schedules, nbytes / 4 / members, uncompressed(gamma))
        return max(simulate_messages(programs, Network(link=link)))

    weights = mesh(split="fsdp2", **sizes)
    gathered = inside_time(weights, tensors, link)
    assert gathered.backward == close(layers * ring_of(4 * values))
    assert inside_time(weights, tensors, dataclasses.replace(OUTER, gamma=gamma), every) == close(gathered)

    activations = mesh(split="tensor", activations=2.0 * layers * values, **sizes)
    summed = inside_time(activations, tensors, link)
    assert summed == close((layers * ring_of(members * values),) * 2)
    assert inside_time(activations, tensors, dataclasses.replace(OUTER, gamma=gamma), every) == close(summed)


def test_a_fixed_cost_counts_for_each_collective() -> None:
    link = dataclasses.replace(FREE, sync=1.0)
    assert inside_time(mesh(4, members=2, split="fsdp2"), TENSORS, link) == (4.0, 8.0)
    assert inside_time(mesh(4, members=2, **by_tensor()), TENSORS, link) == (4.0, 4.0)


@pytest.mark.parametrize(("members", "link"), [(2, INNER), (4, INNER), (8, OUTER)])
def test_members_of_a_node_use_the_link_inside_it(members: int, link: LinkParams) -> None:
    job = job_on(members=members, accumulation=3)
    once = inside_time(job.mesh, TENSORS, link)
    assert inside_of(job, costs_of(job)) == pytest.approx([3 * seconds for seconds in once])
    apart = job_on(members=members, ranks_per_node=1, inner=None)
    assert inside_of(apart, costs_of(apart)) == inside_time(apart.mesh, TENSORS, OUTER)


# --- Between islands --------------------------------------------------------------------------------------------------


def simulated_between(job: Job, codec: CodecCost, network: Network) -> float:
    """Return the time of the rings of all members at once, message by message: of what is split, then of the rest."""
    own, total = job.mesh, 0.0
    rings = [range(member, own.world_size, own.islands.members) for member in range(own.islands.members)]
    for values in own.buffers(job.compute.numel):
        steps = [steps_of(ring(rank, own.number), 1, None) for rank in range(own.number)]
        programs = priced(at_once(steps, rings), values / own.number, codec)
        total += max(simulate_messages(programs, network))
    return total


@pytest.mark.parametrize("codec", [None, INT8])
@pytest.mark.parametrize("nics", [1, 2, 4])
@pytest.mark.parametrize(
    ("members", "split"), [(4, {}), (4, by_tensor(split_share=0.7)), (8, {}), (12, by_tensor(split_share=0.2))]
)
def test_the_time_between_islands_is_that_of_messages_that_are_simulated(
    members: int, split: dict[str, Any], nics: int, codec: CodecCost | None
) -> None:
    """Each rank of a node sends to another one, and has its part of the node's NICs."""
    job = job_on(members=members, world_size=24, nics=nics, **split)
    shared = dataclasses.replace(OUTER, beta=OUTER.beta * 4 / nics)
    cost, costs = codec or uncompressed(OUTER.gamma), costs_of(job)
    if codec is not None:
        job, costs = dataclasses.replace(job, codec="int8"), dataclasses.replace(costs, codec=codec)
    expected = simulated_between(
        job, cost, Network(link=shared, placed=(PlacedLink(link=shared), PlacedLink(link=INNER, node=4)))
    )
    assert collective_time(job, costs, job.compute.numel).total == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize(("members", "nics", "sharing"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 2), (8, 1, 4)])
def test_a_node_has_as_many_rings_as_an_island_has_members_there(members: int, nics: int, sharing: int) -> None:
    """All ranks but one of a ring on a node send inside it, if the ring goes through the nodes one after the other."""
    nodes = mesh(16, members=members, ranks_per_node=4, nics=nics, split="fsdp2")
    neighbours = [(rank, (rank + members) % 16) for rank in range(16)]
    leaving = [rank // 4 for rank, right in neighbours if rank // 4 != right // 4]
    assert {leaving.count(node) for node in range(4)} == {min(members, 4)}
    assert nodes.sharing == sharing


@pytest.mark.parametrize("members", [2, 4])
def test_a_node_sends_as_many_bytes_as_one_rank_with_the_whole_gradient(members: int) -> None:
    outer = dataclasses.replace(FREE, beta=1e-8)
    job = job_on(outer, members=members, world_size=3 * members, ranks_per_node=members)
    between = collective_time(job, costs_of(job), job.compute.numel)
    assert between.total == pytest.approx(ring_all_reduce_time(outer, job.nbytes, 3))


def test_what_is_not_split_travels_once_for_each_member() -> None:
    outer = dataclasses.replace(FREE, beta=1e-8)
    half, none = (
        collective_time(job, costs_of(job), job.compute.numel).total
        for job in (job_on(outer, members=4, **by_tensor(split_share=share)) for share in (0.5, 1e-12))
    )
    whole = ring_all_reduce_time(outer, job_on().nbytes, 2)
    assert none == pytest.approx(4 * whole)
    assert half == pytest.approx((0.5 + 4 * 0.5) * whole)


@pytest.mark.parametrize("members", [2, 4, 8])
@pytest.mark.parametrize("all_reduce", ["ring", "halving-doubling"])
def test_links_by_name_are_those_of_the_formula(members: int, all_reduce: str) -> None:
    """Each rank has wires of its own, as with as many NICs as ranks, or on nodes of one rank."""
    formula = job_on(members=members, ranks_per_node=1, inner=None, all_reduce=all_reduce, world_size=16)
    cluster = dataclasses.replace(formula.cluster, placed=(PlacedLink(link=OUTER),))
    placed = dataclasses.replace(formula, cluster=cluster)
    for job in (placed, dataclasses.replace(placed, width=2)):
        same = predict(dataclasses.replace(formula, width=job.width))
        assert predict(job).iteration == pytest.approx(same.iteration, rel=EXACT)
        assert predict(job).collective == pytest.approx(same.collective, rel=EXACT)


def test_a_slow_rank_slows_its_ring_and_its_island() -> None:
    slow = dataclasses.replace(OUTER, beta=10 * OUTER.beta)
    cluster = dataclasses.replace(by_hand(OUTER), placed=(PlacedLink(link=OUTER),))
    job = job_on(members=2, ranks_per_node=1, inner=None)
    times = []
    for placed in (cluster.placed, (*cluster.placed, PlacedLink(link=slow, senders=(5,)))):
        answer = predict(dataclasses.replace(job, cluster=dataclasses.replace(cluster, placed=placed)))
        times.append((answer.collective.total, answer.iteration.inside))
    assert times[1][0] > 5 * times[0][0]
    assert times[1][1] > 5 * times[0][1]


def test_a_link_that_is_missing_is_named() -> None:
    inside = dataclasses.replace(by_hand(OUTER), placed=(PlacedLink(link=INNER, node=2),))
    job = job_on(members=2, ranks_per_node=1, inner=None)
    with pytest.raises(ValueError, match="link must lead from rank 0 to rank 2, which ring sends to"):
        predict(dataclasses.replace(job, cluster=inside))
    between = tuple(PlacedLink(link=OUTER, senders=(0, 2, 4, 6), receivers=(0, 2, 4, 6)) for _ in range(1))
    between += (PlacedLink(link=OUTER, senders=(1, 3, 5, 7), receivers=(1, 3, 5, 7)),)
    with pytest.raises(ValueError, match="link must lead from rank 0 to rank 1, which ring sends to"):
        predict(dataclasses.replace(job, cluster=dataclasses.replace(inside, placed=between)))


# --- An iteration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("members", [2, 4, 8])
def test_an_iteration_is_that_of_the_simulator(width: int, members: int) -> None:
    answer = predict(job_on(members=members, width=width, world_size=16))
    total, *parts = answer.iteration
    assert total == pytest.approx(sum(parts))
    assert answer.iteration.compute == pytest.approx(0.05)
    assert answer.iteration.inside > 0
    assert simulate_job(answer.job).period == pytest.approx(total, rel=EXACT)


def period_of_one_wire(computation: float, inside: float, between: float, width: int) -> float:
    """Return the time of an iteration whose collectives have one wire, on which those inside the island go first.

    A rank waits for what is inside, then computes, while its exchanges of gradients, one after the other, have the wire
    whenever it is free.
    """
    exchanges: list[float] = []
    now, ends, done = 0.0, [], 0
    for iteration in range(200):
        while done < iteration - width + 1:  # wait for the exchange of the iteration that is to be applied
            now += exchanges[done]
            exchanges[done] = 0.0
            done += 1
        now += inside
        free = computation
        for number in range(done, len(exchanges)):
            used = min(free, exchanges[number])
            exchanges[number] -= used
            free -= used
        while done < len(exchanges) and exchanges[done] == 0.0:
            done += 1
        now += computation
        exchanges.append(between)
        ends.append(now)
    return (ends[-1] - ends[99]) / 100


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seconds", [0.001, 0.05, 0.4])
def test_collectives_on_the_links_between_islands_take_turns(width: int, seconds: float) -> None:
    half = by_tensor(split_share=0.5)  # every member computes the other half eight times, and exchanges it
    job = job_on(members=8, width=width, world_size=16, compute=compute(seconds, 1, tensors=TENSORS), **half)
    answer = predict(job)
    inside, between = answer.iteration.inside, answer.collective.total
    assert min(inside, between) > 0.01
    assert answer.iteration.total == pytest.approx(period_of_one_wire(4.5 * seconds, inside, between, width))


def test_links_by_name_that_are_used_inside_and_between_take_turns() -> None:
    job = job_on(members=2, width=2, ranks_per_node=1, inner=None, compute=compute(1e-6, 1, tensors=TENSORS))
    one = (PlacedLink(link=OUTER),)
    two = (*one, PlacedLink(link=OUTER, node=2))
    answers = [
        predict(dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, placed=p))) for p in (one, two)
    ]
    inside, between = answers[0].iteration.inside, answers[0].collective.total
    assert inside > between
    assert [one.iteration.total for one in answers] == pytest.approx([inside + between, inside + 1e-6])


def test_tensor_parallelism_repeats_what_it_does_not_split() -> None:
    """Members compute on the samples of all of them, so that every mesh has the same samples in an update."""
    work = compute(0.3, 1, tensors=TENSORS, loading=about(0.01), update=about(0.02), late_update=about(0.03))
    options = {"compute": work, "loader_workers": 8, **by_tensor(split_share=0.75)}
    one, four = (job_on(members=members, **options) for members in (1, 4))
    assert four.accumulated.forward.value == pytest.approx((0.75 + 4 * 0.25) * one.accumulated.forward.value)
    assert four.accumulated.loading.value == pytest.approx(4 * one.accumulated.loading.value)
    assert four.accumulated.update.value == pytest.approx((0.75 / 4 + 0.25) * 0.02)
    answers = [predict(job) for job in (one, four)]
    samples = [answer.samples_per_second * answer.iteration.total for answer in answers if answer.samples_per_second]
    assert samples == pytest.approx([8.0, 8.0])
    split = job_on(members=4, compute=work)
    assert split.accumulated.forward == one.accumulated.forward, "with FSDP2 each has samples of its own"
    assert split.accumulated.loading == one.accumulated.loading
    assert split.accumulated.update.value == pytest.approx(0.02 / 4)


def test_what_is_inside_is_no_computation_of_one_rank_alone() -> None:
    answer = predict(job_on(members=4, width=2, outer=FREE))
    assert answer.efficiency == pytest.approx(0.05 / answer.iteration.total)
    assert answer.gains["computation"] == pytest.approx(answer.iteration.total / (answer.iteration.total - 0.025))
    assert answer.gains["network"] > 1.01, "the link inside nodes is a part of the network"


# --- Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("state", [0, 1, 2])
def test_the_memory_of_a_rank_is_what_the_page_of_the_method_lists(width: int, state: int) -> None:
    page = (REPOSITORY / "docs" / "method.md").read_text(encoding="utf-8")
    row = "width 1" if width == 1 else "`eager`"
    [line] = [line for line in page.splitlines() if line.startswith(f"| {row} |")]
    terms = line.split("|")[-2].strip(" $").split("+")
    symbols = {"S": state, "K": width, "": 1}
    between = sum(
        int(found[1] or 1) * symbols[found[2]]
        for found in (re.fullmatch(r" ?(\d*)([SK]?) ?", t) for t in terms)
        if found
    )
    job = job_on(members=4, width=width, optimizer_state=state)
    assert rank_memory(job) == pytest.approx((between + 1) * job.nbytes / 4)
    for codec, kept in (("bf16", 0.0), ("int8", 0.0), ("int4", 1.0), ("sign", 1.0), ("ternary", 0.0), ("qsgd", 0.0)):
        copies = between + 1 + CODECS[codec].bits / 32 + kept
        assert rank_memory(dataclasses.replace(job, codec=codec)) == pytest.approx(copies * job.nbytes / 4)


def test_memory_that_is_not_enough_is_refused_and_what_needs_it_is_not_planned() -> None:
    model = 4 * sum(TENSORS)
    base = job_on(memory=3.0 * model)
    with pytest.raises(
        ValueError, match=r"memory must be at least 5.76 MB for width 2, .* islands of 1, .*; got 1.44 MB"
    ):
        predict(dataclasses.replace(base, width=2))
    assert predict(base.changed(width=2, members=4)).memory == pytest.approx(3.0 * model)
    with pytest.raises(ValueError, match="memory must be left out with strategy ps-sync, of which it is not known"):
        predict(job_on(strategy="ps-sync", all_reduce=None, ranks_per_node=1, memory=1.0, segment_bytes=1 << 20))
    found = plan(base)
    assert set(found.meshes) == {2, 4, 8}
    assert found.too_large[1] == pytest.approx(5.0 * model), "the least is that of width 1"
    assert all((rank_memory(one.job) or 0.0) <= 3.0 * model for one in found.ranking)
    assert "A rank has not enough memory for no islands (2.40 MB), activations left out." in advice(found)
    with pytest.raises(ValueError, match="memory must be at least 300 kB, the least of all that was searched"):
        plan(base.changed(memory=1000.0))


def test_islands_of_which_a_power_of_2_is_halved_and_doubled_are_predicted() -> None:
    """The one rank that an efficiency compares them with is no ring of all ranks, whose number is no power of 2."""
    job = job_on(world_size=384, ranks_per_node=1, members=3, all_reduce="halving-doubling")
    assert 0 < predict(job).efficiency < 1


@pytest.mark.parametrize("command", ["predict", "plan"])
@pytest.mark.parametrize("parameters", ["1.03G", "1.2345678G", "123", "1001", "104M", "40G"])
def test_the_memory_that_is_asked_for_is_enough(
    command: str, parameters: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{command} --network 25GbE --world-size 8 --compute 0.3s --parameters {parameters} --memory"
    assert main([*words.split(), "1B"]) == 2
    asked = re.search(r"memory must be at least ([0-9.]+ [A-Za-z]+)", capsys.readouterr().err)
    assert asked is not None
    assert main([*words.split(), asked[1]]) == 0


# --- The choice of a mesh ---------------------------------------------------------------------------------------------


def test_where_links_inside_cost_nothing_a_node_is_an_island() -> None:
    """Two nodes exchange what one rank of each would, where a ring of all ranks sends nearly twice the bytes."""
    outer = dataclasses.replace(FREE, beta=1e-6)
    base = job_on(outer, FREE, compute=compute(1e-3, 1, tensors=TENSORS))
    space = dataclasses.replace(Space.of(base), strategies=("pipelined",), codecs=("fp32",), all_reduces=("ring",))
    found = plan(base, dataclasses.replace(space, members=(1, 2, 4)))
    assert found.best.job.islands.members == 4
    assert found.meshes[1].score / found.best.score == pytest.approx(2 * 7 / 8 / (2 * 1 / 2), rel=1e-2)
    assert any(line.startswith("Islands are 1.75 times as fast as the best without any (") for line in advice(found))
    assert plan(base, space).best.job.islands.members == 4, (
        "one island of all has to gather weights from the other node"
    )
    every = dataclasses.replace(space, all_reduces=Space.of(base).all_reduces)
    assert plan(base, every).best.job.all_reduce == "hierarchical", "its bytes are as few, without islands"
    one_node = plan(dataclasses.replace(base, world_size=4), dataclasses.replace(space, members=(1, 2, 4)))
    assert one_node.best.job.mesh.is_one_island, "nothing has to leave it"


def test_where_links_inside_are_slow_there_are_no_islands() -> None:
    slow = dataclasses.replace(FREE, beta=1e-4)
    for split in ({}, by_tensor(activations=1e6)):
        found = plan(job_on(OUTER, slow, **split))
        assert found.best.job.islands.members == 1
        assert any(line.startswith("Use no islands: the best ones (") for line in advice(found))


def test_memory_makes_islands_as_small_as_it_allows() -> None:
    for share, members in ((12, 1), (6, 2), (3, 4)):
        base = job_on(memory=share * 4.0 * sum(TENSORS))
        space = dataclasses.replace(Space.of(base), widths=(2,), codecs=("fp32",), strategies=("pipelined",))
        assert plan(base, space).best.job.islands.members == members


def test_the_fewest_activations_decide_how_wide_islands_are() -> None:
    """All that is not split is repeated by every member, and activations are sums over them."""
    many = plan(job_on(**by_tensor(activations=1e9))).best.job.islands.members
    none = plan(job_on(FREE, FREE, **by_tensor(split_share=0.5))).best.job.islands.members
    assert (many, none) == (1, 1)


def test_what_is_measured_is_extrapolated_to_islands() -> None:
    inner = dataclasses.replace(PROFILE.link, beta=about(1e-8))
    exact = LinkProfile.exact(inner.params())
    answer, less = (
        predict(ask(cluster=dataclasses.replace(PROFILE, inner=one), split="fsdp2", members=2, ranks_per_node=2))
        for one in (inner, exact)
    )
    assert answer.high - answer.low > less.high - less.low, "the link inside is not exactly known"
    assert answer.support.kind == "extrapolated"
    assert any("no prediction of islands was compared" in one for one in answer.support.reasons)
    assert answer.low < answer.iteration.total < answer.high
    given = predict(job_on(members=2))
    assert given.support.kind == "as given"
    assert any("no prediction of islands was compared" in one for one in given.support.reasons)


def test_what_a_plan_says_of_islands() -> None:
    base = job_on(FREE, FREE, memory=4.0 * 4 * sum(TENSORS), segment_bytes=1 << 20)
    found = plan(base)
    text = plan_text(found, predict(found.best.job), top=1)
    assert [line.split()[-2:] for line in text.splitlines()[4:] if " by fsdp2 " in line and "%" not in line]
    assert all(describe(one.job) in text for one in found.meshes.values()), "the best of each mesh"
    [chosen] = [line for line in text.splitlines() if line.startswith("Choose ")]
    assert chosen.endswith(': Pipelined(..., width=1, codec="fp32", mesh=mesh) with a mesh of (4, 2)')
    said = answer_text(predict(found.best.job))
    assert "collectives inside islands" in said
    assert "memory of a rank, activations left out" in said
    one = found.best.job.changed(members=8)
    assert (describe(one), training_arguments(one)) == (
        "1 island of 8 by fsdp2",
        "fsdp2 over all ranks, by torch alone",
    )
    assert IterationTime(3.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0).exposed == 2.0


# --- The command ------------------------------------------------------------------------------------------------------

HAND = "--network 10GbE --world-size 16 --compute 0.3s --parameters 61.1M"
NODES = f"{HAND} --ranks-per-node 4 --inner-latency 10us --inner-bandwidth 20GB/s"


def test_the_command_plans_meshes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"plan {NODES} --split fsdp2 --memory 1GB --json".split()) == 0
    values = json.loads(capsys.readouterr().out)
    assert [one["members"] for one in values["meshes"].values()] == [2, 4, 8, 16]
    assert values["too_large"] == {"1": pytest.approx(5 * 4 * 61.1e6)}
    assert all(one["memory_bytes"] <= 1e9 for one in values["ranking"])
    assert values["predicted"]["memory_bytes"] == values["best"]["memory_bytes"]
    assert main(f"plan {NODES} --split tensor --activations 8MiB --split-share 0.9 --members 2 4 --json".split()) == 0
    assert set(json.loads(capsys.readouterr().out)["meshes"]) == {"2", "4"}
    assert main(f"predict {NODES} --split fsdp2 --members 4 --optimizer-state 0 --width 1 --json".split()) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["memory_bytes"] == pytest.approx(3 * 4 * 61.1e6 / 4)
    assert values["iteration_seconds"]["inside"] > 0
    assert main(f"predict {NODES} --all-reduce hierarchical".split()) == 0, "it needs the link inside, too"


@pytest.mark.parametrize(("words", "said"), refused("islands"))
def test_what_makes_no_sense_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    hand = HAND.replace("--world-size 16 ", "") if "--world-size" in words else HAND
    arguments = words.replace("HAND", hand).replace("NODES", NODES).split()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"error: {said.replace('UNKNOWN', 'with which islands are not modelled')}\n"


def test_a_file_that_says_what_is_inside_nodes_is_not_contradicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.toml"
    dataclasses.replace(PROFILE, inner=PROFILE.link).save(file)
    inner = "--ranks-per-node 2 --inner-latency 3us --inner-bandwidth 1GB/s"
    assert main(f"plan --cluster {file} --model mlp --world-size 4 {inner}".split()) == 2
    said = f"error: inner-latency must be left out with --cluster {file}, which says it; got 3.00 us\n"
    assert capsys.readouterr().err == said
    PROFILE.save(file)
    assert main(f"plan --cluster {file} --model mlp --world-size 4 {inner} --split fsdp2 --json".split()) == 0
    assert set(json.loads(capsys.readouterr().out)["meshes"]) == {"1", "2", "4"}


def test_all_reduces_at_once_are_those_of_their_ranks() -> None:
    """Links differ, so that each of two all-reduces takes the time that it would take by itself."""
    slow = dataclasses.replace(OUTER, beta=7 * OUTER.beta)
    placed = (PlacedLink(link=OUTER), PlacedLink(link=slow, senders=(1, 3), receivers=(1, 3)))
    times = [
        all_reduce_time("ring", link, 1000.0, 2, placed=(PlacedLink(link=link),), segment_bytes=WHOLE)
        for link in (OUTER, slow)
    ]
    together = all_reduce_time("ring", OUTER, 1000.0, 2, placed=placed, members=2, segment_bytes=WHOLE)
    assert together.total == pytest.approx(max(one.total for one in times))
