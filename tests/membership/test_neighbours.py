"""Ends of processes, which the other ranks notice at once wherever it was killed, and what is not taken for one."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import socket
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import RankFailed, run_as_ranks, run_ranks
from _waiting import wait_until

from pipesgd.errors import RunError
from pipesgd.membership import neighbours, sockets
from pipesgd.membership.heartbeat import Standing
from pipesgd.membership.neighbours import Neighbours
from pipesgd.ranks import Ranks

pytestmark = pytest.mark.slow

FAR_BEFORE_THE_TIMEOUT = 90.0
"""Seconds within which everything must be over, with the default ``--timeout`` of 120 s."""

ENDED = "has failed: its process has ended without a word"


def said_by_ranks(program: str, folder: Path, world_size: int = 3) -> str:
    """Run ``program`` on ranks of which one is killed; return what they said, and their exit codes before it."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program), encoding="utf-8")
    with pytest.raises(RankFailed) as caught:
        run_as_ranks(world_size, path, folder, deadline=FAR_BEFORE_THE_TIMEOUT, imports_again=False)
    return str(caught.value)


COMMAND = """
    import importlib, os, signal, sys, time
    from pipesgd.exit import run_and_exit

    train = importlib.import_module("pipesgd.train")
    owner = importlib.import_module({owner!r})
    for name in {path!r}.split(".")[:-1]:
        owner = getattr(owner, name)

    def killed(*arguments, **named):
        time.sleep(1.0)  # the others are elsewhere by then: they wait in an exchange through the store
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "{victim}":
        setattr(owner, {path!r}.split(".")[-1], killed)
    words = "--dataset digits --hidden-sizes 8 --batch-size 32 --iterations 20 --checkpoint-iterations 5 --width 2"
    if __name__ == "__main__":  # processes that load data import this
        run_and_exit(train.train, [*words.split(), *{more!r}.split(), "--evaluate-iterations", "10", "--output", "run"])
"""


@pytest.mark.parametrize(
    ("owner", "path", "victim", "more"),
    [
        pytest.param("pipesgd.train", "load", 1, "", id="loading"),
        pytest.param("pipesgd.train", "plan_run", 2, "", id="planning"),
        pytest.param("pipesgd.calibration.codec_speeds", "measure", 1, "--codec auto", id="calibration"),
        pytest.param("pipesgd.pipeline.pipeline", "check_same_training", 1, "--codec int8", id="making a pipeline"),
        pytest.param("pipesgd.reducers.make", "compile_loops", 0, "--codec int8", id="compilation"),
        pytest.param("pipesgd.training", "forward_backward", 1, "--loader-workers 1", id="computation"),
        pytest.param("pipesgd.training", "evaluate", 0, "", id="evaluation"),
        pytest.param("pipesgd.run.checkpoint", "Checkpoints.save", 2, "", id="checkpoint"),
        pytest.param("pipesgd.pipeline.pipelined", "Pipelined.close", 1, "", id="close"),
    ],
)
def test_a_rank_that_is_killed_is_named_at_once_in_every_phase(
    owner: str, path: str, victim: int, more: str, tmp_path: Path
) -> None:
    """The others used to wait for ``--timeout`` where they were not in an all-reduce."""
    said = said_by_ranks(COMMAND.format(owner=owner, path=path, victim=victim, more=more), tmp_path)
    codes = [1, 1, 1]
    codes[victim] = -signal.SIGKILL
    assert f"ranks ended with {codes}" in said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    for rank in {0, 1, 2} - {victim}:
        own = "\n".join(line for line in lines if line.startswith(f"error: rank {rank}: "))
        assert f"rank {victim} {ENDED}" in own or f" with rank {victim} in iteration" in own, said


def test_a_failure_that_a_rank_reports_itself_is_shown_and_not_the_end_of_its_process(tmp_path: Path) -> None:
    program = COMMAND.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise OSError('the disk is on fire')")
    said = said_by_ranks(program.format(owner="pipesgd.training", path="evaluate", victim=1, more=""), tmp_path)
    assert "ranks ended with [1, 1, 1]" in said
    for rank in (0, 2):
        assert f"error: rank {rank}: stopped in " in said
    assert said.count("rank 1 has failed: rank 1: OSError('the disk is on fire')") == 2
    assert "ended without a word" not in said


def test_a_run_that_ends_well_says_nothing_of_it(tmp_path: Path) -> None:
    program = COMMAND.replace("os.kill(os.getpid(), signal.SIGKILL)", "return original(*arguments, **named)")
    program = program.replace("    def killed", "    original = owner.leave\n\n    def killed")
    path = tmp_path / "program.py"
    text = program.format(owner="pipesgd.ranks", path="Ranks.leave", victim=0, more="")  # after the others
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    said = run_as_ranks(3, path, tmp_path, imports_again=False)
    assert "accuracy" in said
    assert "error" not in said
    assert "warning" not in said


def test_the_store_that_ends_with_rank_0_does_not_hide_whose_process_has_ended(tmp_path: Path) -> None:
    """Without torchrun's agent, rank 0's process holds the store."""
    program = """
        import os, signal, sys, time
        import torch.distributed as dist
        from pipesgd.errors import CommunicationError
        from pipesgd.membership.heartbeat import Standing
        from pipesgd.ranks import Ranks, join

        first = join()
        own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if first.rank == 0 else None
        port = first.all_gather_object("port", None if own is None else own.port)[0]
        store = own or dist.TCPStore("127.0.0.1", port)
        ranks = Ranks(rank=first.rank, world_size=3, store=store, standing=Standing(600.0))
        ranks.watch(lambda error: None)
        while {link.rank for link in ranks._watcher.neighbours._links if link.is_up} != {0, 1, 2} - {ranks.rank}:
            time.sleep(0.02)
        try:
            ranks.all_gather_object("all are connected", 0)
            if ranks.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            ranks.all_gather_object("a value", 0)
        except CommunicationError as error:
            sys.stderr.write(f"caught by rank {ranks.rank}: {error}\\n")
            os._exit(1)
    """
    said = said_by_ranks(program, tmp_path)
    for rank in (1, 2):
        assert f"caught by rank {rank}: rank {rank}: stopped in exchange of a" in said, said
    assert said.count(f": rank 0 {ENDED}") == 2


LOOP = """
    import multiprocessing, os, signal, sys, time
    import torch
    from pipesgd import CommunicationError, Pipelined
    from pipesgd.ranks import current

    def pool():
        if rank != 1:
            return 0
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        return process.pid

    model = torch.nn.Linear(4, 2)
    ranks = current(None)  # half an hour
    rank = ranks.rank
    with Pipelined(model, torch.optim.SGD(model.parameters(), lr=0.1), ranks=ranks) as pipeline:
        def iteration():
            model(torch.ones(3, 4)).sum().backward()
            pipeline.step()
        for _ in range(3):
            iteration()
        thread = pipeline.pipeline.flight.thread
        while {{link.rank for link in ranks._watcher.neighbours._links if link.is_up}} != {{0, 1, 2}} - {{rank}}:
            time.sleep(0.02)
        pipeline.flush()
        child = ranks.all_gather_object("child", {child})[1]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while not thread.failed:  # this rank evaluates: it waits for nobody
            time.sleep(0.02)
        try:
            iteration()
        except CommunicationError as error:
            sys.stderr.write(f"caught by rank {{rank}}: {{error}}\\n")
            if child:
                ranks._calls.run(lambda store: store.add("caught", 1))
                if rank == 0:
                    while ranks._calls.run(lambda store: store.add("caught", 0)) < 2:
                        time.sleep(0.02)
                    os.kill(child, signal.SIGKILL)  # it was alive all the time
            os._exit(1)
"""


@pytest.mark.parametrize(
    "child",
    [
        pytest.param("0", id="no child"),
        pytest.param("(os.fork() or time.sleep(600)) if rank == 1 else 0", id="os.fork"),
        pytest.param("pool()", id="multiprocessing"),
    ],
)
def test_a_loop_of_ones_own_learns_of_a_killed_rank_while_it_waits_for_nobody(child: str, tmp_path: Path) -> None:
    said = said_by_ranks(LOOP.format(child=child), tmp_path)
    for rank in (0, 2):
        assert f"caught by rank {rank}: rank {rank}: stopped in " in said, said
    assert said.count(f"rank 1 {ENDED}") == 2


# ---- in one process ----


class Attended:
    """Neighbours in this process, each attended to by a thread of its own, as the watcher does."""

    def __init__(self, world_size: int):
        self.store = dist.HashStore()
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.all = [Neighbours(rank, world_size, self.lines.put) for rank in range(world_size)]
        self._stop = [threading.Event() for _ in self.all]
        self._threads: dict[int, threading.Thread] = {}

    def begin(self, *ranks: int) -> None:
        for rank in ranks:
            self._threads[rank] = threading.Thread(target=self._attend, args=(rank,))
            self._threads[rank].start()

    def _attend(self, rank: int) -> None:
        while not self._stop[rank].is_set():
            self.all[rank].meet(self.store)
            self.all[rank].wait(0.05)

    def end(self, rank: int) -> None:
        self._stop[rank].set()
        if rank in self._threads:
            self._threads.pop(rank).join()

    def up(self, rank: int) -> set[int | None]:
        return {link.rank for link in self.all[rank]._links if link.is_up}

    def wait_until_all_are_up(self, *ranks: int) -> None:
        wait_until(lambda: all(self.up(rank) == {*ranks} - {rank} for rank in ranks))

    def place(self, rank: int) -> tuple[str, int]:
        wait_until(lambda: self.store.check([f"listens/{rank}"]))
        found = neighbours._decoded(self.store.get(f"listens/{rank}"))
        assert found is not None
        return found[:2]

    def cut(self, rank: int) -> None:
        """Close the connections of ``rank`` as the kernel does when its process ends."""
        self.end(rank)
        for link in self.all[rank]._links:
            neighbours.close(link.sock)
        self.all[rank]._links.clear()


@pytest.fixture
def attended() -> Iterator[Any]:
    made: list[Attended] = []

    def make(world_size: int) -> Attended:
        made.append(Attended(world_size))
        return made[-1]

    yield make
    for one in made:
        for rank, neighbour in enumerate(one.all):
            one.end(rank)
            neighbour.close()


def test_every_rank_is_connected_to_every_other_and_learns_of_an_end_without_a_goodbye(attended: Any) -> None:
    job = attended(5)
    job.begin(3, 1)
    job.wait_until_all_are_up(3, 1)
    job.begin(4, 0, 2)
    job.wait_until_all_are_up(0, 1, 2, 3, 4)
    job.cut(2)
    wait_until(lambda: all(job.all[rank].ended == {2} for rank in (0, 1, 3, 4)))
    assert job.lines.empty()


def test_an_end_after_a_goodbye_is_no_loss(attended: Any) -> None:
    job = attended(3)
    job.begin(0, 1, 2)
    job.wait_until_all_are_up(0, 1, 2)
    job.all[1].say_goodbye()
    job.cut(1)
    wait_until(lambda: job.up(0) == {2} and job.up(2) == {0})
    job.end(0)
    job.end(2)
    assert [one.ended for one in job.all] == [set()] * 3


def test_a_goodbye_that_is_said_while_ranks_connect_is_heard(attended: Any) -> None:
    for _ in range(20):
        job = attended(2)
        job.begin(0, 1)
        job.place(0)
        job.all[1].say_goodbye()
        job.cut(1)
        wait_until(lambda job=job: not job.up(0))
        job.end(0)
        assert job.all[0].ended == set()


def test_strangers_neither_keep_ranks_from_connecting_nor_count_as_ranks(attended: Any) -> None:
    job = attended(3)
    job.begin(0)
    place, chance = job.place(0), random.Random(0)
    strangers = [socket.create_connection(place) for _ in range(300)]
    for index, stranger in enumerate(strangers[::2]):
        greeting = neighbours.GREETING.pack(neighbours.MAGIC, 1, b"no proof".ljust(32))
        noise = chance.randbytes(chance.randrange(1, 5000))
        with contextlib.suppress(OSError):  # it may be refused already
            stranger.sendall((greeting, noise, b"GET / HTTP/1.1\r\n\r\n")[index % 3])
    job.begin(1, 2)
    job.wait_until_all_are_up(0, 1, 2)
    for stranger in strangers:
        stranger.close()
    wait_until(lambda: all(link.rank is not None for link in job.all[0]._links))
    assert job.all[0].ended == set()
    assert job.lines.empty()
    job.cut(2)
    wait_until(lambda: job.all[0].ended == {2})


def test_a_greeting_for_another_rank_is_refused(attended: Any) -> None:
    """A rank that has an address of loopback on another machine may be mistaken for one on this machine."""
    job = attended(3)
    job.begin(0, 1)
    job.wait_until_all_are_up(0, 1)
    host, port = job.place(0)
    token = job.all[0]._token
    for sender, receiver in ((2, 1), (7, 0)):
        proof = neighbours._proof(token, "greeting", sender, receiver)
        with socket.create_connection((host, port)) as one:
            one.sendall(neighbours.GREETING.pack(neighbours.MAGIC, sender, proof))
            one.settimeout(20.0)
            assert one.recv(100) == b""
    assert job.up(0) == {1}


def test_a_rank_that_cannot_be_reached_is_named_in_a_warning(attended: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "CONNECT_SECONDS", 0.3)
    job = attended(3)
    with socket.create_server(("127.0.0.1", 0)) as nobody_answers, socket.socket() as refuses:
        refuses.bind(("127.0.0.1", 0))
        for rank, place in ((1, nobody_answers), (2, refuses)):
            job.store.set(f"listens/{rank}", f'["127.0.0.1", {place.getsockname()[1]}, "{"00" * 32}"]')
        job.begin(0)
        lines = sorted(job.lines.get(timeout=20.0) for _ in range(2))
        assert lines[0].startswith("warning: rank 0 cannot connect to rank 1 (no answer in 0.3 s): that its process")
        assert lines[1].startswith("warning: rank 0 cannot connect to rank 2 (Connection refused): that its process")
        job.end(0)
    assert job.lines.empty()
    assert job.all[0].ended == set()


@pytest.mark.parametrize("value", ["", "no JSON", "[1]", '["name.invalid", 80, "00"]', '["127.0.0.1", 99999, "00"]'])
def test_an_address_that_is_none_is_as_if_there_were_none(attended: Any, value: str) -> None:
    job = attended(2)
    job.store.set("listens/1", value)
    job.begin(0)
    job.place(0)
    job.begin(1)
    job.wait_until_all_are_up(0, 1)
    assert job.all[0].ended == set()


def _leaves_and_ends(ranks: Ranks) -> Any:
    """Let rank 1's watch and process end in order while rank 0 watches on; return rank 0's errors."""
    errors: queue.SimpleQueue[RunError] = queue.SimpleQueue()
    ranks.timeout = 120.0
    stop = ranks.watch(errors.put)
    wait_until(lambda: any(link.is_up for link in ranks._watcher.neighbours._links))
    pid = ranks.all_gather_object("processes", os.getpid())[1]
    if ranks.rank == 0:
        wait_until(lambda: not _is_alive(pid))
        wait_until(lambda: not ranks._watcher.neighbours._links)
    stop()
    return errors.qsize()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_ends_after_its_watch_is_not_missed() -> None:
    assert run_ranks(2, _leaves_and_ends, process_group=False, fresh=True) == [0, 0]


def test_a_watch_that_follows_another_one_is_connected_again() -> None:
    store = dist.HashStore()
    ranks = [Ranks(rank=rank, world_size=2, store=store, standing=Standing(60.0)) for rank in range(2)]
    errors: queue.SimpleQueue[RunError] = queue.SimpleQueue()
    first = [one.watch(errors.put) for one in ranks]
    wait_until(lambda: all(any(link.is_up for link in one._watcher.neighbours._links) for one in ranks))
    first[1]()
    wait_until(lambda: not ranks[0]._watcher.neighbours._links)
    second = ranks[1].watch(errors.put)
    wait_until(lambda: all(any(link.is_up for link in one._watcher.neighbours._links) for one in ranks))
    second()
    first[0]()
    assert errors.empty()


def test_a_forked_child_closes_its_copies_and_does_not_speak_for_its_parent(attended: Any) -> None:
    job = attended(2)
    job.begin(0, 1)
    job.wait_until_all_are_up(0, 1)
    own = {f"socket:[{os.fstat(one.fileno()).st_ino}]" for one in sockets._open}
    assert len(own) >= 8
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        held = _open_files()
        for one in job.all:
            one.say_goodbye()
        os.write(write, f"{len(held & own)} {len(sockets._open)}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"0 0"
    os.close(read)
    os.close(write)
    job.wait_until_all_are_up(0, 1)
    assert [one.ended for one in job.all] == [set(), set()]
    job.cut(1)
    wait_until(lambda: job.all[0].ended == {1})


def _open_files() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one by which the folder is read
            found.add(str(fd.readlink()))
    return found


def test_forks_at_any_moment_hold_no_connection(attended: Any) -> None:
    """A connection that is accepted while the process forks must not stay open in the child."""
    job = attended(8)
    job.begin(*range(8))
    children = []
    for _ in range(20):
        pid = os.fork()
        if not pid:
            threading.Event().wait(30.0)
            os._exit(0)
        children.append(pid)
    try:
        job.wait_until_all_are_up(*range(8))
        job.cut(5)
        wait_until(lambda: all(job.all[rank].ended == {5} for rank in range(8) if rank != 5))
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_loader_workers_that_are_forked_hold_no_connection(attended: Any) -> None:
    job = attended(2)
    job.begin(0, 1)
    job.wait_until_all_are_up(0, 1)
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = iter(torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork"))
    next(loader)
    job.cut(1)
    wait_until(lambda: job.all[0].ended == {1})
    del loader
