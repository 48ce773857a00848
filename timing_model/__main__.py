"""``python -m timing_model`` is ``timing-model``."""

import sys

from timing_model.cli import main

sys.exit(main())
