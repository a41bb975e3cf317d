"""Run a plan: start torchrun on this host, watch over it, and turn the outcome into an exit code."""

from planner.launch.run import launch

__all__ = ["launch"]
