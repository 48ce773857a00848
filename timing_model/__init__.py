"""Analytical timing model: predicts what a job will cost. Needs numpy only; imports neither torch nor pipesgd."""

__version__ = "0.2.0"
