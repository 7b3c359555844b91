"""Costs of steps are measured once."""

from tests.known_costs import costs_are_measured_once

__all__ = ["costs_are_measured_once"]
