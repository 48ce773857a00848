"""An emulated cluster on one Linux machine, made of network namespaces with real links."""

from .cluster import Measured, Testbed, Traffic
from .errors import InvalidInputError, TestbedError, TestbedFailedError
from .jobs import Job
from .links import Link, parse_latency, parse_loss, parse_rate, rate_name

__all__ = [
    "InvalidInputError",
    "Job",
    "Link",
    "Measured",
    "Testbed",
    "TestbedError",
    "TestbedFailedError",
    "Traffic",
    "parse_latency",
    "parse_loss",
    "parse_rate",
    "rate_name",
]
