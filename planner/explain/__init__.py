"""Answers to questions about a plan; `planner.show` displays them."""
