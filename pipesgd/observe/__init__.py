"""A training program as it is, observed in a few iterations for a plan."""
