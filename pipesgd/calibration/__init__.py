"""Measurements of the cost of a cluster and of a model: the figures that the timing model works with."""
