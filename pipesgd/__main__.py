"""``python -m pipesgd`` lists the commands."""

from __future__ import annotations

import sys

from pipesgd.cli import version
from pipesgd.process import answer

COMMANDS = f"""{version()}

  torchrun [options of torchrun] -m pipesgd.train       trains a model on several ranks
  torchrun [options of torchrun] -m pipesgd.calibrate   measures a cluster, for the timing model
  timing-model                                          predicts what a job will cost, and plans it

Each explains its options with --help."""

if __name__ == "__main__":
    argv = sys.argv[1:]
    if not argv or set(argv) <= {"-h", "--help", "--version"}:
        sys.exit(answer(version() if argv == ["--version"] else COMMANDS))
    print(f"error: the command must be one that python -m pipesgd lists; got {argv[0]!r}", file=sys.stderr)
    sys.exit(2)
