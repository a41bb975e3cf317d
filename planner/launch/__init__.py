"""Run a plan: start torchrun on this host, supervise it, and map the outcome to an exit code."""

from planner.launch.run import launch

__all__ = ["launch"]
