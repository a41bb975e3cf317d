"""The training program that `torchrun -m planner.trainer plan.json` starts on every device.

The only package that imports torch; nothing imports it.
"""
