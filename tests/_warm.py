"""What the fork server does once before it forks ranks: imports, and loops that codecs would have compiled in each."""

from __future__ import annotations

import importlib
import threading

from pipesgd.codecs.make import make_codec
from pipesgd.codecs.options import DENSE_CODECS, CodecOptions
from pipesgd.reducers.make import _compile

for name in ("numba", "torch._dynamo", "torch.utils.tensorboard", "typeguard", "pipesgd.train"):
    importlib.import_module(name)
for codec in DENSE_CODECS:
    _compile(make_codec(CodecOptions(codec=codec), "cpu"), "cpu")
assert threading.active_count() == 1, "a process with threads cannot be forked"
