"""pipesgd: decentralized, pipelined, ring-all-reduce training on torch.distributed."""

from pipesgd.strategies.pipelined import Pipelined

__all__ = ["Pipelined"]
__version__ = "0.1.0.dev0"
