"""What a cluster and a model cost, measured: the figures that the timing model works with."""
