"""Networks and models by name, for questions that are asked without a cluster at hand."""

from __future__ import annotations

from timing_model.params import CodecCost, LinkParams

PAYLOAD_SHARE = (1500 - 20 - 20 - 12) / (1500 + 14)
"""Of an Ethernet link's rate, what is left for the payload in full packets: without the headers of IP and TCP (whose
timestamps are the 12) inside, and of Ethernet in front."""
SUMS = 1e-10
"""Seconds to add up a byte of float32 in memory: 10 GB/s, one core. What ``pipesgd.calibrate`` measures."""


def _ethernet(gigabits: float, alpha: float) -> LinkParams:
    return LinkParams(alpha=alpha, beta=8 / (gigabits * 1e9 * PAYLOAD_SHARE), gamma=SUMS, sync=0.0)


NETWORKS: dict[str, LinkParams] = {
    "1GbE": _ethernet(1, 50e-6),
    "10GbE": _ethernet(10, 30e-6),
    "25GbE": _ethernet(25, 20e-6),
    "100GbE": _ethernet(100, 15e-6),
    "infiniband": LinkParams(alpha=2e-6, beta=8 / 200e9, gamma=SUMS, sync=0.0),
}
"""Latencies are typical ones of TCP through a switch, and of 200 Gbit/s InfiniBand; measure your own."""

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
"""Parameters. ``mlp``, ``mlp-1000`` are 784-500-500-10 and 784-1000-1000-10, ``convnet`` is this project's for images
of 28 x 28; the next four are torchvision's for ImageNet; the last two are those of the published checkpoints, biases
and embeddings included."""


def _codec(name: str, bits: float, encode: float, decode: float, hop: float) -> CodecCost:
    return CodecCost(name=name, bits=bits, encode=encode, decode=decode, add=decode, hop=hop, call=1e-6)


CODECS: dict[str, CodecCost] = {
    codec.name: codec
    for codec in (
        _codec("truncate16", 16.0, 2.4e-10, 2.8e-10, 3.1e-10),
        _codec("bf16", 16.0, 2.5e-10, 2.8e-10, 3.2e-10),
        _codec("fp16", 16.0, 2.6e-10, 2.8e-10, 3.1e-10),
        _codec("int8", 8.03, 2.0e-10, 2.5e-10, 2.7e-10),
        _codec("int4", 4.13, 2.8e-10, 2.4e-10, 3.1e-10),
        _codec("ternary", 2.03, 3.1e-10, 1.9e-10, 3.6e-10),
        _codec("qsgd", 4.50, 7.8e-10, 2.3e-10, 9.7e-10),
        _codec("sign", 1.06, 2.7e-10, 1.9e-10, 3.4e-10),
    )
}
"""What this project's codecs cost on one core of a server, in memory (``experiments/results/bench_codecs.csv``; adding
was not measured apart, and is taken to cost what decoding does); measure your own."""
