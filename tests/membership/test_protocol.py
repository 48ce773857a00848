"""Changes of the members, step by step: each message is delivered when the test says so."""

from __future__ import annotations

import pytest

from pipesgd.membership.change import State, is_led
from pipesgd.membership.generation import Ballot, first_record, is_quorum, next_record
from pipesgd.membership.messages import Accept, Beat, Level, Prepare, Promise, Refuse, Results, Send, Suspect
from pipesgd.membership.peers import LEASE_SECONDS, ROUND_TRIPS, SHORTEST_RETRY, Peers
from pipesgd.membership.protocol import Member
from tests.membership._mistakes import BaseLowered, LateResults, VoidValuesBelieved
from tests.membership._ring import UNIT, Ring


def test_those_who_survive_continue_from_the_newest_unit_that_one_of_them_holds() -> None:
    ring = Ring(4, ahead=[2])
    ring.kill(1, told=[0, 2, 3])
    ring.deliver_all()
    record = ring.entered[0]
    assert (record.number, record.members, record.base) == (1, (0, 2, 3), UNIT)
    assert [(one.member, one.why) for one in record.lost] == [(1, "its process has ended")]
    assert ring.entered == dict.fromkeys((0, 2, 3), record)
    assert all(ring.results[who] == {UNIT: "result of 0"} for who in (0, 2, 3))
    assert all(ring.members[who].state is State.ACTIVE for who in (0, 2, 3))


def test_the_samples_of_the_lost_are_given_out_again_and_no_others() -> None:
    old = first_record(range(3))
    new = next_record(old, (0, 2), (), base=0, settled=1, begun=3, why={})
    assert new.lost[0].slices == (4, 7), "iterations 1 and 2 are above the base, and begun"
    assert [new.slice_of(i, who) for i in (1, 2) for who in (0, 2)] == [3, 5, 6, 8]
    assert [new.slice_of(i, who) for i in (3, 4) for who in (0, 2)] == [4, 7, 9, 10]
    assert new.slice_of(1, 1) == 4
    assert new.contributors(1) == (0, 2)
    newer = next_record(new, (0,), (7,), base=1, settled=2, begun=3, why={})
    assert [newer.slice_of(2, who) for who in (0, 7)] == [6, None]
    assert [newer.slice_of(3, who) for who in (0, 7)] == [4, 7]
    assert newer.spans[-1].rest(4) == ((8,), 9), "what rank 2 had of iteration 2"


@pytest.mark.parametrize(
    ("those", "members", "certain", "expected"),
    [
        ([0, 1], 3, [], True),
        ([1], 3, [], False),
        ([0, 3], 4, [], True),
        ([2, 3], 4, [], False),
        ([2, 3], 4, [0, 1], True),
        ([2, 3], 4, [0], False),
        ([], 1, [0], False),
    ],
)
def test_a_majority_or_half_with_the_senior_or_all_but_the_certainly_dead_may_decide(
    those: list[int], members: int, certain: list[int], expected: bool
) -> None:
    assert is_quorum(those, tuple(range(members)), set(certain)) is expected


def test_of_two_the_senior_continues_and_the_other_is_stuck() -> None:
    ring = Ring(2)
    ring.pass_time(4, among=[0])
    assert ring.entered[0].members == (0,)
    assert "silent for 3." in ring.entered[0].lost[0].why
    ring.pass_time(12, among=[1])
    assert ring.members[1].state is State.STUCK
    assert 1 not in ring.entered
    ring.members[1].contacts = [0]
    ring.pass_time(2, among=[0, 1])
    assert "generation 1 is without it" in ring.left[1].why
    assert ring.members[1].state is State.OUT


class _SlowResults(Ring):
    """Members whose results are on their way as long as they are large."""

    are_large = True

    def act(self, who: int) -> None:
        super().act(who)
        for wire in self.wires.values():
            for message in [one for one in wire if isinstance(one, Results) and self.are_large]:
                wire.remove(message)


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_a_change_in_which_a_large_result_is_on_its_way_is_led(holder: int) -> None:
    """Without one it is not: if messages do not cross, nobody is waited for."""
    ring = _SlowResults(4, ahead=[holder])
    ring.kill(3, told=[0, 1, 2])
    led: set[int] = set(range(3))
    for _ in range(60):
        ring.pass_time(1, among=range(3))
        led -= {who for who in led if not is_led(ring.members[who].vote, ring.members[who].proposal, ring.now)}
        assert {ring.members[who].state for who in range(3)} <= {State.FROZEN, State.STUCK}
    assert led == {0, 1, 2}
    ring.are_large = False
    ring.pass_time(4, among=range(3))
    assert ring.entered[0].members == (0, 1, 2)
    ring.kill(1, told=[0, 2])
    ring.kill(2, told=[])
    ring.pass_time(2, among=[0])
    assert not is_led(ring.members[0].vote, ring.members[0].proposal, ring.now)


@pytest.mark.parametrize(("seconds", "continues"), [(1, True), (3, False)])
def test_of_two_the_other_continues_only_if_the_senior_died_within_its_lease(seconds: int, continues: bool) -> None:
    ring = Ring(2)
    ring.pass_time(3, among=[0, 1])
    ring.lose(0)
    ring.now += seconds
    ring.kill(0, told=[1])
    assert (1 in ring.entered) is continues
    assert (1 in ring.members[1].peers.certain) is False
    assert (0 in ring.members[1].peers.certain) is continues


def test_a_majority_continues_without_those_who_are_cut_off() -> None:
    ring = Ring(5)
    ring.pass_time(5, among=[1, 2, 4])
    ring.pass_time(8, among=[0, 3])
    assert ring.entered[1].members == (1, 2, 4)
    assert set(ring.entered) == {1, 2, 4}
    ring.deliver_all()
    assert set(ring.left) == {0, 3}


def test_a_broken_connection_makes_another_generation_of_the_same_members() -> None:
    ring = Ring(3)
    ring.members[2].broken(1, ring.now)
    ring.act(2)
    assert isinstance(ring.deliver(2, 0), Suspect)
    ring.deliver_all()
    assert {record.members for record in ring.entered.values()} == {(0, 1, 2)}
    assert len(ring.entered) == 3


def test_a_process_that_was_stopped_accuses_nobody() -> None:
    ring = Ring(2)
    ring.pass_time(2, among=[0, 1])
    ring.now += 60
    ring.tick(0)
    ring.tick(1)
    ring.deliver_all()
    assert ring.entered == {}


def test_fewer_than_the_least_number_pause() -> None:
    ring = Ring(3, least=2)
    ring.kill(1, told=[0, 2])
    ring.deliver_all()
    assert ring.members[0].state is State.ACTIVE
    ring.kill(2, told=[0])
    assert ring.members[0].state is State.PAUSED


def test_who_asks_to_leave_is_left_out_after_it_has_handed_its_result_over() -> None:
    ring = Ring(3, ahead=[1])
    ring.members[1].leave(ring.now)
    ring.act(1)
    ring.deliver_all()
    assert ring.entered[0].members == (0, 2)
    assert ring.entered[0].base == UNIT
    assert ring.entered[0].lost[0].why == "it asked to leave"
    assert set(ring.left) == {1}


def test_nobody_leaves_if_nobody_would_stay() -> None:
    ring = Ring(2)
    for who in (0, 1):
        ring.members[who].leave(ring.now)
        ring.act(who)
    ring.pass_time(6, among=[0, 1])
    assert ring.entered[0].members == ring.entered[1].members == (0, 1)
    assert ring.left == {}


def test_a_promise_waits_until_the_sums_have_ended() -> None:
    member = Member(1, first_record(range(2)), 0.0)
    prepare = Prepare(first_record(range(2)), Ballot(3, 0))
    member.receive(0, prepare, 0.0)
    assert [type(action).__name__ for action in member.actions] == ["Stop"]
    member.holds(UNIT, 0.0)
    member.stopped(2, 0.0)
    match member.actions[-1]:
        case Send(to=0, message=Promise() as promise):
            assert (promise.newest, promise.begun) == (UNIT, 2)
        case action:
            pytest.fail(f"got {action}")


def test_a_lower_ballot_is_refused_and_given_up() -> None:
    ring = Ring(3)
    for who in (2, 1):
        ring.members[who]._propose(ring.now)
        ring.act(who)
    assert isinstance(ring.deliver(1, 2), Prepare)
    assert ring.members[1].proposal is not None
    assert isinstance(ring.deliver(2, 1), Prepare)
    assert ring.members[1].proposal is None, "it has promised the higher ballot"
    assert ring.deliver(2, 1) == Refuse(0, Ballot(1, 2))
    ring.deliver_all()
    assert len(ring.entered) == 3
    assert {record.number for record in ring.entered.values()} == {1}


def test_retries_follow_the_measured_round_trips() -> None:
    peers = Peers(0, 0.0)
    assert peers.retry_seconds([1], 0.0) == SHORTEST_RETRY
    record = first_record(range(2))
    for number, trip in enumerate((0.5, 0.5, 20.0)):
        now = 100.0 * number
        count = peers.count_beat(now)
        beat = Beat(record, 0, count, 2.0, -1)
        peers.hear_beat(1, beat, now + trip + 2.0)
        peers.hear_beat(1, beat, now + trip + 50.0)
    assert peers.retry_seconds([1], 0.0) == ROUND_TRIPS * 0.5, "one long trip, and repeated echoes, do not count"
    peers.bury(1, 1000.0)
    assert peers.retry_seconds([1], 1000.0) == SHORTEST_RETRY


def test_a_lease_begins_when_the_heartbeat_that_was_echoed_was_sent() -> None:
    for seconds, certain in ((LEASE_SECONDS - 0.1, {1}), (LEASE_SECONDS + 0.1, set())):
        peers = Peers(0, 0.0)
        count = peers.count_beat(10.0)
        peers.count_beat(12.0)
        peers.hear_beat(1, Beat(first_record(range(2)), 0, count, 0.0, -1), 12.5)
        peers.bury(1, 10.0 + seconds)
        assert peers.certain == certain


def test_a_longer_silence_has_a_longer_lease() -> None:
    for seconds, certain in ((27.0, {1}), (29.0, set())):
        peers = Peers(0, 0.0, silence=30.0)
        count = peers.count_beat(10.0)
        peers.hear(1, 10.0)
        peers.hear_beat(1, Beat(first_record(range(2)), 0, count, 0.0, -1), 10.5)
        assert [peers.is_lost(1, 10.0 + silent) for silent in (29.9, 30.1)] == [False, True]
        peers.bury(1, 10.0 + seconds)
        assert peers.certain == certain


# ---- Rules that random schedules do not reach: each has a member that breaks it


def asked_to_level(member_class: type[Member], broken: int) -> Ring:
    """Return five members of which the proposer has asked the last one, which is a unit ahead, for its result."""
    ring = Ring(5, ahead=[4], member_class=member_class)
    ring.members[0].broken(broken, ring.now)
    ring.act(0)
    for who in (1, 2, 3, 4):
        ring.deliver(0, who)
    for who in (1, 2, 3, 4):
        ring.deliver(who, 0)
    assert isinstance(ring.deliver(0, 1), Level)
    ring.deliver(1, 4)
    return ring


def levelled_too_late(member_class: type[Member]) -> Ring:
    """Let results of a ballot arrive after another ballot has decided on less."""
    ring = asked_to_level(member_class, broken=4)
    assert isinstance(ring.wires[4, 1][0], Results)
    late = ring.wires[4, 1].popleft()
    # The proposer and the holder are lost: the next one begins another ballot, which finds nobody with the unit.
    for who in (4, 0):
        ring.kill(who, told=[1, 2, 3])
    for who in (2, 3):
        assert isinstance(ring.deliver(who, 1), Suspect)
        assert isinstance(ring.deliver(1, who), Prepare)
        ring.deliver(who, 1)
    assert isinstance(ring.wires[1, 2][0], Accept)
    ring.members[1].receive(4, late, ring.now)
    ring.act(1)
    ring.deliver_all()
    return ring


def test_who_leads_a_change_and_dies_is_followed_at_once() -> None:
    ring = Ring(4)
    ring.members[0].broken(1, ring.now)
    ring.act(0)
    for who in (1, 2, 3):
        ring.deliver(0, who)
    ring.kill(0, told=[1, 2, 3])
    ring.deliver_all()
    assert [ring.entered[who].members for who in (1, 2, 3)] == [(1, 2, 3)] * 3, "no time has passed"


def test_results_of_an_older_ballot_do_not_count() -> None:
    ring = levelled_too_late(Member)
    assert ring.entered[2].base == UNIT - 1
    assert set(ring.entered) == {1, 2, 3}
    broken = levelled_too_late(LateResults)
    assert set(broken.entered) == {2, 3}, "what it holds is not what it has promised"
    assert broken.left[1].unfit_for == broken.entered[2]


def accepted_before_a_later_ballot_levelled(member_class: type[Member]) -> Ring:
    """Let a proposer come back whose own value is older than a ballot that has levelled others to more."""
    ring = Ring(5, member_class=member_class)
    ring.members[0].peers.dead |= {3, 4}  # as it believes
    ring.members[0]._propose(ring.now)
    ring.act(0)
    ring.deliver(0, 1)
    ring.deliver(0, 2)
    ring.deliver(1, 0)
    ring.deliver(2, 0)
    assert isinstance(ring.wires[0, 1][0], Accept)
    ring.lose(0)  # which has accepted its value alone
    ring.complete(3, UNIT)  # a rank that was stopped, and whose sockets held all of the unit
    ring.members[3].peers.dead.add(0)
    ring.members[3].vote.promised = ring.members[1].vote.promised
    ring.members[3]._propose(ring.now)
    ring.act(3)
    for who in (1, 2, 4):
        ring.deliver(3, who)
        ring.deliver(who, 3)
    for who in (1, 2):
        assert isinstance(ring.deliver(3, who), Level)
        ring.deliver(who, 3)
        assert isinstance(ring.deliver(3, who), Results)
    for who in (3, 4):
        ring.kill(who, told=[0, 1, 2])
    ring.pass_time(9, among=[0, 1, 2])
    return ring


def test_a_value_is_void_once_a_later_ballot_has_levelled() -> None:
    ring = accepted_before_a_later_ballot_levelled(Member)
    assert [ring.entered[who].base for who in (0, 1, 2)] == [UNIT] * 3
    assert all(UNIT in ring.results[who] for who in (0, 1, 2))
    broken = accepted_before_a_later_ballot_levelled(VoidValuesBelieved)
    assert [broken.entered[who].base for who in (0, 1, 2)] == [UNIT - 1] * 3
    assert [UNIT in broken.results[who] for who in (0, 1, 2)] == [False, True, True], "their weights differ"


def holder_dies_while_it_levels(member_class: type[Member]) -> Ring:
    """Let the holder of the newest result die after one member has got it, and before the proposer hears of that."""
    ring = asked_to_level(member_class, broken=1)
    assert isinstance(ring.deliver(4, 1), Results)
    ring.kill(4, told=[0])
    ring.deliver_all()
    return ring


def test_the_base_never_falls_within_a_ballot() -> None:
    ring = holder_dies_while_it_levels(Member)
    assert [ring.entered[who].base for who in (0, 1, 2, 3)] == [UNIT] * 4
    broken = holder_dies_while_it_levels(BaseLowered)
    assert [broken.entered[who].base for who in (0, 2, 3)] == [UNIT - 1] * 3
    assert broken.left[1].unfit_for == broken.entered[0], "it was levelled for nothing, and must leave"
