"""Work that the fork server does once before it forks ranks: imports, and compiling the loops of the codecs."""

from __future__ import annotations

import threading

from experiments.forked_ranks import import_all
from pipesgd.codecs.make import make_codec
from pipesgd.codecs.options import DENSE_CODECS, CodecOptions
from pipesgd.reducers.make import _compile

import_all()
for codec in DENSE_CODECS:
    _compile(make_codec(CodecOptions(codec=codec), "cpu"), "cpu")
assert threading.active_count() == 1, "a process with threads cannot be forked"
