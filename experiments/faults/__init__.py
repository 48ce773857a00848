"""Faults injected into real training runs, and what their user sees, loses and is left with."""
