"""The training program that `torchrun -m planner.trainer plan.json` starts on every device.

No other package imports torch, and no other package imports this one.
"""
