"""The report of a run: one file of HTML, made from what is in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from pipesgd.report.charts import Axis, Curve, Interval, Mark, curves, shares
from pipesgd.report.folder import Numbers, RunFolder, number, read_run
from pipesgd.report.html import Child, Html, join, page, table, tag
from pipesgd.run.attempts import Attempt
from pipesgd.run.files import write_text_atomically
from pipesgd.run.metrics import SECONDS, number_of, slowest_rank, statistics
from pipesgd.strategy import hidden_share
from timing_model.units import format_bytes, format_seconds

PARTS = (
    ("compute", 0, "both passes, and the rest of the loop"),
    ("exposed", 1, "the computation waited for communication"),
    ("update", 2, "the optimizer, and the prediction of weights"),
    ("loading", 3, "the computation waited for its batch"),
)
"""Parts of an iteration, which add up to it: name, colour, and meaning."""
UNKNOWN = "not known"


def write_report(folder: Path, path: Path, *, is_in_use: bool | None = None) -> None:
    """Write the report of the run in ``folder`` to ``path``.

    Args:
        folder: the run's.
        path: the file of HTML to write.
        is_in_use: false if the run has ended, although this process still holds the folder; None asks its lock.

    Raises:
        UserInputError: the folder holds no run.
        OSError: the file could not be written.
    """
    write_text_atomically(path, report(read_run(folder, is_in_use=is_in_use)))


def report(run: RunFolder) -> Html:
    """Return the report as a page."""
    return page(
        f"Report of {run.name}",
        _head(run),
        *(_section(title, *body(run)) for title, body in SECTIONS.items()),
    )


def _section(title: str, *content: Child) -> Html:
    return tag("section", tag("h2", title), *content)


def _head(run: RunFolder) -> Html:
    options = run.options
    ranks = f"{run.world_size} rank{'s' if run.world_size > 1 else ''}"
    what = f"{described(run)} on {ranks}: {options.get('model')} on {options.get('dataset')}"
    state = tag("p", f"{run.state[0].upper()}{run.state[1:]}", class_="bad" if run.state.startswith("not") else None)
    facts = ((name, value) for name, value in key_figures(run).items())
    tiles = tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts), class_="tiles")
    notes = (tag("p", note, class_="bad") for note in run.notes)
    return tag("header", tag("h1", run.name), tag("p", what), state, *notes, tiles)


def described(run: RunFolder) -> str:
    """Return in a few words how the run exchanges gradients."""
    options = run.options
    if options.get("strategy") == "ddp":
        return "DDP"
    if options.get("strategy") != "pipelined":
        return str(options.get("strategy"))
    windows = options.get("local-steps")
    steps = f", {windows} local steps" if isinstance(windows, int) and windows > 1 else ""
    return f"Pipelined, width {options.get('width')}, {options.get('codec')}{steps}"


def key_figures(run: RunFolder) -> dict[str, str]:
    """Return the run's most important numbers by their names, without those that are not known."""
    iterations = run.iterations
    done = int(iterations["iteration"][-1]) + 1 if len(iterations) else 0
    wall, loss = number(run.summary.get("wall_seconds")), run.final("train_loss")
    period = statistics(iterations.known("iteration_seconds"))[middle(run)]
    sent = number(run.summary.get("wire_bytes_per_iteration"))
    hidden = hidden_part(run)
    accuracy, test_loss = run.final("test_accuracy"), run.final("test_loss")
    found = {
        "Iterations": f"{done:,}",
        "Wall clock": None if wall is None else format_seconds(wall),
        "Loss, last epoch": None if loss is None else f"{loss:.4g}",
        "Test accuracy": None if accuracy is None else f"{accuracy:.2%}",
        "Test loss": None if test_loss is None else f"{test_loss:.4g}",
        f"Iteration, {middle(run)}": None if period is None else format_seconds(period),
        "Communication hidden": None if hidden is None else f"{hidden:.0%}",
        "Sent per iteration, rank 0": None if not sent else format_bytes(sent),
    }
    return {name: value for name, value in found.items() if value is not None}


def middle(run: RunFolder) -> str:
    """Return which middle describes the run's iterations: their mean where only few of them exchange anything."""
    windows = run.options.get("local-steps")
    return "mean" if isinstance(windows, int) and windows > 1 else "median"


def hidden_part(run: RunFolder) -> float | None:
    """Return the share of communication that was hidden; None without communication."""
    if run.world_size < 2:
        return None
    communication, exposed = (
        float(run.iterations.known(f"{name}_seconds").sum()) for name in ("communication", "exposed")
    )
    return hidden_share(communication, exposed)


def _loss(run: RunFolder) -> list[Child]:
    iterations = run.iterations
    losses, elapsed = iterations["loss"], iterations.elapsed
    known = ~np.isnan(losses)
    content: list[Child] = []
    x, per_second = time_axis(float(elapsed[-1])) if len(elapsed) else (Axis(name="training time, s"), 1.0)
    elapsed = per_second * elapsed
    if known.any():
        shown = [Curve(name="training loss", x=elapsed, y=losses, dots=len(losses) < 3)]
        tested = ~np.isnan(iterations["test_loss"])
        if tested.any():
            dots = iterations["test_loss"][tested]
            shown.append(Curve(name="test loss", x=elapsed[tested], y=dots, colour=1, dots=True))
        text = f"Loss over training time, from {losses[known][0]:.4g} to {losses[known][-1]:.4g}"
        drawn = curves(shown, description=text, x=x, y=Axis(name="loss"), marks=_marks(run, elapsed))
        caption = (
            "Loss of rank 0's batches; where iterations are many, their mean and their range. Training time leaves "
        )
        caption += "out evaluations, checkpoints and interruptions."
        if any(attempt.start for attempt in run.attempts[1:]):
            caption += " A dashed line is where an attempt continued from a checkpoint."
        content.append(tag("figure", drawn, tag("figcaption", caption)))
    else:
        content.append(tag("p", "No iteration has a loss that is a number." if len(losses) else NOTHING))
    if missing := int((~known).sum()):
        content.append(tag("p", f"{missing:,} of {len(losses):,} losses were not finite.", class_="bad"))
    accuracies = iterations["test_accuracy"]
    tested = ~np.isnan(accuracies)
    if tested.sum() > 1:
        curve = Curve(
            name="test accuracy", x=elapsed[tested], y=100 * accuracies[tested], colour=2, dots=tested.sum() < 40
        )
        text = f"Test accuracy over training time, from {accuracies[tested][0]:.1%} to {accuracies[tested][-1]:.1%}"
        content.append(tag("figure", curves([curve], description=text, x=x, y=Axis(name="test accuracy, %"))))
    return content


NOTHING = "No iteration is recorded."


def time_axis(longest: float) -> tuple[Axis, float]:
    """Return an axis for times of up to ``longest`` s, and the number of its units in a second."""
    for unit, seconds in (("h", 3600.0), ("min", 60.0)):
        if longest > 3 * seconds:
            return Axis(name=f"training time, {unit}"), 1 / seconds
    return Axis(name="training time, s"), 1.0


def _marks(run: RunFolder, elapsed: Numbers) -> list[Mark]:
    """Return a mark where each attempt but the first begins, and where ranks were lost, as far as iterations tell.

    ``elapsed`` are the places of the iterations on the axis, at their ends.
    """
    at = run.iterations["iteration"]
    marks = []
    told = [(attempt.start, f"attempt {index}") for index, attempt in enumerate(run.attempts[1:], start=2)]
    told += [(change.first, f"{change.ranks} ranks" if change.ranks > 1 else "1 rank") for change in run.changes]
    for first, text in told:
        before = elapsed[at < first]
        if before.size and (at >= first).any():
            marks.append(Mark(x=float(before[-1]), text=text))
    return marks


def _parts(run: RunFolder) -> list[Child]:
    iterations = run.iterations
    values = {name: statistics(iterations.known(f"{name}_seconds")) for name in SECONDS}
    total = values["iteration"]["mean"]
    if total is None:
        return [tag("p", NOTHING)]
    means = {name: values[name]["mean"] or 0.0 for name, _, _ in PARTS}
    text = ", ".join(f"{name} {format_seconds(mean)}" for name, mean in means.items())
    bar: Child = None
    if sum(max(0.0, mean) for mean in means.values()) > 0:
        parts = [(name, max(0.0, means[name]), colour) for name, colour, _ in PARTS]
        bar = tag("figure", shares(parts, description=f"Mean parts of an iteration: {text}"))
    head: list[Child] = ["", "mean", "share", "median", "p95"]
    rows = [
        [join(key(colour), name), *_row(values[name], share=means[name] / total if total > 0 else None)]
        for name, colour, _ in PARTS
    ]
    rows.append(["iteration", *_row(values["iteration"], share=1.0)])
    meanings = "; ".join(f"{name}: {meaning}" for name, _, meaning in PARTS)
    return [bar, table(head, rows, numbers=True), tag("p", f"On rank 0. {meanings}.", class_="soft")]


def _row(values: dict[str, float | None], share: float | None) -> list[Child]:
    mean, median, p95 = (
        "" if value is None else _time(value) for value in (values["mean"], values["median"], values["p95"])
    )
    return [mean, "" if share is None else f"{share:.0%}", median, p95]


def _time(seconds: float) -> Html:
    return tag("span", format_seconds(seconds), class_="whole")


def key(colour: int) -> Html:
    """Return a small square of this colour."""
    return tag("span", class_=f"key f{colour}")


def _communication(run: RunFolder) -> list[Child]:
    iterations = run.iterations
    hidden = hidden_part(run)
    if hidden is None:
        alone = "One rank has nobody to communicate with." if run.world_size < 2 else "No communication was measured."
        return [tag("p", alone)]
    mean = float(iterations.known("communication_seconds").mean())
    parts = [("hidden", hidden, 0), ("exposed", 1 - hidden, 1)]
    text = f"{hidden:.0%} of communication hidden, {1 - hidden:.0%} exposed"
    rows: list[list[Child]] = [
        [join(key(0), "hidden"), _time(hidden * mean), f"{hidden:.0%}", "it ran while the ranks computed"],
        [join(key(1), "exposed"), _time((1 - hidden) * mean), f"{1 - hidden:.0%}", "the ranks waited for it"],
    ]
    content: list[Child] = [tag("figure", shares(parts, description=text)), table([], rows)]
    widths = iterations.known("width")
    late = number(run.summary.get("late_iterations"))
    if late is None and run.options.get("strategy") == "pipelined" and widths.size:
        late = float((widths > 1).sum())
    if late is not None and widths.size:
        content.append(tag("p", f"Late gradients: {int(late):,} of {len(iterations):,} iterations."))
    cosine = statistics(iterations.known("prediction_cosine"))["median"]
    if cosine is not None:
        content.append(
            tag("p", f"Cosine of rank 0's gradients and the means that took their place later: {cosine:.2f} (median).")
        )
    return content


def _predicted(run: RunFolder) -> list[Child]:
    seconds, planned = run.iterations["iteration_seconds"], run.planned
    known = seconds[~np.isnan(seconds)]
    if not known.size:
        return [tag("p", NOTHING)]
    content: list[Child] = []
    interval = None
    if planned is None:
        content.append(
            tag("p", "No prediction was asked for: an option set to auto asks for one, and so does --cluster.")
        )
    else:
        measured = run.measured_seconds
        if measured is None:
            own = run.iterations["iteration_seconds"][run.iterations["iteration"] >= planned.settled]
            measured = statistics(planned.windows(own[~np.isnan(own)].tolist()))["median"]
        line = "No iteration can be compared with the prediction." if measured is None else planned.compare(measured)
        content.append(tag("p", f"{line[0].upper()}{line[1:]}."))
        content += [tag("p", line, class_="soft") for line in planned.why]
        if planned.window == 1:
            low, _, high = planned.median
            interval = Interval(low=1e3 * low, high=1e3 * high, name="predicted median")
    if known.size > 1:
        curve = Curve(name="measured", x=run.iterations["iteration"], y=1e3 * seconds)
        text = f"Duration of the iterations, median {format_seconds(float(np.median(known)))}"
        x, y = Axis(name="iteration", notation="{:,.0f}".format, whole=True), Axis(name="ms an iteration")
        content.append(tag("figure", curves([curve], description=text, x=x, y=y, interval=interval)))
    return content


def _faults(run: RunFolder) -> list[Child]:
    content: list[Child] = []
    if run.attempts:
        head: list[Child] = ["", "began (UTC)", "with iteration", "ended"]
        rows = [_attempt_row(run, index) for index in range(len(run.attempts))]
        content.append(table(head, rows))
        if again := sum(map(_run_again, run.attempts[:-1], run.attempts[1:])):
            content.append(
                tag("p", f"{again:,} iterations after a checkpoint were run again; the charts show those that count.")
            )
    else:
        content.append(tag("p", "The run's folder does not tell of its attempts."))
    if changes := run.changes:
        rows = [["; ".join(one.lost) or "connections were made again", f"{one.first:,}", one.ranks] for one in changes]
        content.append(table(["ranks that were lost", "the others began with iteration", "ranks left"], rows))
    iterations = run.iterations
    skipped = number(run.summary.get("skipped_updates"))
    skipped = float(np.nansum(iterations["skipped"])) if skipped is None else skipped
    if skipped:
        named = ", ".join(f"rank {rank}: {count:,}" for rank, count in sorted(iterations.blamed.items()))
        whose = f"; gradients not finite: {named}" if named else ""
        content.append(tag("p", f"{int(skipped):,} updates were left out{whose}.", class_="bad"))
    fell_back = iterations["iteration"][iterations["fell_back"] == 1]
    if fell_back.size:
        shown = ", ".join(f"{one:,.0f}" for one in fell_back[:10]) + (", ..." if fell_back.size > 10 else "")
        content.append(
            tag("p", f"The guard found that staleness hurts, and went back to width 1, in iteration {shown}.")
        )
    if run.summary.get("replicas_identical") is False and run.options.get("strategy") != "local":
        content.append(tag("p", "The ranks ended with weights that differ.", class_="bad"))
    if not (skipped or fell_back.size or any(attempt.why for attempt in run.attempts)):
        content.append(tag("p", "No update was left out."))
    return content


def _run_again(attempt: Attempt, following: Attempt) -> int:
    """Return how many iterations of an attempt the next one ran again, as far as the two tell."""
    done = following.start if attempt.iteration is None else attempt.iteration
    return max(following.run_again, done - following.start)


def _attempt_row(run: RunFolder, index: int) -> list[Child]:
    attempt, is_last = run.attempts[index], index + 1 == len(run.attempts)
    ranks = f", {attempt.world_size} ranks" if attempt.world_size != run.world_size else ""
    return [f"attempt {index + 1}", _date(attempt.begun), f"{attempt.start:,}{ranks}", _end(run, attempt, is_last)]


def _end(run: RunFolder, attempt: Attempt, is_last: bool) -> Html:
    if attempt.ended is None:
        if is_last and run.is_in_use:
            return tag("span", "still training")
        return tag("span", "rank 0 ended without a word", class_="bad")
    if attempt.why is None:
        return tag("span", f"finished after {format_seconds(max(0.0, attempt.ended - attempt.begun))}")
    where = "" if attempt.iteration is None or "iteration" in attempt.why else f" (iteration {attempt.iteration:,})"
    return tag("span", f"{attempt.why}{where}", class_="bad")


def _date(seconds: float) -> Child:
    try:
        date = datetime.fromtimestamp(seconds, UTC)
        return join(
            tag("span", f"{date:%Y-%m-%d}", class_="whole"), " ", tag("span", f"{date:%H:%M:%S}", class_="whole")
        )
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def _ranks(run: RunFolder) -> list[Child]:
    columns = {
        "iteration, median": (_of_ranks(run, "iteration_seconds_of_ranks"), format_seconds),
        "compute, median": (_of_ranks(run, "compute_seconds_of_ranks"), format_seconds),
        "loading": (_of_ranks(run, "loading_share_of_ranks"), "{:.1%}".format),
    }
    most = max(len(values) for values, _ in columns.values())
    if not most:
        return [tag("p", "Known at the end of a run only.")]
    rows: list[list[Child]] = [
        [f"rank {number_of(place, run.summary)}", *(_cell(values, place, how) for values, how in columns.values())]
        for place in range(most)
    ]
    content: list[Child] = [table(["", *columns], rows, numbers=True)]
    period = statistics(run.iterations.known("iteration_seconds"))["median"] or 0.0
    slow = slowest_rank(_of_ranks(run, "compute_seconds_of_ranks"), period)
    if slow is not None:
        own = number_of(slow[0], run.summary)
        content.append(tag("p", f"Rank {own} computes {format_seconds(slow[1])} longer than the others."))
    return content


def _of_ranks(run: RunFolder, name: str) -> list[float | None]:
    values = run.summary.get(name)
    return [number(value) for value in values] if isinstance(values, list) else []


def _cell(values: Sequence[float | None], rank: int, notation: Any) -> str:
    value = values[rank] if rank < len(values) else None
    return "" if value is None else str(notation(value))


def _options(run: RunFolder) -> list[Child]:
    changed = run.changed_options
    rows: list[list[Child]] = [[f"--{name}", in_words(value)] for name, value in sorted(changed.items())]
    others: list[list[Child]] = [
        [f"--{name}", in_words(value)] for name, value in sorted(run.options.items()) if name not in changed
    ]
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return [
        table([], rows, class_="options") if rows else tag("p", "All options have their defaults."),
        tag("details", tag("summary", f"{len(others)} options at their defaults"), table([], others, class_="options")),
        tag("p", f"Versions: {versions or UNKNOWN}."),
    ]


def in_words(value: Any) -> str:
    """Return the value of an option as it is written on the command line.

    >>> in_words([500, 500]), in_words(None), in_words(True)
    ('500 500', 'none', 'on')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


SECTIONS = {
    "Loss": _loss,
    "Parts of an iteration": _parts,
    "Communication": _communication,
    "Predicted and measured": _predicted,
    "Attempts and faults": _faults,
    "Ranks": _ranks,
    "Options and versions": _options,
}
"""Titles of the report's sections, and what makes each."""
