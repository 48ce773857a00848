"""Exceptions that the testbed raises on purpose, each one line for the person who asked."""

from __future__ import annotations


class TestbedError(Exception):
    """Base of every exception that the testbed raises on purpose."""

    __test__ = False  # pytest would take it for a class of tests


class InvalidInputError(TestbedError, ValueError):
    """The testbed cannot be made as asked; the message says what must hold and what was got."""


class TestbedFailedError(TestbedError, RuntimeError):
    """A testbed or a job on it could not continue."""
