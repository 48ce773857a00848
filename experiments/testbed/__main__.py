"""Run torchrun on every node of an emulated cluster.

    python -m experiments.testbed --nodes 4 --rate 200mbit [--latency 5ms] [--loss 0.1%] [--slow-node 3:100mbit]
        [--nproc-per-node 2] -- [torchrun's options] -m pipesgd.train ...

Before the run it measures the links and prints the result. It needs Linux, and root or a user who may make
namespaces. However it ends, nothing of the cluster is left.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from .cluster import Measured, Testbed
from .errors import InvalidInputError, TestbedError, TestbedFailedError
from .links import (
    Link,
    parse_latency,
    parse_loss,
    parse_rate,
    parse_slow_node,
    rate_text,
    time_text,
)

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
FAR = 0.2
"""Share by which a measured rate or latency may differ from what was asked without a warning."""
OVERHEAD_SECONDS = 1e-3
"""Seconds that the machine itself may add to a latency."""


class Terminated(BaseException):
    """Raised when SIGTERM comes; like KeyboardInterrupt, it is not an error of the program."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors, so that each is printed as one line."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInputError(message.removeprefix("argument "))


def _at_least(least: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number, not below ``least``."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 19) or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}; got {text!r}")
        return int(text)

    return number


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options, with ``link`` and ``slow_nodes`` made of texts, and the words for ``torchrun``.

    Raises ``InvalidInputError``; prints the help and exits for ``--help``.
    """
    split = words.index("--") if "--" in words else len(words)
    options = Parser(
        prog="python -m experiments.testbed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s --nodes N --rate RATE [options] -- [torchrun's options] -m pipesgd.train ...",
    )
    options.add_argument("--nodes", type=_at_least(2), required=True, help="hosts of the cluster")
    options.add_argument("--rate", required=True, help="rate of every link in each direction, e.g. 200mbit")
    options.add_argument("--latency", default="0ms", help="latency from node to node, one way, e.g. 5ms (none)")
    options.add_argument("--loss", default="0%", help="share of packets that are lost, e.g. 0.1%% or 0.001 (none)")
    options.add_argument(
        "--slow-node",
        action="append",
        default=[],
        metavar="NODE:RATE",
        help="node whose link has another rate, e.g. 3:100mbit; nodes count from 0; may be repeated",
    )
    options.add_argument("--nproc-per-node", type=_at_least(1), default=1, help="ranks on each node (1)")
    arguments = options.parse_args(words[:split])
    arguments.slow_nodes = {}
    for text in arguments.slow_node:
        node, rate = parse_slow_node(text)
        if node in arguments.slow_nodes:
            raise InvalidInputError(f"slow-node must name a node once; got node {node} twice")
        arguments.slow_nodes[node] = rate
    arguments.link = Link(
        rate=parse_rate(arguments.rate), latency=parse_latency(arguments.latency), loss=parse_loss(arguments.loss)
    )
    if not words[split + 1 :]:
        got = "nothing after --" if split < len(words) else "no --"
        raise InvalidInputError(f"what torchrun runs must follow after --, e.g. -- -m pipesgd.train --help; got {got}")
    arguments.torchrun = list(words[split + 1 :])
    return arguments


def show(testbed: Testbed, measured: Sequence[Measured]) -> None:
    """Print the links as asked and as measured, with a warning where the two are far apart."""
    link = testbed.link
    title = f"{testbed.nodes} nodes, TCP with {measured[0].congestion_control}; what each sees of the way to the next"
    if testbed.delays_by is not None:
        title += f"; latency {time_text(link.latency)} and loss {link.loss:.4g} asked for, by {testbed.delays_by}"
    rows = [
        {
            "node": str(one.node),
            "address": one.address,
            "rate asked": rate_text(one.rate_asked),
            "measured": "too little came" if one.rate is None else rate_text(one.rate_with_headers or 0.0),
            "payload": "" if one.rate is None else rate_text(one.rate),
            "latency": time_text(one.latency),
        }
        for one in measured
    ]
    print(title)
    print(_table(rows))
    if far := [f"node {one.node}: {text}" for one in measured for text in differences(one, link)]:
        because = "; TCP is slower where packets are lost" if link.loss else ""
        print(f"warning: the links are not what was asked for: {', '.join(far)}{because}", file=sys.stderr)


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the rows below their keys, each column as wide as it needs to be."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def differences(measured: Measured, link: Link) -> list[str]:
    """Return a text for each measured value that is far from what was asked."""
    rate, asked = measured.rate_with_headers, measured.rate_asked
    texts = []
    if rate is None or abs(rate - asked) > FAR * asked:
        texts.append(f"{'no rate' if rate is None else rate_text(rate)} instead of {rate_text(asked)}")
    if not 0 <= measured.latency - link.latency <= FAR * link.latency + OVERHEAD_SECONDS:
        texts.append(f"{time_text(measured.latency)} instead of {time_text(link.latency)}")
    return texts


def run(words: Sequence[str]) -> None:
    """Run the command; raises an exception if something goes wrong."""
    options = parse(words)
    with Testbed(nodes=options.nodes, link=options.link, slow_nodes=options.slow_nodes) as testbed:
        show(testbed, testbed.measure())
        sys.stdout.flush()  # the ranks write to the same screen
        codes = testbed.torchrun(options.torchrun, nproc_per_node=options.nproc_per_node).wait()
    failed = [f"node {node} with {exit_text(code)}" for node, code in enumerate(codes) if code]
    if failed:
        raise TestbedFailedError(f"torchrun ended on {', '.join(failed)}")


def exit_text(code: int) -> str:
    """Return an exit code as a text for people."""
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def main(words: Sequence[str]) -> int:
    """Run the command and return its exit code, one of training's: always 1 if a node failed, whatever code it had."""
    try:
        run(words)
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_INTERRUPTED)
    except Terminated:
        return _say("error: told to stop (SIGTERM)", EXIT_TERMINATED)
    except TestbedError as failure:
        return _say(f"error: {failure}", EXIT_BAD_INPUT if isinstance(failure, InvalidInputError) else EXIT_FAILED)
    return 0


def _say(line: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody is left to read it
        print(line.replace("\n", " "), file=sys.stderr, flush=True)
    return code


def _raise_terminated(number: int, frame: object) -> NoReturn:
    raise Terminated


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _raise_terminated)
    sys.exit(main(sys.argv[1:]))
