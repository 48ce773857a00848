"""A loop of the user's own whose ranks may be lost."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _waiting import wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pipesgd
from experiments.forked_ranks import fork_rank, store
from pipesgd import elastic, keys, replicas
from pipesgd.codecs.base import FusedCodec
from pipesgd.ddp import attach
from pipesgd.elastic.members import Members
from pipesgd.elastic.missed import is_missed
from pipesgd.elastic.ranks import ElasticRanks
from pipesgd.errors import UserInputError
from pipesgd.membership.generation import first_record
from pipesgd.membership.heartbeat import Beat
from pipesgd.replicas import weights_sha256

pytestmark = pytest.mark.slow

ITERATIONS, KILLED, AT = 40, 1, 15

Train = Callable[[Path, pipesgd.Wire], None]


def _train(folder: Path, wire: pipesgd.Wire) -> None:
    ranks, model = _begin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire, codec="int8") as pipeline:
        shares = _shares(ranks, model, pipeline.step)
    _leave(folder, model, shares)


def _train_attached(folder: Path, wire: pipesgd.Wire) -> None:
    """The same loop with DDP, whose group has this rank alone: its members are those of ``ranks``."""
    ranks, model = _begin()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
    with ranks, attach(ddp_model, optimizer, ranks=ranks, wire=wire):
        shares = _shares(ranks, ddp_model, lambda: (optimizer.step(), optimizer.zero_grad()))
    _leave(folder, model, shares)


def _begin() -> tuple[ElasticRanks, nn.Module]:
    torch.manual_seed(0)
    ranks = elastic.join(least=2)
    return ranks, nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 1))


def _shares(ranks: ElasticRanks, model: nn.Module, step: Callable[[], object]) -> list[list[Any]]:
    """Train ``model``, and return this rank's shares; one rank is killed."""
    shares: list[list[Any]] = []
    for share in ranks.iterations(ITERATIONS):
        if int(os.environ["RANK"]) == KILLED and share.iteration == AT:
            os.kill(os.getpid(), signal.SIGKILL)
        shares.append([share.iteration, share.slice, share.rank, share.world_size, [one.member for one in share.lost]])
        model(torch.randn(8, 10, generator=torch.Generator().manual_seed(share.slice))).square().mean().backward()
        step()
    return shares


def _leave(folder: Path, model: nn.Module, shares: list[list[Any]]) -> None:
    text = json.dumps([weights_sha256(model), shares])
    (folder / f"{os.environ['RANK']}.json").write_text(text, encoding="utf-8")


def _exit_code(folder: Path, rank: int, wire: pipesgd.Wire, train: Train) -> int:
    try:
        train(folder, wire)
    except UserInputError as problem:
        (folder / f"{rank}.error").write_text(str(problem), encoding="utf-8")
        return 2
    return 0


def _run(folder: Path, wire: pipesgd.Wire, train: Train = _train) -> list[int]:
    with store() as port:
        pids = [fork_rank(partial(_exit_code, folder, rank, wire, train), rank, 3, folder, port) for rank in range(3)]
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@pytest.mark.parametrize("train", [_train, _train_attached])
def test_the_others_continue_with_their_shares(tmp_path: Path, train: Train) -> None:
    codes = _run(tmp_path, pipesgd.Wire(), train)
    assert codes == [0, -9, 0], (tmp_path / "log").read_text(encoding="utf-8")
    (first, shares), (other, others) = (
        json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 2)
    )
    assert first == other
    assert [one[0] for one in shares] == list(range(ITERATIONS))
    lost: list[Any] = [one for one in shares if one[4]]
    assert [one[4] for one in lost] == [[KILLED]]
    assert [one[2:4] for one in shares[-5:]] == [[0, 2]] * 5
    assert [one[2:4] for one in others[-5:]] == [[1, 2]] * 5
    slices = [one[1] for one in (*shares, *others)]
    assert len(set(slices)) == len(slices)


def _lose_in_different_iterations(folder: Path, wire: pipesgd.Wire) -> None:
    """Rank 1 is lost when rank 0 has begun iterations that rank 2 has not."""
    ranks, model = _begin()
    me = ranks.rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = []
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire, codec="int8") as pipeline:
        for share in ranks.iterations(12):
            told.append([share.iteration, share.world_size, [one.member for one in share.lost]])
            model(torch.ones(8, 10)).mean().backward()
            if share.iteration == 8 and me == 0:
                (folder / "ahead").touch()
            pipeline.step()
            if share.iteration == 6 and me > 0:
                wait_until((folder / "ahead").exists)
            if share.iteration == 6 and me == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            if share.iteration == 6 and me == 2:
                wait_until(lambda: ranks.members.is_interrupted or len(ranks.members.history) > 1)
    (folder / f"{me}.json").write_text(json.dumps(told), encoding="utf-8")


def test_all_are_told_of_a_loss_in_the_same_iteration(tmp_path: Path) -> None:
    """Loops may do something then, such as set a new learning rate, which must be the same on all ranks."""
    codes = _run(tmp_path, pipesgd.Wire(), _lose_in_different_iterations)
    assert codes == [0, -9, 0], (tmp_path / "log").read_text(encoding="utf-8")
    told, others = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 2))
    assert told == others
    assert [ranks for _, ranks, lost in told if lost] == [2]
    assert [rank for _, _, lost in told for rank in lost] == [KILLED]


def _save_after_a_loss(folder: Path, wire: pipesgd.Wire) -> None:
    """Rank 0 is lost in an iteration in which the others save what they have."""
    ranks, model = _begin()
    me = ranks.rank
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire, codec="int4") as pipeline:
        for share in ranks.iterations(5):
            if me == 0 and share.iteration == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(8, 10)).mean().backward()
            pipeline.step()
            if share.iteration == 3:
                pipeline.flush()
                state = pipeline.state_dict()
                found = [ranks.rank, ranks.world_size, state["rank"], state["world_size"]]
                (folder / f"{me}.json").write_text(json.dumps(found), encoding="utf-8")
        with pytest.raises(UserInputError, match=r"regroup\(\) must be left out with elastic ranks"):
            pipeline.regroup()


def test_what_is_saved_where_a_rank_is_lost_is_that_of_those_who_remain(tmp_path: Path) -> None:
    codes = _run(tmp_path, pipesgd.Wire(), _save_after_a_loss)
    assert codes == [-9, 0, 0], (tmp_path / "log").read_text(encoding="utf-8")
    found = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (1, 2)]
    assert found == [[0, 2, 0, 2], [1, 2, 1, 2]]


# ---- What each rank has its share in

MIDDLE = "in the middle of the sum"


def _combine_after_a_loss(folder: Path, wire: pipesgd.Wire) -> None:
    """Rank 1 is lost in iteration 1, or in the sum of the buffers there; each rank's buffer is its number."""
    ranks = elastic.join(least=2)
    me = ranks.rank
    model = nn.Linear(3, 1)
    model.register_buffer("own", torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    in_the_middle = (folder / MIDDLE).exists()
    if me == KILLED and in_the_middle:
        replicas.take_shares = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire) as pipeline:
        for share in ranks.iterations(4):
            if me == KILLED and share.iteration == 1 and not in_the_middle:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(2, 3)).sum().backward()
            pipeline.step()
            if share.iteration == 1:
                model.get_buffer("own").fill_(me)
            if share.iteration == 1 and in_the_middle:
                pipeline.combine_buffers()
        pipeline.flush()
        if not in_the_middle:
            pipeline.combine_buffers()
    (folder / f"{me}.json").write_text(json.dumps(model.get_buffer("own").tolist()), encoding="utf-8")


@pytest.mark.parametrize("when", ["before", MIDDLE])
def test_a_mean_is_of_those_who_remain(tmp_path: Path, when: str) -> None:
    (tmp_path / when).touch()
    codes = _run(tmp_path, pipesgd.Wire(), _combine_after_a_loss)
    assert codes == [0, -9, 0], (tmp_path / "log").read_text(encoding="utf-8")
    means = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 2)]
    assert means == [[1.0], [1.0]]


def _sum_after_a_loss(folder: Path, wire: pipesgd.Wire) -> None:
    """Rank 1 is lost when it has sent a part of its gradient, which is its number plus 1, and got one."""
    ranks = elastic.join(least=2)
    model = nn.Linear(4000, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if ranks.rank == KILLED:
        FusedCodec.decode_add_encode = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire, width=1, codec="int8") as pipeline:
        for _ in ranks.iterations(1):
            model(torch.full((1, 4000), ranks.rank + 1.0)).sum().backward()
            pipeline.step()
    (folder / f"{ranks.number(ranks.rank)}.json").write_text(json.dumps(model.weight[0].tolist()), encoding="utf-8")


def test_a_sum_that_was_interrupted_is_of_the_gradients_as_they_were(tmp_path: Path) -> None:
    """Each rank's bucket is copied before the sum changes it."""
    codes = _run(tmp_path, pipesgd.Wire(), _sum_after_a_loss)
    assert codes == [0, -9, 0], (tmp_path / "log").read_text(encoding="utf-8")
    for rank in (0, 2):
        weights = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert weights == pytest.approx([-2.0] * 4000)


# ---- Without a majority


def _train_until_alone(folder: Path, wire: pipesgd.Wire) -> None:
    """Ranks 1 and 2 stop; rank 0 saves what it has, and ends them."""
    ranks = elastic.join(least=1, wait=1.0)
    me = ranks.rank
    (folder / f"{me}.pid").write_text(str(os.getpid()), encoding="utf-8")
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire, codec="int4") as pipeline:
        try:
            for share in ranks.iterations(1000):
                if me and share.iteration == AT:
                    os.kill(os.getpid(), signal.SIGSTOP)
                model(torch.ones(2, 3)).sum().backward()
                pipeline.step()
                done = share.iteration + 1
        except pipesgd.NotEnoughMembers as error:
            report = pipeline.flush()
            state = {
                "why": str(error),
                "rank": [ranks.rank, ranks.world_size],
                "flushed": list(report.applied),
                "done": done,
                "samples": ranks.state_dict(),
                "pipeline": pipeline.state_dict()["world_size"],
            }
            (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        finally:
            for other in (1, 2) if me == 0 else ():
                os.kill(int((folder / f"{other}.pid").read_text(encoding="utf-8")), signal.SIGKILL)


def test_a_rank_without_a_majority_can_save_what_it_has(tmp_path: Path) -> None:
    codes = _run(tmp_path, pipesgd.Wire(), _train_until_alone)
    assert codes == [0, -9, -9], (tmp_path / "log").read_text(encoding="utf-8")
    state = json.loads((tmp_path / "state.json").read_text(encoding="utf-8"))
    assert "1 of 3 ranks of generation 0 are here: no majority came back within 1 s" in state["why"]
    assert (state["rank"], state["pipeline"]) == ([0, 1], 1)
    done, samples = state["done"], state["samples"]
    assert done >= AT
    assert state["flushed"] == [done - 1]
    assert (samples["iteration"], samples["fresh"]) == (done, 3 * done)
    assert all(one % 3 for one in samples["given_back"]), "slices of the others, in iterations that they did not sum"
    assert {one // 3 for one in samples["given_back"]} <= {done - 2, done - 1}
    assert samples["given_back"]


# ---- Another run continues


LOST, ENDS = {"first": (1, 3), "second": (2, 8)}, {"first": 5, "second": 14}
"""The rank that is lost in a run, and in which iteration; and the number of iterations after which it ends."""


def _train_on(folder: Path, wire: pipesgd.Wire) -> None:
    """A rank is lost; the others save where they are, and three ranks continue, of which another one is lost."""
    ranks = elastic.join(least=2)
    me = int(os.environ["RANK"])
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved = folder / "first.json"
    state = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else None
    run = "first" if state is None else "second"
    slices = []
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire) as pipeline:
        for share in ranks.iterations(ENDS[run], state):
            if LOST[run] == (me, share.iteration):
                os.kill(os.getpid(), signal.SIGKILL)
            slices.append(share.slice)
            model(torch.ones(2, 3)).sum().backward()
            pipeline.step()
        pipeline.flush()
        samples = ranks.state_dict()
    if ranks.rank == 0:
        (folder / f"{run}.json").write_text(json.dumps(samples), encoding="utf-8")
    (folder / f"{me} of {run}.json").write_text(json.dumps(slices), encoding="utf-8")


def test_another_run_continues_with_the_samples_that_are_next(tmp_path: Path) -> None:
    wire = pipesgd.Wire()
    for run, codes in (("first", [0, -9, 0]), ("second", [0, 0, -9])):
        assert _run(tmp_path, wire, _train_on) == codes, (tmp_path / "log").read_text(encoding="utf-8")
        assert json.loads((tmp_path / f"{run}.json").read_text(encoding="utf-8"))["iteration"] == ENDS[run]
    last = json.loads((tmp_path / "second.json").read_text(encoding="utf-8"))
    used = [number for path in tmp_path.glob("* of *.json") for number in json.loads(path.read_text("utf-8"))]
    assert len(used) == 2 * ENDS["second"]
    assert len({*used}) == len(used)
    of_the_lost = {*range(last["fresh"])} - {*used} - {*last["given_back"]}
    assert len(of_the_lost) <= 3 + 3, "they took part in three iterations each, of which the last may be given back"


def test_a_state_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "first.json").write_text('{"iteration": 3}', encoding="utf-8")
    assert _run(tmp_path, pipesgd.Wire(), _train_on) == [2, 2, 2]
    line = (tmp_path / "0.error").read_text(encoding="utf-8")
    assert line == "state must be what state_dict() returns; got {'iteration': 3}"


@pytest.mark.parametrize(
    ("transport", "line"),
    [
        ("gloo", "transport must be tcp or tls with --elastic, since gloo's waits cannot be ended; got gloo"),
        ("tls", "transport must be tcp, that of the ranks; got tls"),
    ],
)
def test_a_wire_that_does_not_go_with_the_ranks_is_refused(transport: str, line: str, tmp_path: Path) -> None:
    assert _run(tmp_path, pipesgd.Wire(transport=transport)) == [2, 2, 2]
    assert (tmp_path / "0.error").read_text(encoding="utf-8") == line


def _gradients_over_tls(folder: Path, wire: pipesgd.Wire) -> None:
    with elastic.join(transport="tls", secret_file=f"{folder}/job.key") as ranks:
        model = nn.Linear(3, 2)
        with pipesgd.Pipelined(model, torch.optim.SGD(model.parameters()), ranks=ranks, wire=wire) as pipeline:
            peers = pipeline.pipeline.flight.connections._links._peers.values()
            assert [peer.is_secure for peer in peers] == [True, True]


def test_gradients_take_the_transport_of_the_ranks(tmp_path: Path) -> None:
    keys.make(tmp_path / "job.key", certificate=True)
    assert _run(tmp_path, pipesgd.Wire(), _gradients_over_tls) == [0, 0, 0], (tmp_path / "log").read_text("utf-8")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"least": 0}, "least must be at least 1; got 0"),
        ({"silence": 1.0}, "silence must be at least 3; got 1.0"),
        ({"transport": "gloo"}, "transport must be tcp or tls; got 'gloo'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UserInputError, match=line):
        elastic.join(**given)


# ---- A rank that hangs

TIMEOUT = 6.0
"""Seconds that ranks wait for a sum."""


def _hang(folder: Path, wire: pipesgd.Wire) -> None:
    """Rank 1 stays in its computation for ever; its other threads live."""
    ranks = elastic.join(least=2)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire) as pipeline:
        for share in ranks.iterations(ITERATIONS):
            while ranks.members.me == KILLED and share.iteration == AT:
                time.sleep(0.1)
            model(torch.ones(2, 3)).sum().backward()
            pipeline.step()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(ranks.world_size), encoding="utf-8")


def test_a_rank_that_hangs_leaves_and_ends(tmp_path: Path) -> None:
    codes = _run(tmp_path, pipesgd.Wire(timeout=TIMEOUT), _hang)
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert codes == [0, 1, 0], log
    assert [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 2)] == [2, 2]
    assert re.search(
        r"^rank 1: compute of iteration 15 for \d+ s, while all others wait for it: it leaves$", log, re.MULTILINE
    )
    assert "rank 1: its main thread does not end, so the process ends at once" in log


def _beat(phase: str, seconds: float, *, waiting: bool) -> Beat:
    return Beat(0, 7, phase, waiting, seconds)


@pytest.mark.parametrize(
    ("own", "others", "missed"),
    [
        (("compute", 16.0, False), [("all-reduce", 16.0, True)] * 2, True),
        (("compute", 14.0, False), [("all-reduce", 16.0, True)] * 2, False),
        (("compute", 16.0, False), [("all-reduce", 16.0, True), ("compute", 16.0, False)], False),
        (("compute", 16.0, False), [("all-reduce", 16.0, True), ("all-reduce", 14.0, True)], False),
        (("all-reduce", 16.0, True), [("all-reduce", 16.0, True)] * 2, False),
        (("checkpoint", 80.0, False), [("exchange of members", 80.0, True)] * 2, False),
        (("checkpoint", 91.0, False), [("exchange of members", 91.0, True)] * 2, True),
        (("compute", 16.0, False), [], False),
    ],
)
def test_who_is_missed_by_all_others_has_hung(own: Any, others: list[Any], missed: bool) -> None:
    """Ranks wait for 10 seconds."""
    beats = [_beat(phase, seconds, waiting=waiting) for phase, seconds, waiting in others]
    assert is_missed(_beat(own[0], own[1], waiting=own[2]), beats, 10.0) == missed


# ---- What a unit's result shows


def _combine(folder: Path, wire: pipesgd.Wire) -> None:
    """Combine the buffers of a model that has none: nothing is summed. Rank 1 comes late."""
    ranks = elastic.join(least=2)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ranks, pipesgd.Pipelined(model, optimizer, ranks=ranks, wire=wire) as pipeline:
        for _ in ranks.iterations(1):
            model(torch.ones(2, 3)).sum().backward()
            pipeline.step()
            if ranks.rank == 1:
                time.sleep(LATE_SECONDS)
            begun = time.monotonic()
            pipeline.combine_buffers()
            ended = time.monotonic()
    (folder / f"{ranks.rank}.json").write_text(json.dumps([begun, ended]), encoding="utf-8")


LATE_SECONDS = 0.5


def test_a_unit_without_a_sum_ends_when_all_have_begun_it(tmp_path: Path) -> None:
    """Else a survivor could hold its result whom others are two units behind: none has what they miss."""
    assert _run(tmp_path, pipesgd.Wire(), _combine) == [0, 0, 0], (tmp_path / "log").read_text("utf-8")
    times = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(3)]
    assert min(ended for _, ended in times) >= max(begun for begun, _ in times)


def _differ(folder: Path, wire: pipesgd.Wire) -> None:
    ranks, _ = _begin()
    with ranks:
        for share in ranks.iterations(ITERATIONS):
            if share.iteration == AT:
                ranks.all_gather_object("numbers", 1 if ranks.rank else "one")


def test_an_exchange_that_fails_again_and_again_ends_the_job(tmp_path: Path) -> None:
    assert _run(tmp_path, pipesgd.Wire(), _differ) == [1, 1, 1]
    assert "numbers" in (tmp_path / "log").read_text(encoding="utf-8")


def test_an_iteration_that_nobody_computes_has_not_begun() -> None:
    members = object.__new__(Members)
    members._changed, members.record = threading.Condition(), first_record(range(3))
    members.why_out, members._is_closed, members._stops, members._entered = None, False, 0, 0
    members.least, members.stop_at = 2, 7
    members.begin(6)
    assert members._begun == 7
    members.begin(7)
    assert members._begun == 7, "all were asked to stop before it"
    members.least, members.stop_at = 4, None
    members.begin(7)
    assert members._begun == 7, "too few are left for it"
