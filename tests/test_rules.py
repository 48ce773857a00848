"""The tables of rules between options: each row refuses an example in its line, of the command or of a door."""

from __future__ import annotations

import re

import pytest

from pipesgd.cli import parse
from pipesgd.config import TrainConfig
from pipesgd.errors import UserInputError
from pipesgd.rules import IN_DDP, TABLES, check_rules, options_of_sections
from pipesgd.sections import Updates, Wire

SURVIVING = "--elastic 2"

OF_THE_COMMAND = [
    (
        "--local-steps 4 --accumulation 2",
        "accumulation must be 1 with --local-steps, the other way to exchange less often; got 2",
    ),
    (
        "--width auto --all-reduce hierarchical",
        "all-reduce must be another one with --width auto, since links inside nodes are not calibrated; got "
        "hierarchical",
    ),
    ("--wait 3", "wait must be left out without --elastic, to which it belongs; got 3"),
    (
        "--elastic 2 --silence 9 --timeout 8",
        "silence must be less than --timeout, 8, after which ranks give up a sum; got 9",
    ),
    ("--silence 5", "silence must be left out without --elastic, to which it belongs; got 5"),
    ("--elastic 2 --strategy local", "strategy must be pipelined with --elastic; got local"),
    (
        f"{SURVIVING} --transport gloo",
        "transport must be tcp or tls with --elastic, since gloo's waits cannot be ended; got gloo",
    ),
    (
        f"{SURVIVING} --connections 2",
        "connections must be left out with --elastic, whose transports have one to each rank; got 2",
    ),
    (
        f"{SURVIVING} --all-reduce all-to-all",
        "all-reduce must be ring with --elastic, which sums again what a lost rank has left unfinished; got all-to-all",
    ),
    (
        f"{SURVIVING} --codec powersgd",
        "codec must be one that sends every value, such as int4, with --elastic, which sums again what a lost rank has "
        "left unfinished; got powersgd",
    ),
    (
        f"{SURVIVING} --reduce rows",
        "reduce must be matrix with --elastic, which sums again what a lost rank has left unfinished; got rows",
    ),
    (
        f"{SURVIVING} --local-steps 4",
        "local-steps, outer and fragments must be left out with --elastic, which sums gradients alone; got "
        "--local-steps",
    ),
    (
        f"{SURVIVING} --farewell-seconds 5",
        "farewell-seconds must be 0 or left out with --elastic, whose ranks leave in a time of their own; got 5",
    ),
    (f"{SURVIVING} --trace", "trace must be left out with --elastic, since its file has a row for each rank; got True"),
    (
        "--codec topk --all-reduce all-to-all",
        "all-reduce must be ring with --codec topk, whose values are gathered around it; got all-to-all",
    ),
    (
        "--local-steps 2 --width 1 --average-state --cluster x",
        "average-state must be left out with --cluster, since the timing model does not cover it; got True",
    ),
    (
        "--outer elastic --width 1 --average-state",
        "average-state must be left out with --outer elastic, which averages no weights; got True",
    ),
    (
        "--width 1 --average-state",
        "average-state must be left out without --local-steps or --outer, to which it belongs; got True",
    ),
    (
        "--buckets 4 --codec topk",
        "buckets must be 1 with --codec topk, which compresses the gradient as a whole; got 4",
    ),
    (
        "--local-steps 2 --buckets 1MiB",
        "buckets must be left out with --local-steps, since a movement is complete only when its window ends; got 1MiB",
    ),
    (
        "--strategy local --check-replicas 5",
        "check-replicas must be left out with --strategy local, whose replicas differ while they train; got 5",
    ),
    (
        "--strategy ps-sync --clip-norm 0.5",
        "clip-norm must be left out with --strategy ps-sync, whose servers see parts of a gradient; got 0.5",
    ),
    (
        "--strategy ps-async --clip-value 0.5",
        "clip-value must be left out with --strategy ps-async, whose servers see parts of a gradient; got 0.5",
    ),
    (
        "--fragments auto --rate-limit 50mbit",
        "cluster must be given with --fragments auto and --rate-limit, since a calibration before the run would "
        "use the whole line; got none",
    ),
    (
        "--rate-limit 50mbit --width auto",
        "cluster must be given with --width auto and --rate-limit, since a calibration before the run would use "
        "the whole line; got none",
    ),
    (
        "--width auto --codec own:codec",
        "codec must be another one with --width auto, since its times are not calibrated; got own:codec",
    ),
    ("--reduce auto --codec auto", "codec must be given with --reduce auto, which chooses by it; got auto"),
    (
        "--codec int8 --all-reduce native",
        "codec must be one of fp32, bf16, fp16, powersgd with --all-reduce native, in which torch sums; got int8",
    ),
    (
        "--codec powersgd --factor-codec int8 --all-reduce native",
        "factor-codec must be fp32 with --all-reduce native, which keeps no residual; got int8",
    ),
    (
        "--outer elastic --codec powersgd",
        "codec must keep no residual with --outer elastic, whose next difference has what was left out of this "
        "one; got powersgd",
    ),
    (
        "--strategy ps-sync --device cuda",
        "device must be cpu with --strategy ps-sync, whose servers are on CPUs; got cuda",
    ),
    (
        "--width auto --device cuda",
        "device must be cpu with --width auto, since calibrations are those of CPUs; got cuda",
    ),
    (
        "--codec bf16 --all-reduce native --error-feedback on",
        "error-feedback must be off with --all-reduce native, in which torch rounds; got on",
    ),
    (
        "--outer elastic --codec int8 --error-feedback on",
        "error-feedback must be off with --outer elastic, whose next difference has what was left out of this one; "
        "got on",
    ),
    (
        "--outer elastic --codec int4",
        "error-feedback must be off with --outer elastic, whose next difference has what was left out of this one; "
        "got on, the default of int4",
    ),
    (
        "--fragments 2 --width 1 --average-state",
        "fragments must be 1 with --average-state, which needs all weights at once; got 2",
    ),
    (
        "--fragments 2 --codec topk",
        "fragments must be 1 with --codec topk, which compresses the movement as a whole; got 2",
    ),
    (
        "--fragments 2 --outer elastic",
        "fragments must be 1 with --outer elastic, which needs all weights at once; got 2",
    ),
    (
        "--fragments 2 --width auto",
        "fragments must be 1 with --width auto, which is chosen for an exchange of all weights; got 2",
    ),
    (
        "--codec powersgd --dense-start 9 --local-steps 4",
        "dense-start must be left out with --local-steps, since it counts gradients, not windows; got 9",
    ),
    ("--outer nesterov --guard", "guard must be left out with --outer, since it judges averaged gradients; got True"),
    ("--width 1 --guard", "guard must be left out with --width 1, at which no gradient is late; got True"),
    (
        "--fragments auto --local-steps 4 --codec auto",
        "local-steps must be 1 with --codec auto, which is chosen for an exchange in every iteration; got 4",
    ),
    (
        "--local-steps 2 --width auto",
        "local-steps must be 1 with --width auto, which is chosen for an exchange in every iteration; got 2",
    ),
    (
        "--codec topk --momentum-correction 0.9",
        "momentum must be 0 with --momentum-correction, which replaces it; got 0.9",
    ),
    (
        "--local-steps 2 --width 1 --average-state --momentum 0",
        "momentum must be above 0 with --average-state and --optimizer sgd, which keeps no state without; got 0",
    ),
    (
        "--outer nesterov --codec topk --momentum-correction 0.5 --optimizer adam",
        "momentum-correction must be 0 with --outer nesterov, whose momentum it would replace; got 0.5",
    ),
    ("--moving-rate 0.5", "moving-rate must be left out with --outer average; got 0.5"),
    (
        "--codec topk --momentum-correction 0.9 --optimizer nesterov",
        "optimizer must be sgd with --momentum-correction, which replaces its momentum; got nesterov",
    ),
    (
        "--optimizer muon --strategy ps-async",
        "optimizer must update each element on its own with --strategy ps-async, whose servers may cut parameters "
        "anywhere; got muon, which needs whole matrices",
    ),
    (
        "--fragments auto --outer nesterov",
        "outer must be left out with --fragments auto, since the timing model does not cover it; got 'nesterov'",
    ),
    (
        "--outer elastic --width auto",
        "outer must be left out with --width auto, since the timing model does not cover it; got 'elastic'",
    ),
    ("--outer elastic --outer-lr 1", "outer-lr must be left out with --outer elastic; got 1.0"),
    ("--outer-lr 0.5", "outer-lr must be left out without --local-steps or --outer, to which it belongs; got 0.5"),
    ("--local-steps 2 --outer-momentum 0.5", "outer-momentum must be left out with --outer average; got 0.5"),
    (
        "--strategy ps-sync --precision fp16",
        "precision must be left out with --strategy ps-sync, whose servers see parts of a gradient; got fp16",
    ),
    (
        "--fragments auto --prediction none",
        "prediction must be left out with --fragments, since each rank expects its own movement; got 'none'",
    ),
    (
        "--local-steps 2 --prediction none",
        "prediction must be left out with --local-steps, since each rank expects its own movement; got 'none'",
    ),
    (
        "--reduce rows --local-steps 2",
        "reduce must be left out with --local-steps, since a movement is that of a whole window, and no gradient; "
        "got 'rows'",
    ),
    (
        "--reduce rows --all-reduce native",
        "reduce must be matrix with --all-reduce native, in which torch sums whole gradients; got rows",
    ),
    (
        "--reduce rows --codec topk",
        "reduce must be matrix with --codec topk, which compresses the gradient as a whole; got rows",
    ),
    (
        "--reduce auto --codec powersgd",
        "reduce must be given with --codec powersgd, whose bytes its choice does not know; got auto",
    ),
    (
        "--reduce rows --device cuda",
        "reduce must be matrix with device cuda, on which rows and factors have not been tested; got rows",
    ),
    ("--cluster c.toml --strategy ps-sync", "strategy must be pipelined with --cluster; got ps-sync"),
    ("--width auto --strategy ddp", "strategy must be pipelined with --width auto; got ddp"),
    (
        "--width 1 --synchronous-start 5",
        "synchronous-start must be left out with --width 1, at which no gradient is late; got 5",
    ),
    ("--outer average --average-state", "width must be 1 with --average-state, whose averages are never late; got 2"),
    (
        "--fragments auto --width 1",
        "width must be at least 2 with --fragments auto, as width 1 hides no exchange; got 1",
    ),
    ("--fragments auto --width auto", "width must be given with --fragments auto, which depends on it; got auto"),
]
"""Arguments of the command, and the line that refuses them."""

OF_DDP = [
    (
        Wire(),
        Updates(guard=True),
        "guard must be left out, since a loop with DistributedDataParallel has",
    ),
    (Wire(buckets=4), Updates(), "buckets must be left out, since a loop with DistributedDataParallel has its own"),
    (
        Wire(reduce="rows"),
        Updates(),
        "reduce must be matrix in a loop with DistributedDataParallel, whose",
    ),
]


@pytest.mark.parametrize(("words", "message"), OF_THE_COMMAND)
def test_options_that_do_not_go_together_are_refused_in_one_line(words: str, message: str) -> None:
    with pytest.raises(UserInputError) as refused:
        parse(words.split())
    assert str(refused.value) == message


@pytest.mark.parametrize(("wire", "updates", "message"), OF_DDP)
def test_a_loop_with_ddp_keeps_what_it_has_itself(wire: Wire, updates: Updates, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        check_rules(options_of_sections(wire, updates), IN_DDP)


def test_every_rule_has_an_example() -> None:
    lines = [message for _, message in OF_THE_COMMAND] + [message for _, _, message in OF_DDP]
    for _, message in (rule for table in TABLES for rule in table):
        begin = ".*".join(map(re.escape, re.split(r"\{[^}]*\}", message.partition("; got")[0])))
        assert any(re.match(begin, line) or message.startswith(line) for line in lines), message


def test_options_that_are_left_out_are_refused_by_no_rule() -> None:
    assert parse([]) == TrainConfig()
