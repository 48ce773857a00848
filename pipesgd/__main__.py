"""The command ``pipesgd``, also as ``python -m pipesgd``: its subcommands, and the list of all commands.

A subcommand is imported when it is asked for, so that questions about time load no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from pipesgd.checks import check_one_of
from pipesgd.errors import UserInputError
from pipesgd.process import answer

PROGRAM = "pipesgd"
SUBCOMMANDS = {
    **dict.fromkeys(("plan", "predict", "simulate"), "timing_model.cli:main"),
    "report": "pipesgd.report.commands:report",
    "compare": "pipesgd.report.commands:compare",
    "keys": "pipesgd.keys:main",
}
"""Function of each subcommand, as module:function. It takes the arguments and the program's name."""
PLAN_OF_PROGRAM = "pipesgd.observe.plan:main"
"""Function of ``plan --from``."""
HELP = """  pipesgd plan       best strategy, width and codec for a job, and why
  pipesgd plan --from train.py [options of plan] -- [arguments of train.py]
                     the same for a program as it is, which runs for some
                     iterations here; --link DATA shows it a file or folder
  pipesgd predict    time of an iteration, an epoch and the job, and its limit
  pipesgd simulate   the iterations one by one, with jitter and slow ranks
  pipesgd report     a run as a page: pipesgd report runs/a
  pipesgd compare    runs next to each other: pipesgd compare runs/a runs/b
  pipesgd keys new   a secret by which the ranks of a job know each other

  torchrun ... -m pipesgd.train       trains a model on several ranks
  torchrun ... -m pipesgd.calibrate   measures a cluster for the questions above
  python -m pipesgd.launch ...        torchrun's options, in fewer words

Each explains its options with --help. timing-model is another name of pipesgd
for plan, predict and simulate."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 2 after a line on stderr if there is no such subcommand."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or set(argv) <= {"-h", "--help", "--version"}:
        from pipesgd.cli import version

        return answer(version() if list(argv) == ["--version"] else f"{version()}\n\n{HELP}")
    try:
        check_one_of("subcommand", argv[0], list(SUBCOMMANDS))
    except UserInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    of_program = argv[0] == "plan" and any(word.partition("=")[0] == "--from" for word in argv)
    module, _, function = (PLAN_OF_PROGRAM if of_program else SUBCOMMANDS[argv[0]]).partition(":")
    code: int = getattr(importlib.import_module(module), function)(argv, program=PROGRAM)
    return code


def script() -> int:
    """Run the installed command as ``python -m pipesgd``, which finds modules in the current folder, too."""
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    return main()


if __name__ == "__main__":
    sys.exit(main())
