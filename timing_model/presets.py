"""Networks and models by name, for jobs that are described without a measured cluster."""

from __future__ import annotations

from timing_model.params import CodecCost, LinkParams

PAYLOAD_SHARE = (1500 - 20 - 20 - 12) / (1500 + 14)
"""Share of an Ethernet link's rate that is left for the payload in full packets, without the headers of IP and TCP
(whose timestamps are the 12) inside and those of Ethernet in front."""
SUMS = 1e-10
"""Seconds to add up a byte of float32 in memory: 10 GB/s on one core. ``pipesgd.calibrate`` measures it."""
OVERHEAD = 3e-5
"""CPU time of a message, in s: near the least that calibrations of ``experiments.validate_timing_model`` found where
they could determine it, 27 to 390 us on cores that ranks share. Any more of it counts as latency: fits could tell the
two apart in few cases, and predictions with their sum are as good."""
HOST = 5e-10
"""CPU time of sending and receiving a byte over TCP with gloo, in s: 16 Gbit/s a core. It was 0.3 to 0.5 ns between two
ranks of this project's machine, without a network between them, and 0.8 ns over emulated links, whose emulation takes
some of it (``experiments/LOG.md``); measure your own."""


def ethernet(bytes_per_second: float, alpha: float) -> LinkParams:
    """Return an Ethernet link of this rate, headers included, and this latency in s."""
    beta = 1 / (bytes_per_second * PAYLOAD_SHARE)
    return LinkParams(alpha=alpha, beta=beta, gamma=SUMS, sync=0.0, overhead=OVERHEAD, host=HOST)


NETWORKS: dict[str, LinkParams] = {
    "1GbE": ethernet(1e9 / 8, 50e-6),
    "10GbE": ethernet(10e9 / 8, 30e-6),
    "25GbE": ethernet(25e9 / 8, 20e-6),
    "100GbE": ethernet(100e9 / 8, 15e-6),
    "infiniband": LinkParams(alpha=2e-6, beta=8 / 200e9, gamma=SUMS, sync=0.0, overhead=OVERHEAD, host=HOST),
}
"""Networks by name, with typical latencies of TCP through a switch, and of 200 Gbit/s InfiniBand; measure your own."""

MODELS: dict[str, int] = {
    "mlp": 648_010,
    "mlp-1000": 1_796_010,
    "convnet": 857_738,
    "alexnet": 61_100_840,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "bert-base": 109_482_240,
    "gpt2": 124_439_808,
}
"""Number of parameters of each model. ``mlp``, ``mlp-1000`` are 784-500-500-10 and 784-1000-1000-10, ``convnet`` is
this project's for images of 28 x 28; the next four are torchvision's for ImageNet; the last two are those of the
published checkpoints, biases and embeddings included."""


def _codec(name: str, bits: float, encode: float, decode: float, hop: float) -> CodecCost:
    return CodecCost(name=name, bits=bits, encode=encode, decode=decode, add=decode, hop=hop, call=1e-6)


CODECS: dict[str, CodecCost] = {
    codec.name: codec
    for codec in (
        _codec("bf16", 16.0, 2.5e-10, 2.8e-10, 3.2e-10),
        _codec("fp16", 16.0, 2.6e-10, 2.8e-10, 3.1e-10),
        _codec("truncate16", 16.0, 2.4e-10, 2.8e-10, 3.1e-10),
        _codec("int8", 8.03, 2.0e-10, 2.5e-10, 2.7e-10),
        _codec("int4", 4.13, 2.8e-10, 2.4e-10, 3.1e-10),
        _codec("ternary", 2.03, 3.1e-10, 1.9e-10, 3.6e-10),
        _codec("qsgd", 4.50, 7.8e-10, 2.3e-10, 9.7e-10),
        _codec("sign", 1.06, 2.7e-10, 1.9e-10, 3.4e-10),
    )
}
"""Costs of this project's codecs on one core of a server; of equal bits, the more accurate come first (biased
truncation comes after both roundings). They were measured in memory (``experiments/results/bench_codecs.csv``; adding
was not measured separately, and is assumed to cost as much as decoding); measure your own."""
