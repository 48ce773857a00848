"""Messages between members as bytes."""

from __future__ import annotations

from typing import Any

import pytest

from pipesgd.elastic.letters import HEAD, Goodbye, LeftOut, More, Piece, Result, Taken, Value, Wish, decoded, encode
from pipesgd.membership.generation import NO_BALLOT, Ballot, first_record, next_record
from pipesgd.membership.messages import (
    Accept,
    Accepted,
    Beat,
    Decided,
    Fetch,
    Level,
    Prepare,
    Promise,
    Refuse,
    Results,
    Suspect,
)
from pipesgd.membership.store import MalformedValue

RECORD = next_record(
    first_record(range(4), 7, (3, 5), 40), (0, 2), (), base=11, settled=9, begun=10, why={1: "its process has ended"}
)
BALLOT = Ballot(3, 2)
LETTERS = [
    Beat(RECORD, 4, None, 0.25, 11),
    Beat(RECORD, 4, 3, 0.0, 11),
    Suspect(RECORD),
    Prepare(RECORD, BALLOT),
    Promise(2, BALLOT, None, NO_BALLOT, 11, 10, NO_BALLOT, leaves=True, settled=9),
    Promise(2, BALLOT, RECORD, Ballot(2, 0), 11, 10, NO_BALLOT, leaves=False, settled=9),
    Refuse(2, BALLOT),
    Level(2, BALLOT, 11, 0),
    Fetch(2, BALLOT, 11, 11),
    Accept(2, BALLOT, RECORD),
    Accepted(2, BALLOT),
    Decided(RECORD),
    Value(2, "exchange of 3/1/pace", "[1.5]"),
    Value(2, "exchange of 3/1/pace", None),
    Wish("SIGTERM"),
    Goodbye(),
    Piece(3, b"abcd"),
    More(),
    LeftOut((3, 4)),
    Taken(2, 0),
]


def _read(data: bytes) -> Any:
    length, behind = HEAD.unpack_from(data)
    assert len(data) == HEAD.size + length + behind
    return decoded(data[HEAD.size : HEAD.size + length], data[HEAD.size + length :])


@pytest.mark.parametrize("letter", LETTERS, ids=lambda letter: type(letter).__name__)
def test_a_letter_arrives_as_it_was(letter: Any) -> None:
    assert _read(b"".join(encode(letter))) == letter


def test_a_result_arrives_with_its_bytes() -> None:
    sent = Results(
        2, BALLOT, {11: Result([[0.1, None], True, 0.3], (b"abc", memoryview(b"defg"))), 12: Result(None)}, 9
    )
    got = _read(b"".join(encode(sent)))
    assert (got.generation, got.ballot, got.settled) == (2, BALLOT, 9)
    assert {unit: (one.text, [bytes(part) for part in one.parts]) for unit, one in got.results.items()} == {
        11: ([[0.1, None], True, 0.3], [b"abc", b"defg"]),
        12: (None, []),
    }


def test_parts_are_those_that_pieces_have_brought() -> None:
    assert LeftOut((3, 4)).parts_of(b"abcdefg") == [b"abc", b"defg"]
    assert LeftOut((3, 4)).parts_of(b"abcdef") is None


@pytest.mark.parametrize(
    ("text", "behind"),
    [
        (b"what", b""),
        (b"[]", b""),
        (b'["Beat", {}]', b""),
        (b'["Open", {}]', b""),
        (b'["Wish", {"signal": 3}]', b""),
        (b'["Wish", {"signal": "SIGTERM", "more": 1}]', b""),
        (b'["Accepted", {"generation": true, "ballot": [1, 2]}]', b""),
        (b'["Accepted", {"generation": 1, "ballot": [1]}]', b""),
        (b'["Suspect", {"record": {"number": 1}}]', b""),
        (b'["Results", {"generation": 1, "ballot": [1, 2], "results": {"4": [null, [3]]}, "settled": 1}]', b"ab"),
        (b'["Piece", {"number": 0, "data": 3}]', b"abcd"),
        (b'["LeftOut", {"lengths": [3, "4"]}]', b""),
        (b"[" * 100_000, b""),
    ],
)
def test_what_is_no_letter_is_refused(text: bytes, behind: bytes) -> None:
    with pytest.raises(MalformedValue):
        decoded(text, behind)
