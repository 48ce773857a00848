"""Refusals that depend on more than one option: rows of tables, each a condition and a message.

The command checks those that its strategy and options call for. ``Pipelined``, ``LocalSteps`` and the doors check the
tables about what they are given. What depends on one option alone is declared with it (``pipesgd.options``), or checked
by the object that reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pipesgd.checks import one_of
from pipesgd.codecs.options import NATIVE_CODECS
from pipesgd.errors import UserInputError
from pipesgd.pipeline_config import GRADIENT_SERVERS, SERVER_STRATEGIES
from pipesgd.sections import AUTO, DEFAULT_FAREWELL_SECONDS
from timing_model.buckets import WHOLE, Cut

Options = Any
"""Options as the attributes of an object, those of several sections in one."""
Rule = tuple[Callable[[Options], object], str]
"""Condition that is true of options to be refused, and the message, a format string about the options ``o``."""


def _is_whole(o: Options) -> bool:
    return bool(o.codec == "topk")


def _in_buckets(o: Options) -> bool:
    return Cut.parse(str(o.buckets)) != WHOLE


CODEC: tuple[Rule, ...] = (
    (lambda o: o.all_reduce_name == "native" and o.codec not in NATIVE_CODECS,
     f"codec must be {one_of(NATIVE_CODECS)} with --all-reduce native, in which torch sums; got {{o.codec}}"),
    (lambda o: o.all_reduce_name == "native" and o.gives_back,
     "error-feedback must be off with --all-reduce native, in which torch rounds; got on"),
    (lambda o: o.all_reduce_name == "native" and o.factors != "fp32",
     "factor-codec must be fp32 with --all-reduce native, which keeps no residual; got {o.factors}"),
    (lambda o: o.all_reduce_name != "ring" and o.codec == "topk",
     "all-reduce must be ring with --codec topk, whose values are gathered around it; got {o.all_reduce_name}"),
)  # fmt: skip
"""Codec and all-reduce."""

PARTS: tuple[Rule, ...] = (
    (lambda o: _is_whole(o) and _in_buckets(o),
     "buckets must be 1 with --codec {o.codec}, which compresses the gradient as a whole; got {o.buckets}"),
    (lambda o: _is_whole(o) and o.fragments != 1,
     "fragments must be 1 with --codec {o.codec}, which compresses the movement as a whole; got {o.fragments}"),
)  # fmt: skip
"""Codec, and what leaves in parts. ``fragments`` may be "auto"."""

REDUCE: tuple[Rule, ...] = (
    (lambda o: o.reduce != "matrix" and _is_whole(o),
     "reduce must be matrix with --codec {o.codec}, which compresses the gradient as a whole; got {o.reduce}"),
    (lambda o: o.reduce == AUTO and o.codec == "powersgd",
     "reduce must be given with --codec powersgd, whose bytes its choice does not know; got auto"),
    (lambda o: o.reduce != "matrix" and o.all_reduce_name == "native",
     "reduce must be matrix with --all-reduce native, in which torch sums whole gradients; got {o.reduce}"),
    (lambda o: o.reduce != "matrix" and o.device == "cuda",
     "reduce must be matrix with device cuda, on which rows and factors have not been tested; got {o.reduce}"),
)  # fmt: skip
"""Exchange of gradients. ``reduce`` is the option or, where parameters are named, a text about them."""

# Elastic averaging needs a codec that keeps no residual. What an encoding leaves out of a difference from the centre is
# still in the next one, since the centre has not moved by it. A residual would add it a second time, and again in every
# window in which the value is left out.
_LEFT_OUT = "with --outer elastic, whose next difference has what was left out of this one; got "
OUTER: tuple[Rule, ...] = (
    (lambda o: o.outer == "nesterov" and o.own_momentum,
     "momentum-correction must be 0 with --outer nesterov, whose momentum it would replace; got {o.own_momentum}"),
    (lambda o: o.outer == "elastic" and o.remembers and not o.gives_back,
     f"codec must keep no residual {_LEFT_OUT}{{o.codec}}"),
    (lambda o: o.outer == "elastic" and o.gives_back and o.error_feedback is None,
     f"error-feedback must be off {_LEFT_OUT}on, the default of {{o.codec}}"),
    (lambda o: o.outer == "elastic" and o.gives_back, f"error-feedback must be off {_LEFT_OUT}on"),
)  # fmt: skip
"""Codec and outer optimizer, which is never None here."""

WINDOWS: tuple[Rule, ...] = (
    (lambda o: o.outer_lr is not None and o.outer == "elastic",
     "outer-lr must be left out with --outer {o.outer}; got {o.outer_lr}"),
    (lambda o: o.outer_momentum is not None and o.outer != "nesterov",
     "outer-momentum must be left out with --outer {o.outer}; got {o.outer_momentum}"),
    (lambda o: o.moving_rate is not None and o.outer != "elastic",
     "moving-rate must be left out with --outer {o.outer}; got {o.moving_rate}"),
    (lambda o: o.average_state and o.outer == "elastic",
     "average-state must be left out with --outer elastic, which averages no weights; got True"),
    (lambda o: o.fragments != 1 and o.outer != "average",
     "fragments must be 1 with --outer {o.outer}, which needs all weights at once; got {o.fragments}"),
    (lambda o: o.fragments != 1 and o.average_state,
     "fragments must be 1 with --average-state, which needs all weights at once; got {o.fragments}"),
    (lambda o: o.average_state and o.width > 1,
     "width must be 1 with --average-state, whose averages are never late; got {o.width}"),
)  # fmt: skip
"""Windows of local steps, their outer optimizer, which is never None here, and their width."""

GRADIENTS: tuple[Rule, ...] = (
    (lambda o: o.prediction != "eager",
     "prediction must be left out with {o.asked}, since each rank expects its own movement; got {o.prediction!r}"),
    (lambda o: o.guard, "guard must be left out with {o.asked}, since it judges averaged gradients; got True"),
    (_in_buckets,
     "buckets must be left out with {o.asked}, since a movement is complete only when its window ends; "
     "got {o.buckets}"),
    (lambda o: o.reduce != "matrix",
     "reduce must be left out with {o.asked}, since a movement is that of a whole window, and no gradient; "
     "got {o.reduce!r}"),
    (lambda o: o.dense_start,
     "dense-start must be left out with {o.asked}, since it counts gradients, not windows; got {o.dense_start}"),
)  # fmt: skip
"""Options about gradients, where ``asked`` names the option that asks for windows instead."""

_NO_WINDOWS = " must be left out without --local-steps or --outer, to which it belongs; got "
NO_WINDOWS: tuple[Rule, ...] = (
    (lambda o: o.outer_lr is not None, f"outer-lr{_NO_WINDOWS}{{o.outer_lr}}"),
    (lambda o: o.average_state, f"average-state{_NO_WINDOWS}True"),
)
"""Options of windows, where nothing asks for windows."""

_NOT_LATE = " must be left out with --width 1, at which no gradient is late; got "
_IN_PARTS = " must be left out with --strategy {o.strategy}, whose servers see parts of a gradient; got "
LATE: tuple[Rule, ...] = (
    (lambda o: o.guard, f"guard{_NOT_LATE}True"),
    (lambda o: o.local_steps == 1 and o.synchronous_start not in (AUTO, 0),
     f"synchronous-start{_NOT_LATE}{{o.synchronous_start}}"),
)  # fmt: skip
"""Options about late gradients, where the user has asked for width 1; windows have iterations that are not late."""

TRAINING: tuple[Rule, ...] = (
    (lambda o: o.wait is not None and o.elastic is None,
     "wait must be left out without --elastic, to which it belongs; got {o.wait:g}"),
    (lambda o: o.silence is not None and o.elastic is None,
     "silence must be left out without --elastic, to which it belongs; got {o.silence:g}"),
    (lambda o: o.silence is not None and o.silence >= o.timeout,
     "silence must be less than --timeout, {o.timeout:g}, after which ranks give up a sum; got {o.silence:g}"),
    (lambda o: o.elastic is not None and o.farewell_seconds not in (0, DEFAULT_FAREWELL_SECONDS),
     "farewell-seconds must be 0 or left out with --elastic, whose ranks leave in a time of their own; got "
     "{o.farewell_seconds:g}"),
    (lambda o: o.local_steps > 1 and o.accumulation > 1,
     "accumulation must be 1 with --local-steps, the other way to exchange less often; got {o.accumulation}"),
    (lambda o: o.corrects and o.optimizer == "nesterov",
     "optimizer must be sgd with --momentum-correction, which replaces its momentum; got nesterov"),
    (lambda o: o.corrects and o.optimizer == "sgd" and o.momentum > 0,
     "momentum must be 0 with --momentum-correction, which replaces it; got {o.momentum}"),
    (lambda o: o.average_state and o.optimizer == "sgd" and o.momentum == 0,
     "momentum must be above 0 with --average-state and --optimizer sgd, which keeps no state without; got 0"),
    (lambda o: o.optimizer == "muon" and o.strategy in GRADIENT_SERVERS,
     "optimizer must update each element on its own with --strategy {o.strategy}, whose servers may cut parameters "
     "anywhere; got muon, which needs whole matrices"),
    (lambda o: o.clip_norm is not None and o.strategy in GRADIENT_SERVERS, f"clip-norm{_IN_PARTS}{{o.clip_norm}}"),
    (lambda o: o.clip_value is not None and o.strategy in GRADIENT_SERVERS, f"clip-value{_IN_PARTS}{{o.clip_value}}"),
    (lambda o: o.precision == "fp16" and o.strategy in GRADIENT_SERVERS, f"precision{_IN_PARTS}fp16"),
    (lambda o: o.device == "cuda" and o.strategy in SERVER_STRATEGIES,
     "device must be cpu with --strategy {o.strategy}, whose servers are on CPUs; got cuda"),
    (lambda o: o.check_replicas is not None and o.strategy in ("local", "ps-async", "easgd-async"),
     "check-replicas must be left out with --strategy {o.strategy}, whose replicas differ while they train; "
     "got {o.check_replicas}"),
)  # fmt: skip
"""The rest of the command's options. ``corrects`` is true if a codec has the momentum of gradients."""

_UNCOVERED = " must be left out with --{o.planned}, since the timing model does not cover it; got "
PLANNING: tuple[Rule, ...] = (
    (lambda o: o.strategy != "pipelined", "strategy must be pipelined with --{o.planned}; got {o.strategy}"),
    (lambda o: o.searched and o.local_steps > 1,
     "local-steps must be 1 with --{o.planned}, which is chosen for an exchange in every iteration; "
     "got {o.local_steps}"),
    (lambda o: o.rate_limit is not None and o.cluster is None,
     "cluster must be given with --{o.planned} and --rate-limit, since a calibration before the run would use the "
     "whole line; got none"),
    (lambda o: o.asked_outer is not None and (o.searched or o.outer != "average"),
     f"outer{_UNCOVERED}{{o.asked_outer!r}}"),
    (lambda o: o.average_state, f"average-state{_UNCOVERED}True"),
    (lambda o: o.searched and o.fragments != 1 and "fragments" not in o.auto,
     "fragments must be 1 with --{o.planned}, which is chosen for an exchange of all weights; got {o.fragments}"),
    (lambda o: o.reduce == "auto" and "codec" in o.auto,
     "codec must be given with --reduce auto, which chooses by it; got auto"),
    (lambda o: o.device != "cpu",
     "device must be cpu with --{o.planned}, since calibrations are those of CPUs; got {o.device}"),
    (lambda o: ":" in o.codec,
     "codec must be another one with --{o.planned}, since its times are not calibrated; got {o.codec}"),
    (lambda o: o.all_reduce_name == "hierarchical",
     "all-reduce must be another one with --{o.planned}, since links inside nodes are not calibrated; "
     "got hierarchical"),
    (lambda o: "fragments" in o.auto and o.searched,
     "{o.searched[0]} must be given with --fragments auto, which depends on it; got auto"),
    (lambda o: "fragments" in o.auto and o.width == 1,
     "width must be at least 2 with --fragments auto, as width 1 hides no exchange; got 1"),
)  # fmt: skip
"""Options that the timing model does not cover. ``planned`` names the first option that asks for it; ``searched`` has
those of ``auto`` but fragments; ``asked_outer`` is None where the outer optimizer is by default."""

_SUMMED_AGAIN = " with --elastic, which sums again what a lost rank has left unfinished; got "
ELASTIC: tuple[Rule, ...] = (
    (lambda o: o.strategy != "pipelined", "strategy must be pipelined with --elastic; got {o.strategy}"),
    (lambda o: o.all_reduce_name != "ring", f"all-reduce must be ring{_SUMMED_AGAIN}{{o.all_reduce_name}}"),
    (lambda o: o.connections > 1,
     "connections must be left out with --elastic, whose transports have one to each rank; got {o.connections}"),
    (lambda o: o.transport_name == "gloo",
     "transport must be tcp or tls with --elastic, since gloo's waits cannot be ended; got gloo"),
    (lambda o: o.codec in ("topk", "powersgd"),
     f"codec must be one that sends every value, such as int4,{_SUMMED_AGAIN}{{o.codec}}"),
    (lambda o: o.reduce != "matrix", f"reduce must be matrix{_SUMMED_AGAIN}{{o.reduce}}"),
    (lambda o: o.asked,
     "local-steps, outer and fragments must be left out with --elastic, which sums gradients alone; got {o.asked}"),
    (lambda o: o.trace, "trace must be left out with --elastic, since its file has a row for each rank; got True"),
)  # fmt: skip
"""Options with which a run may lose ranks."""

_OF_THE_LOOP = ", since a loop with DistributedDataParallel has its own "
IN_DDP: tuple[Rule, ...] = (
    (lambda o: o.guard, f"guard must be left out{_OF_THE_LOOP}steps; got True"),
    (_in_buckets, f"buckets must be left out{_OF_THE_LOOP}buckets; got {{o.buckets}}"),
    (lambda o: o.reduce != "matrix",
     "reduce must be matrix in a loop with DistributedDataParallel, whose buckets hold whole gradients; "
     "got {o.reduce}"),
)  # fmt: skip
"""Options of a loop of the user's own with DistributedDataParallel."""

TABLES = (CODEC, PARTS, REDUCE, OUTER, WINDOWS, GRADIENTS, NO_WINDOWS, LATE, TRAINING, PLANNING, ELASTIC, IN_DDP)
"""All tables."""


def options_of_sections(*sections: Any, **others: Any) -> Options:
    """Return the fields of these dataclasses and ``others``, which come first, as attributes of one object."""
    found = {item.name: getattr(one, item.name) for one in sections for item in dataclasses.fields(one)}
    return SimpleNamespace(**found | others)


def check_rules(options: Options, *tables: Sequence[Rule]) -> None:
    """Raise ``UserInputError`` for the first rule of these ``tables`` that refuses the ``options``.

    >>> check_rules(SimpleNamespace(codec="topk", buckets="4", fragments=1), PARTS)
    Traceback (most recent call last):
    pipesgd.errors.UserInputError: buckets must be 1 with --codec topk, which compresses the gradient as a whole; got 4
    """
    for is_refused, message in (rule for table in tables for rule in table):
        if is_refused(options):
            raise UserInputError(message.format(o=options))
