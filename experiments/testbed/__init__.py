"""An emulated cluster of network namespaces with real links, on one Linux machine."""

from experiments.testbed.cluster import Measured, Testbed, Traffic
from experiments.testbed.jobs import Job
from experiments.testbed.links import Link, parse_latency, parse_loss, parse_rate, rate_name

__all__ = ["Job", "Link", "Measured", "Testbed", "Traffic", "parse_latency", "parse_loss", "parse_rate", "rate_name"]
