"""Computes the answers to questions about a plan; `planner.show` lays them out."""
