"""Another transport wherever a test leaves it open: conftest.py imports this if PIPESGD_TESTED_TRANSPORT names one."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pipesgd import keys
from pipesgd.comm.connections import Connections
from pipesgd.membership.secret import VARIABLE, job_secret
from pipesgd.sections import Wire

NAME = os.environ["PIPESGD_TESTED_TRANSPORT"]


def _instead(init: Any) -> Any:
    @functools.wraps(init)
    def changed(self: Any, *values: Any, **options: Any) -> None:
        all_reduce = values[0] if values else options.get("all_reduce")
        # What only gloo has stays with it.
        if "transport" not in options and all_reduce != "native" and options.get("connections", 1) == 1:
            options["transport"] = NAME
        for ranks in values[1:2]:  # of Connections; some tests make the only rank by themselves
            if options.get("transport") == "tls" and ranks.world_size == 1 and ranks.secret is None:
                ranks.secret = job_secret()
        init(self, *values, **options)

    return changed


for kind in (Wire, Connections):
    kind.__init__ = _instead(kind.__init__)  # type: ignore[method-assign]
if NAME == "tls" and VARIABLE not in os.environ:  # else that of the process which has started this one
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    keys.make(Path(folder) / "job.key", certificate=True)
    os.environ[VARIABLE] = f"{folder}/job.key"
