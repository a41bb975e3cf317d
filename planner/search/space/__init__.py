"""The search space: rules, the user's constraints, and configurations of degrees as arrays."""
