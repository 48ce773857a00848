"""Simulated members of a ring, in virtual time, who change as the production code of ``pipesgd.membership`` says."""
