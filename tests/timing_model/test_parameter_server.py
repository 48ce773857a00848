"""Parameter servers: their rounds, message by message, and the measured rounds of the log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timing_model.parameter_server import Servers, parameter_server_time
from timing_model.params import LinkParams
from timing_model.simulate_messages import Network, Task, simulate_messages

ROUNDS = 8


def in_turn(link: LinkParams, nbytes: float, workers: int, servers: int, t_compute: float) -> float:
    """Return the time of a steady-state round with dedicated servers, which serve workers one after the other."""
    share = nbytes / servers
    ranks = [*range(workers)]
    worker = [
        *[Task(seconds=t_compute, sends=tuple((workers + server, share) for server in range(servers)))],
        *[Task(source=workers + server) for server in range(servers)],
    ]
    server = [
        *[Task(source=rank) for rank in ranks],
        Task(seconds=workers * share * link.gamma, sends=tuple((rank, share) for rank in ranks)),
    ]
    ends = [
        max(simulate_messages([worker * rounds] * workers + [server * rounds] * servers, Network(link=link)))
        for rounds in (ROUNDS, 2 * ROUNDS)
    ]
    return (ends[1] - ends[0]) / ROUNDS


@given(
    alpha=st.floats(0, 1),
    beta=st.floats(0.001, 1),
    gamma=st.floats(0, 1),
    workers=st.integers(1, 7),
    servers=st.integers(1, 3),
)
def test_served_in_turn_is_the_messages_steady_state(
    alpha: float, beta: float, gamma: float, workers: int, servers: int
) -> None:
    link = LinkParams(alpha=alpha, beta=beta, gamma=gamma, sync=0.0)
    time = parameter_server_time(
        link, 12.0, workers + servers, servers=Servers(number=servers, placement="dedicated"), sharing=0.0
    )
    simulated = in_turn(link, 12.0, workers, servers, 5.0) - 5.0
    assert time.total == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize(
    ("rate", "t_compute", "measured", "sharing"), [(100e6, 0.1177, 3.099, 0.48), (200e6, 0.1177, 1.604, 0.47)]
)
def test_the_logs_measurements_lie_between(rate: float, t_compute: float, measured: float, sharing: float) -> None:
    """The log is experiments/LOG.md, "parameter servers": MLP of 7.2 MB, 4 nodes; 2(p-1) n beta is 3606 and 1803 ms."""
    gradient = 3.606 / 6 * 100e6 / rate
    link = LinkParams(alpha=0.0, beta=gradient / 7.2e6, gamma=0.0, sync=0.0)
    times = [t_compute + parameter_server_time(link, 7.2e6, 4, sharing=share).total for share in (0.0, sharing, 1.0)]
    assert times[0] < measured < times[2]
    assert times[1] == pytest.approx(measured, rel=0.01)


def test_loads_of_cards() -> None:
    """All gradients come in, then all weights go out, over the fullest NIC."""
    link = LinkParams(alpha=0.0, beta=1.0, gamma=0.0, sync=0.0)
    for world_size, servers, placement, load in (
        (4, 1, "colocated", 3.0),
        (4, 2, "colocated", 1.5),
        (4, 4, "colocated", 0.75),
        (4, 3, "colocated", 1.0),
        (5, 1, "dedicated", 4.0),
        (6, 2, "dedicated", 2.0),
        (3, 2, "dedicated", 1.0),
        (1, 1, "colocated", 0.0),
    ):
        time = parameter_server_time(link, 1.0, world_size, servers=Servers(number=servers, placement=placement))
        assert time.total == pytest.approx(2 * load)


def test_as_many_servers_as_ranks_send_what_a_ring_sends() -> None:
    link = LinkParams(alpha=0.0, beta=1.0, gamma=0.5, sync=0.0)
    time = parameter_server_time(link, 8.0, 4, servers=Servers(number=4))
    assert time[:3] == (12.0 + 3.0, 12.0, 3.0)


def test_impossible_servers_are_refused() -> None:
    link = LinkParams(alpha=0.0, beta=1.0, gamma=0.0, sync=0.0)
    for options, message in (
        ({"servers": {"number": 5}}, "servers must be at most 4 with 4 ranks and placement colocated; got 5"),
        (
            {"servers": {"number": 4, "placement": "dedicated"}},
            "servers must be at most 3 with 4 ranks and placement dedicated; got 4",
        ),
        (
            {"servers": {"placement": "elsewhere"}},
            "server_placement must be one of colocated, dedicated; got elsewhere",
        ),
        ({"sharing": 1.5}, "sharing must be at most 1; got 1.5"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            parameter_server_time(link, 1.0, 4, **options | {"servers": Servers(**options.get("servers", {}))})
