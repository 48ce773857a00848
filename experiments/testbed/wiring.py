"""Shell commands that make the switch, the nodes and the cables between them. Nothing is run here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .links import MTU, Link, packets_at_once, token_bucket

NETWORK, MOST_NODES = "10.77.0", 254
SWITCH = "switch"
NOWHERE = "02:00:00:00:00:01"
"""Hardware address that no node has."""
NETEM, DELAY_LINE = "netem", "delay line"
"""Two ways to make latency and loss."""

QUIET = "conf=/proc/sys/net/ipv6/conf; [ ! -e $conf ] || echo 1 > $conf/default/disable_ipv6"
"""Command that disables IPv6 on the interfaces to come, so that they carry only what processes send."""

CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
CONGESTION_CONTROLS = ("cubic", "reno")
"""TCP congestion controls for the nodes: the first that the kernel lets a namespace choose, else this machine's.

Hosts have cubic unless somebody changed it; reno is in every kernel. bbr, which some machines default to, loses
5 to 15 % of a link between two all-reduces, since it probes for a rate while there is nothing to send.
"""


def address(node: int) -> str:
    """Return the IPv4 address of ``node``."""
    return f"{NETWORK}.{node + 1}"


def names(nodes: int) -> Iterator[str]:
    """Yield commands that give the addresses their names inside the testbed."""
    # torch asks for the name of every peer, often as an IPv6 address. No name server can be reached, and waiting
    # for one can take 5 s each.
    yield "cat /etc/hosts > /run/hosts"
    for node in range(nodes):
        yield f"echo {address(node)} node{node} >> /run/hosts"
        yield f"echo ::ffff:{address(node)} node{node} >> /run/hosts"
    yield "mount --bind /run/hosts /etc/hosts"
    yield "[ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf"


def switch(name: str = SWITCH) -> Iterator[str]:
    """Yield commands that make the switch, if there is none of this name."""
    yield QUIET
    yield f"[ -e /sys/class/net/{name} ] || ip link add {name} type bridge mcast_snooping 0"
    yield f"ip link set {name} up"


def move(nodes: Sequence[int], name: str) -> Iterator[str]:
    """Yield commands that connect these nodes to the switch of this name."""
    for node in nodes:
        yield f"ip link set n{node} master {name}"


def mute(node: int, others: Sequence[int]) -> Iterator[str]:
    """Yield commands that lead all that ``node`` sends to ``NOWHERE``."""
    # The kernel of a testbed may have no filters; and a route to nowhere would tell the sender.
    yield f"bridge fdb replace {NOWHERE} dev n{node} master static"
    for other in others:
        yield f"ip -n {node} neigh replace {address(other)} lladdr {NOWHERE} dev eth0 nud permanent"


def unmute(node: int) -> Iterator[str]:
    """Yield commands that undo ``mute``, if it was done."""
    yield f"ip -n {node} neigh flush dev eth0 nud permanent"


def cable(node: int, link: Link, rate: float, delays_by: str | None) -> Iterator[str]:
    """Yield commands that make ``node`` and connect its eth0 to port n<node> of the switch, at ``rate`` bit/s."""
    yield f"ip netns add {node}"
    yield f"ip netns exec {node} sh -c '{QUIET}'"
    if delays_by == DELAY_LINE:  # the delay line has made both devices
        yield f"ip link set node{node} name eth0 netns {node}"
    else:
        yield f"ip link add n{node} type veth peer name eth0 netns {node}"
    choices = " || ".join(f"echo {name} > {CONGESTION_CONTROL}" for name in CONGESTION_CONTROLS)
    yield f"ip netns exec {node} sh -c '{choices} || true' 2> /dev/null"
    yield f"ip -n {node} link set lo up"
    yield f"ip -n {node} link set eth0 mtu {MTU} up"
    yield f"ip -n {node} address add {address(node)}/24 dev eth0"
    yield f"ip link set n{node} mtu {MTU} master {SWITCH} up"
    if delays_by == NETEM:
        held = 1000 + rate * link.latency / 8 / 64  # small packets; more would be dropped
        delay = f"delay {link.latency * 1e6:.0f}us loss {100 * link.loss:.6f}%"
        yield f"tc -n {node} qdisc add dev eth0 root handle 1: netem limit {held:.0f} {delay}"
    yield from limits(node, link, rate, delays_by, "add")


def limits(node: int, link: Link, rate: float, delays_by: str | None, verb: str) -> Iterator[str]:
    """Yield commands that ``add`` the token buckets to both ends of the link of ``node``, or ``change`` them."""
    # netem drops the whole of a piece that TCP hands over, as if it were one packet.
    pieces = 1 if delays_by == NETEM and link.loss else packets_at_once(rate)
    place = "parent 1:1 handle 10:" if delays_by == NETEM else "root"
    yield f"ip -n {node} link set eth0 gso_max_segs {pieces}"
    yield f"tc -n {node} qdisc {verb} dev eth0 {place} {token_bucket(rate)}"
    yield f"tc qdisc {verb} dev n{node} root {token_bucket(rate)}"
