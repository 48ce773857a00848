"""The ``timing-model`` command, which predicts what a job will cost and how to run it, before it runs."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from timing_model import __version__
from timing_model.advice import advice, reason
from timing_model.alternatives import alternatives
from timing_model.arguments import Parser, add_options, option, taken, whole
from timing_model.checks import check_one_of
from timing_model.choices import ALL, Choice, Space, all_codecs
from timing_model.configurations import describe, in_program, training_arguments
from timing_model.costs import costs_of, iteration_time
from timing_model.memory import rank_memory
from timing_model.options import add_configuration, add_job, add_nodes, base_of, job_of
from timing_model.plan import plan
from timing_model.plots import check_plot, plot_parts, save_plot
from timing_model.predict import Answer, predict
from timing_model.report import answer_text, folded, job_line, plan_text
from timing_model.simulate_job import plot_simulated_job, simulate_job

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELP = """Predict what a training job will cost, and how to run it, before it runs.

  predict    time of an iteration, an epoch and the job, and what limits it
  plan       best strategy, width, codec, all-reduce and islands, and why
  simulate   the iterations one by one, with jitter and slow ranks

For a measured cluster (torchrun ... -m pipesgd.calibrate --out cluster.toml):
  timing-model plan --cluster cluster.toml --model resnet18 --world-size 8
With numbers you type in:
  timing-model predict --latency 50us --bandwidth 10Gbit/s --world-size 4 \\
    --compute 0.3s --parameters 61.1M

timing-model COMMAND --help lists the options of a command;
timing-model --version prints the version."""
PLOTTED_WIDTHS = (1, 2, 3, 4)
EXIT_UNREAD = 141
"""Exit code of a process whose output nobody has read to its end: what shells say of SIGPIPE."""


def main(argv: Sequence[str] | None = None, *, program: str = "timing-model") -> int:
    """Run the command and return its exit code: 2 after a line on stderr for wrong arguments, 141 if unread.

    ``program`` is its name in the help.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        text = _run(list(argv), program)
    except ValueError as error:
        return refused(error)
    if sys.stdout.isatty() and not text.startswith("{"):
        text = folded(text, shutil.get_terminal_size().columns)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name of a file may be one that its encoding lacks
    try:
        print(text, flush=True)
    except BrokenPipeError:  # as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python will write the rest at its end
        return EXIT_UNREAD
    return 0


def refused(error: ValueError) -> int:
    """Print what is wrong in a line on stderr, and return the exit code for it."""
    field, _, rest = str(error).partition(" ")
    option = field.replace("_", "-") if re.fullmatch("[a-z_]+", field) else field  # or a field of a file
    print(f"error: {option} {rest}", file=sys.stderr)
    return 2


def check_plan(words: Sequence[str], *, program: str) -> None:
    """Raise ``ValueError`` if these are no options of ``plan``, or those of the job do not go together."""
    given = _parser("plan", program).parse(list(words))
    check_plot(None if given.plot is None else Path(given.plot))
    base_of(given)


def script() -> int:
    """Run the installed command as ``python -m timing_model``, which finds modules in the current folder, too."""
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    return main()


def _run(argv: list[str], program: str) -> str:
    if not argv or argv[0] in ("-h", "--help"):
        return HELP
    if argv == ["--version"]:
        return f"timing-model {__version__}"
    check_one_of("command", argv[0], list(COMMANDS))
    options = _parser(argv[0], program)
    if {"-h", "--help"} & set(argv[1:]):
        return options.format_help().rstrip()
    given = options.parse(argv[1:])
    given.plot = None if given.plot is None else Path(given.plot)
    check_plot(given.plot)
    return COMMANDS[argv[0]][1](given)


def _parser(command: str, program: str) -> Parser:
    """Return the parser of the words that follow a command."""
    add_options, answer = COMMANDS[command]
    options = Parser(
        prog=f"{program} {command}",
        description=answer.__doc__,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(options)
    return options


def _add_predict(options: Parser) -> None:
    add_job(options)
    add_configuration(options)


def _predict(given: Namespace) -> str:
    """Predict the time of an iteration, by parts, with an interval, and what limits it."""
    job = job_of(given)
    answer = predict(job, extrapolate=given.extrapolate)
    if given.plot:
        save_plot(given.plot, lambda axes: _plot_widths(answer, axes))
    return json.dumps(answer.as_json(), indent=1) if given.json else answer_text(answer)


def _plot_widths(answer: Answer, axes: Axes) -> Axes:
    """Plot the same job in other widths, if it is a pipeline."""
    job = answer.job
    widths = {*PLOTTED_WIDTHS, job.width} if job.strategy == "pipelined" else {1}
    jobs = [dataclasses.replace(job, width=width) for width in sorted(widths)]
    iterations = [iteration_time(one, costs_of(one))[0] for one in jobs]
    return plot_parts([describe(one) for one in jobs], iterations, axes, title=job_line(job))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Options of ``plan`` besides those of its space."""

    accuracy_cost: Sequence[str] = option((), shown="NAME=SHARE", several=True)
    """Share of iterations needed in addition for the same accuracy: width=1% for each one above 1, int4=3%."""
    top: int = option(8, whole(), "N")
    """Number of configurations to show."""


def _add_plan(options: Parser) -> None:
    add_job(options)
    group = options.add_argument_group("search space")
    add_options(group, Space)
    add_nodes(group)
    add_options(group, Wanted)


def _plan(given: Namespace) -> str:
    """Find the best strategy, width, codec, all-reduce, segment size and islands, and say why."""
    base = base_of(given)
    space = Space.of(base)
    asked = {name: tuple(dict.fromkeys(values)) for name, values in taken(given, Space).items()}
    wanted = Wanted(**taken(given, Wanted))
    if ALL in asked.get("codecs", ()):
        asked["codecs"] = all_codecs(base)
    space = dataclasses.replace(space, **asked)
    found = plan(
        base,
        space,
        accuracy_cost=_accuracy_costs(wanted.accuracy_cost),
        extrapolate=given.extrapolate,
    )
    if given.plot:
        shown = found.shown(wanted.top)
        labels, iterations = [describe(one.job) for one in shown], [one.iteration for one in shown]
        save_plot(
            given.plot,
            lambda axes: plot_parts(labels, iterations, axes, title=job_line(base)),
            height=2 + 0.3 * len(shown),
        )
    answer = predict(found.best.job, extrapolate=given.extrapolate)
    others = alternatives(found, space, extrapolate=given.extrapolate)
    if not given.json:
        return plan_text(found, answer, wanted.top, others)
    values = {
        "predicted": answer.as_json(),
        "best": _choice(found.best),
        "ddp": found.ddp and _choice(found.ddp),
        "synchronous": found.synchronous and _choice(found.synchronous),
        "uncompressed": found.uncompressed and _choice(found.uncompressed),
        "advice": [*advice(found, others), *others],
        "ranking": [_choice(one) | {"tie": one in found.tied} for one in found.kinds[: wanted.top]],
        "considered": found.considered,
        "meshes": {members: _choice(one) for members, one in found.meshes.items()},
        "too_large": found.too_large,
    }
    return json.dumps(values, indent=1)


def _choice(choice: Choice) -> dict[str, object]:
    job = choice.job
    return {
        **{
            name: job.values()[name]
            for name in ("strategy", "width", "codec", "all_reduce", "segment_bytes", "buckets", "members")
        },
        "iteration_seconds": choice.iteration._asdict(),
        "collective_seconds": choice.collective._asdict(),
        "score": choice.score,
        "memory_bytes": rank_memory(job),
        "reason": reason(choice),
        "options": training_arguments(job),
        "program": in_program(job),
    }


def _accuracy_costs(texts: Sequence[str]) -> dict[str, float]:
    costs: dict[str, float] = {}
    for text in texts:
        found = re.fullmatch(r"([\w-]+)=(\d+(?:\.\d+)?)(%?)", text)
        if found is None:
            raise ValueError(f"accuracy_cost must be a name and a share, such as width=1%; got {text!r}")
        if found[1] in costs:
            raise ValueError(f"accuracy_cost must be given once for each name; got {found[1]} twice")
        costs[found[1]] = float(found[2]) / (100 if found[3] else 1)
    return costs


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Options of ``simulate``."""

    seed: int = option(0, whole(0), "N")
    """Seed of the jitter."""


def _add_simulate(options: Parser) -> None:
    _add_predict(options)
    add_options(options, Drawn)


def _simulate(given: Namespace) -> str:
    """Simulate the same iterations one by one, with jitter and slow ranks (1000, or --iterations)."""
    seed = Drawn(**taken(given, Drawn)).seed
    simulated = simulate_job(job_of(given), seed=seed, extrapolate=given.extrapolate)
    if given.plot:
        save_plot(given.plot, lambda axes: plot_simulated_job(simulated.answer, axes, seed=seed))
    return json.dumps(simulated.as_json(), indent=1) if given.json else simulated.text()


COMMANDS: dict[str, tuple[Callable[[Parser], None], Callable[[Namespace], str]]] = {
    "predict": (_add_predict, _predict),
    "plan": (_add_plan, _plan),
    "simulate": (_add_simulate, _simulate),
}

if __name__ == "__main__":
    sys.exit(main())
