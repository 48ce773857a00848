"""Run the ``timing-model`` command as ``python -m timing_model``."""

import sys

from timing_model.cli import main

sys.exit(main())
