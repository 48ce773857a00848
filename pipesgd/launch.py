"""The command ``python -m pipesgd.launch [torchrun's options] [-m] PROGRAM [its options]``: torchrun in few words.

It starts the ranks of one machine as torchrun does, by torch's own agent, and takes the same options. In place of
torchrun's report it prints what it waits for, and it exits with the code of the rank that failed first, 128 and the
signal's number if a signal ended that rank or the launcher, and 2 if an option is wrong.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from pipesgd.checks import did_you_mean
from pipesgd.errors import RunError, UserInputError
from pipesgd.process import say, signal_name

HELP = """Start the ranks of one machine, as torchrun does and with its options.

Run the same command on every machine, with its own --node-rank. It exits with
the code of the rank that failed first: 2 if its input was wrong, 1 if it
failed, 130 after Ctrl-C, 143 after SIGTERM, 137 after SIGKILL. LOGLEVEL=INFO
shows what torch's agent logs.

With --elastic, no rank is ended because another one was lost, as pipesgd.train
--elastic needs it; the exit code is 0 if a rank has finished the training.
Options of torch's agent, such as --max-restarts, must be left out then."""

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
PORT = 29500
"""Port at which machines meet unless another one is given; it is torchrun's."""
OWN_OPTIONS = ("--node-rank", "--local-addr")
"""Options of torchrun that differ between machines."""
ELASTIC_OPTIONS = {
    *("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "standalone", "module", "no_python"),
    *("elastic", "training_script", "training_script_args"),
}
"""Options that can be given together with --elastic, which starts ranks without torch's agent."""


def main(argv: Sequence[str]) -> int:
    """Run the command with these arguments, and return its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # torch's agent has handlers of its own once ranks run
        signal.signal(number, _stop)
    if "LOGLEVEL" not in os.environ:
        logging.disable()  # the ranks say what failed
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        return _launch(argv)
    except UserInputError as error:
        say(f"error: {error}")
        return EXIT_BAD_INPUT
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:  # it has said itself why it ended
            return failure.exitcode
        say(f"error: the process of rank {rank} was ended by {signal_name(-failure.exitcode)}")
        return 128 - failure.exitcode
    except SignalException as stopped:
        return 128 + stopped.sigval
    except (RunError, RendezvousError, DistError) as failure:
        say(f"error: {failure}")
        return EXIT_FAILED


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """End the launcher before it has started ranks."""
    say(f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal_name(number)} before the ranks started")
    sys.exit(128 + number)


def _launch(argv: Sequence[str]) -> int:
    """Start this machine's ranks, wait for their end, and return an exit code.

    Raises:
        UserInputError: an option is wrong; nothing was started.
        RunError: the machines did not meet.
        ChildFailedError: a rank failed.
        SignalException: a signal has ended the ranks.
    """
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import elastic_launch

    from pipesgd.membership.meeting import BACKEND, meeting

    given = _parsed(run.get_args_parser(), argv)
    machines = _number_of_machines(given)
    threads = os.environ.get("OMP_NUM_THREADS")
    alone = machines == 1 and given.rdzv_backend == "static" and not given.rdzv_endpoint and given.master_port is None
    if given.standalone or alone:
        given.rdzv_backend, given.rdzv_endpoint, given.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    port, given.master_port = given.master_port, given.master_port or PORT
    several = machines > 1 and given.rdzv_backend == "static"
    with tempfile.TemporaryDirectory(prefix="pipesgd-launch-") as folder:  # torch would leave one behind
        if given.redirects == given.tee == "0":
            given.log_dir = given.log_dir or folder
        try:
            config, program, words = run.config_from_args(given)
        except (AssertionError, ValueError, RuntimeError, OSError) as problem:
            said = " ".join(str(problem).split())
            raise UserInputError(f"options must be such as torchrun takes; {said}") from problem
        if threads is None and config.nproc_per_node > 1:
            say("each rank computes with one thread; OMP_NUM_THREADS=2 gives it two, and so on")
        if given.elastic:
            from pipesgd.elastic.launch import launch_elastic

            return launch_elastic(
                str(program),
                words,
                ranks=config.nproc_per_node,
                machine=given.node_rank,
                machines=machines,
                host=given.master_addr if several or port is not None else "127.0.0.1",
                port=given.master_port if several else port,
            )
        if several:
            rendezvous_handler_registry.register(BACKEND, meeting)
            config.rdzv_backend = BACKEND
            config.rdzv_configs["lines"] = [] if given.node_rank else commands(given, argv, machines)
        elastic_launch(config, program)(*words)
    if several and given.node_rank:
        say(f"machine {given.node_rank} of {machines}: done")
    return 0


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, read by torchrun's parser."""

    def error(message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        names = [name for action in parser._actions for name in action.option_strings]
        near = did_you_mean(unknown[1], names) if unknown else ""
        said = re.sub(r"^argument (?:-\w/)?--([\w-]+): ", r"\1 ", message)
        said = said.replace("invalid int value:", "must be a whole number; got")
        raise UserInputError(said + near)

    parser.usage, parser.description = "python -m pipesgd.launch [torchrun's options] [-m] PROGRAM [its options]", HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.add_argument("--elastic", action="store_true", help="end no rank because another one was lost")
    for action in parser._actions:  # names with _ are understood, too
        action.option_strings = [name for name in action.option_strings if "_" not in name]
    parser.error = error  # type: ignore[method-assign]
    given = parser.parse_args(argv)
    if given.elastic:
        for action in parser._actions:
            default = action.default  # of an environment variable it is text
            if isinstance(default, str) and callable(action.type):
                default = action.type(default)
            if action.dest not in ELASTIC_OPTIONS and getattr(given, action.dest, default) != default:
                name = action.option_strings[0]
                raise UserInputError(f"{name} must be left out with --elastic, which does without torch's agent")
        least, _, most = given.nnodes.partition(":")
        if most not in ("", least):  # torchrun's default is 1:1
            raise UserInputError(f"nnodes must be one number with --elastic; got {given.nnodes}")
    return given


def _number_of_machines(given: argparse.Namespace) -> int:
    """Return the number of machines, the most of them for a range."""
    found = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})", given.nnodes, re.ASCII)
    if not found or not 1 <= int(found[1] or found[2]) <= int(found[2]):
        raise UserInputError(f"nnodes must be a number, or the least and the most as 2:4; got {given.nnodes!r}")
    machines, own = int(found[2]), given.node_rank
    if not 0 <= own < machines:
        raise UserInputError(f"node-rank must be from 0 to {machines - 1} with --nnodes {machines}; got {own}")
    return machines


def commands(given: argparse.Namespace, argv: Sequence[str], machines: int) -> list[str]:
    """Return lines that tell how to start the other machines of a job whose first machine has these arguments."""
    own = argv[: len(argv) - len(given.training_script_args) - 1]
    shared: list[str] = []
    words = iter(own)
    for word in words:
        name, equals, _ = word.replace("_", "-").partition("=")
        if name not in OWN_OPTIONS:
            shared.append(word)
        elif not equals:
            next(words)  # its value
    address = ["--local-addr", "ITS_ADDRESS"] if given.local_addr else []
    command = ["python", "-m", "pipesgd.launch", "--node-rank", "1", *address, *shared, *argv[len(own) :]]
    others = f", and with --node-rank 2 to {machines - 1} on the others" if machines > 2 else ""
    return [f"start on machine 1{others}:", f"  {shlex.join(command)}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
