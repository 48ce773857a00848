"""A store sealed with the secret of the job: what a stranger writes to it, or deletes, changes nothing but the time."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from _rank_threads import in_threads
from _waiting import wait_until

from pipesgd import keys
from pipesgd.errors import CommunicationError, DeadlineExceeded, RunError, UserInputError
from pipesgd.membership import heartbeat, sealed, session, watcher
from pipesgd.membership.heartbeat import Standing
from pipesgd.membership.sealed import Sealed, part, stored
from pipesgd.membership.secret import VARIABLE, Secret, job_secret
from pipesgd.membership.session import open_session
from pipesgd.membership.store import present
from pipesgd.ranks import Ranks

KEY = "pipesgd/a key"


@pytest.fixture(autouse=True)
def counted_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Report wrong values after a moment, and let the test wait for the thread that does."""
    monkeypatch.setattr(sealed, "COUNT_SECONDS", 0.01)
    monkeypatch.setattr(sealed, "RENEW_SECONDS", 0.0)
    yield
    for thread in threading.enumerate():
        if thread.name == "forged values":
            thread.join()


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return made(tmp_path / "job.key")


def made(path: Path) -> Secret:
    keys.make(path)
    found = job_secret(path)
    assert found is not None
    return found


def test_no_file_is_left_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, *options: object, **more: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(keys.os, "fdopen", full)
    with pytest.raises(UserInputError, match=r"^FILE must be one that can be written; got .*No space left on device"):
        keys.make(tmp_path / "secret")
    assert not list(tmp_path.iterdir())


def rank_store(store: dist.Store, secret: Secret | None) -> dist.Store:
    return sealed.sealed(store, secret)


def test_ranks_read_what_a_rank_has_written(secret: Secret) -> None:
    store = dist.HashStore()
    one, other = rank_store(store, secret), rank_store(store, secret)
    one.set("a key", "a value")
    part(one, "a session").set("bytes", b"\0\xff")  # type: ignore[arg-type]
    assert other.get("a key") == b"a value"
    assert present(part(other, "a session"), ["bytes", "none"]) == {"bytes": b"\0\xff"}
    one.delete_key("a key")
    assert not other.check(["a key"])


WRONG: dict[str, Callable[[bytes, bytes], bytes]] = {
    "without a seal": lambda new, old: b"forged",
    "cut short": lambda new, old: new[: sealed.SEAL.size - 1],
    "with another value": lambda new, old: new[: sealed.SEAL.size] + b"forged",
    "with a bit changed": lambda new, old: new[:20] + bytes([new[20] ^ 1]) + new[21:],
    "with a later number": lambda new, old: new[:48] + (1 << 40).to_bytes(8, "little") + new[56:],
    "replaced since": lambda new, old: old,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_value_is_missing_and_its_writer_puts_it_right(
    wrong: str, secret: Secret, capfd: pytest.CaptureFixture[str]
) -> None:
    raw = dist.HashStore()
    writer, reader = rank_store(raw, secret), rank_store(raw, secret)
    writer.set("a key", "old")
    old = raw.get(KEY)
    writer.set("a key", "new")
    assert reader.get("a key") == b"new"
    raw.set(KEY, WRONG[wrong](raw.get(KEY), old))  # type: ignore[arg-type]
    assert not reader.check(["a key"])
    assert sealed.forged(reader, ["a key", "another key"]) == ["a key"]
    assert present(reader, ["a key"]) == {}
    writer.check(["something else"])
    assert reader.get("a key") == b"new"
    assert sealed.forged(reader, ["a key"]) == []


@pytest.mark.parametrize("place", ["pipesgd/another key", "pipesgd/another session/a key"])
def test_a_value_from_another_place_is_missing(place: str, secret: Secret) -> None:
    raw = dist.HashStore()
    store = rank_store(raw, secret)
    store.set("a key", "a value")
    raw.set(place, raw.get(KEY))  # type: ignore[arg-type]
    assert not store.check([place.removeprefix("pipesgd/")])


def test_what_is_deleted_is_written_again_but_for_what_its_writer_has_deleted(secret: Secret) -> None:
    raw = dist.HashStore()
    store = rank_store(raw, secret)
    store.set("a key", "a value")
    store.set("another key", "")
    store.delete_key("another key")
    raw.delete_key(KEY)
    store.check(["something else"])
    assert raw.check([KEY])
    assert not raw.check(["pipesgd/another key"])


def test_what_another_rank_has_written_since_is_not_written_over(secret: Secret) -> None:
    raw = dist.HashStore()
    one, other = rank_store(raw, secret), rank_store(raw, secret)
    one.set("a failure", "of one")
    other.set("a failure", "of the other")
    one.check(["something else"])
    assert one.get("a failure") == b"of the other"


def test_wrong_values_are_counted_in_one_line(
    secret: Secret, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed, "COUNT_SECONDS", 1.0)
    raw = dist.HashStore()
    store = rank_store(raw, secret)
    for value in ("1", "1", "2", "3"):  # the first is looked at twice
        raw.set(KEY, value)
        store.check(["a key"])
    wait_until(lambda: not any(thread.name == "forged values" for thread in threading.enumerate()))
    raw.set(KEY, "4")
    store.check(["a key"])
    said = capfd.readouterr().err
    assert said.startswith("warning: rank 0: 3 values were forged in the store of the job, first of 'pipesgd/a key': ")
    assert said.count("\n") == 1


def test_a_wait_for_a_value_that_stays_wrong_ends_and_says_so(secret: Secret) -> None:
    raw = dist.HashStore()
    raw.set(KEY, "forged")
    with pytest.raises(dist.DistStoreError, match=r"timed out after 0\.1 s for pipesgd/a key \(forged\)"):
        rank_store(raw, secret).wait(["a key"], timedelta(seconds=0.1))


@contextlib.contextmanager
def repeatedly(act: Callable[[], None]) -> Iterator[None]:
    """Let a thread do this again and again."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.0005):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
def test_addresses_of_gloo_are_sealed_and_forged_ones_are_not_used(secret: Secret) -> None:
    """The first value of each key is overwritten at once, with the address of another rank, sealed for another key."""
    raw = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sums: list[Any] = [None] * 2
    forged: set[str] = set()
    groups = []

    def forge() -> None:
        for key in raw_of_stranger.list_keys():  # type: ignore[attr-defined]  # not in torch's stubs
            if key not in forged:
                forged.add(key)
                raw_of_stranger.set(key, b"x" * 200)  # type: ignore[arg-type]

    def rank(number: int) -> None:
        store = part(rank_store(raw.clone(), secret), "a group")  # type: ignore[attr-defined]
        watched = store.clone()  # type: ignore[attr-defined]
        # As the watcher of every job does: who waits no more must write again what another one has not read.
        with repeatedly(lambda: watched.check(["a beat"])):
            group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=20))
            groups.append(group)
            tensor = torch.full((3,), number + 1.0)
            group.allreduce([tensor]).wait()
        sums[number] = tensor.tolist()

    raw_of_stranger = raw.clone()  # type: ignore[attr-defined]
    with repeatedly(forge):
        in_threads(2, rank, 20.0)
    assert sums == [[3.0] * 3] * 2
    assert len(forged) >= 2


def exchange(secret: Secret, raw: dist.Store, act: Callable[[dist.Store], None], timeout: float) -> list[Any]:
    """Return what two ranks get of an exchange, or their errors, while a stranger acts on the store."""
    answers: list[Any] = [None] * 2

    def rank(number: int) -> None:
        ranks = Ranks(rank=number, world_size=2, store=rank_store(raw, secret), standing=Standing(timeout))
        try:
            answers[number] = [ranks.all_gather_object(what, [number]) for what in ("first", "second")]
        except CommunicationError as error:
            answers[number] = error

    with repeatedly(lambda: act(raw)):
        in_threads(2, rank, 20.0)
    return answers


FIRST = "pipesgd/exchange of 2/1/first/{}"


@pytest.mark.parametrize("is_deleted", [False, True])
def test_an_exchange_that_is_overwritten_once_is_completed(is_deleted: bool, secret: Secret) -> None:
    done: set[str] = set()

    def act(raw: dist.Store) -> None:
        for key in (FIRST.format(0), FIRST.format(1)):
            if key not in done and raw.check([key]):
                done.add(key)
                if is_deleted:
                    raw.delete_key(key)
                else:
                    raw.set(key, "[[7]]")

    assert exchange(secret, dist.HashStore(), act, 20.0) == [[[[0], [1]]] * 2] * 2


class Overwritten(dist.HashStore):
    """A store in which somebody overwrites a value faster than anybody reads it."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return b"[7]" if key == FIRST.format(1) else super().compare_set(key, expected, desired)


class Deleted(dist.HashStore):
    """A store in which somebody deletes a value after it was found."""

    def check(self, keys: list[str]) -> bool:
        return True


def test_a_value_that_is_deleted_after_it_was_found_is_waited_for_by_nobody() -> None:
    store = Deleted()
    store.set("kept", "1")
    assert stored(store, ["kept", "deleted"]) == {"kept": b"1"}
    assert not dist.HashStore.check(store, ["deleted"]), "nothing was written"


def test_an_exchange_that_is_overwritten_again_and_again_fails_with_the_word(secret: Secret) -> None:
    answers = exchange(secret, Overwritten(), lambda raw: None, 0.5)
    assert isinstance(answers[0], DeadlineExceeded)
    assert str(answers[0]).endswith(
        "from rank 1; the store's value of 'exchange of 2/1/first/1' is forged: somebody else overwrites it"
    )


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make heartbeats 50 times as fast, and silence count ten times as early, by the same rules."""
    for module in (watcher, heartbeat):
        monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(heartbeat, "SHORTEST_SILENCE", 0.5)


FORGED_ALWAYS = {"pipesgd/failure/1": '["x", null]', "pipesgd/a failure": "", "pipesgd/stopping": "SIGTERM"}
FORGED_BEATS = {"pipesgd/beat/1": '[1, null, "x", false, 0.0]', "pipesgd/news": "[1, [[1, 99.0]], false]"}


@pytest.mark.slow
@pytest.mark.parametrize("replayed", [False, True])
def test_forged_beats_news_and_failures_end_no_healthy_job(fast: None, replayed: bool, secret: Secret) -> None:
    """The silence after which a rank is lost passes three times. Old heartbeats replace newer ones at once."""
    raw = dist.HashStore()
    found: list[RunError] = []
    stops: list[Callable[[], None]] = []
    old: dict[str, bytes] = {}

    def act() -> None:
        for key, value in {**FORGED_ALWAYS, **FORGED_BEATS}.items():
            if replayed and key in FORGED_BEATS and raw.check([key]):
                value = old.setdefault(key, raw.get(key))  # type: ignore[assignment]
            raw.set(key, value)

    all_ranks = [
        Ranks(rank=rank, world_size=3, store=rank_store(raw, secret), secret=secret, standing=Standing(2.0))
        for rank in range(3)
    ]
    with repeatedly(act):
        stops += [ranks.watch(found.append) for ranks in all_ranks]
        time.sleep(6.0)
        found_until_now = list(found)
        silent = [ranks.silent() for ranks in all_ranks]
    in_threads(3, lambda rank: stops[rank](), 20.0)
    assert (found_until_now, silent) == ([], [{}, {}, {}])


@pytest.mark.slow
def test_a_silent_rank_is_still_lost_with_a_secret(fast: None, secret: Secret) -> None:
    raw = dist.HashStore()
    found: list[RunError] = []
    ranks = Ranks(rank=0, world_size=2, store=rank_store(raw, secret), standing=Standing(0.5))
    stop = ranks.watch(found.append)
    wait_until(lambda: bool(found))
    stop()
    assert "no heartbeat from rank 1" in str(found[0])


@pytest.mark.slow
@pytest.mark.parametrize("of_rank_1", ["another secret", "none"])
@pytest.mark.parametrize("swapped", [False, True])
def test_ranks_with_different_secrets_are_refused_on_both_sides(
    of_rank_1: str, swapped: bool, secret: Secret, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FORGED_SECONDS", 0.3)
    raw = dist.HashStore()
    secrets = [secret, made(tmp_path / "another.key") if of_rank_1 == "another secret" else None]
    if swapped:
        secrets.reverse()
    answers: list[str] = ["", ""]

    def rank(number: int) -> None:
        with pytest.raises(UserInputError) as error:
            open_session(rank_store(raw, secrets[number]), number, 2, 20.0)
        answers[number] = str(error.value)

    in_threads(2, rank, 10.0)
    assert answers == [
        f"secret-file must be the same on all ranks, or be given on none; got a name of rank {other} in the store that "
        "has another secret's seal, or is forged"
        for other in (1, 0)
    ]


def test_a_name_that_is_forged_for_a_moment_is_no_reason_to_refuse(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = dist.HashStore()
    sessions: list[Any] = [None] * 2
    done: set[str] = set()

    def act() -> None:
        for key in ("pipesgd/name of rank 0", "pipesgd/name of rank 1"):
            if key not in done and raw.check([key]):
                done.add(key)
                raw.set(key, "forged")

    def rank(number: int) -> None:
        sessions[number] = open_session(rank_store(raw, secret), number, 2, 20.0)

    with repeatedly(act):
        in_threads(2, rank, 20.0)
    sessions[0].set("a key", "a value")
    assert sessions[1].get("a key") == b"a value"


# ---- the file ----


def test_a_secret_is_made_once_and_read_by_its_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.key"
    assert keys.main(["keys", "new", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: a new secret; copy it")
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    assert keys.main(["keys", "new", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"error: FILE must not exist yet, since a running job may use its secret; got {path}\n"
    )
    assert path.read_bytes() == before
    assert before.strip().decode() not in repr(job_secret(path))
    assert made(tmp_path / "another.key").key("x") != made(tmp_path / "a third.key").key("x")


@pytest.mark.parametrize("words", [[], ["--file"], [""], ["a", "b"], ["--tls"], ["--tls", "a", "--tls"]])
def test_other_words_are_refused_in_a_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert keys.main(["keys", "new", *words]) == 2
    assert capsys.readouterr().err == (
        f"error: keys new must be given the name of one new file, and may have --tls; got {' '.join(words)!r}\n"
    )
    assert keys.main(["keys", "nwe", "job.key"]) == 2
    assert "(did you mean new?)" in capsys.readouterr().err


def test_a_file_that_is_no_secret_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.key"
    with pytest.raises(UserInputError, match=r"secret-file must be a file that can be read; got .* 'pipesgd keys new"):
        job_secret(path)
    for text in ("", "secret", "0" * 63, "0" * 65, "g" * 64, "0" * 64 + "\n\n"):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(
            UserInputError, match=r"must hold a secret of 32 bytes, as 'pipesgd keys new job.key' makes"
        ):
            job_secret(path)
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(UserInputError, match=rf"readable by its owner alone \(chmod 600 .*\); got mode {mode:04o}"):
            job_secret(path)
    with pytest.raises(UserInputError, match=r"got .*, no file|Is a directory"):
        job_secret(tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UserInputError, match=f"{VARIABLE} must be a file that can be read"):
        job_secret()
    monkeypatch.delenv(VARIABLE)
    assert job_secret() is None


def test_a_store_without_a_secret_is_torchs_own() -> None:
    store = rank_store(dist.HashStore(), None)
    assert not isinstance(store, Sealed)
    assert sealed.forged(store, ["a key"]) == []
    assert type(part(store, "a session")) is dist.PrefixStore
