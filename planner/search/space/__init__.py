"""What may be tried: rules, the user's constraints, and configurations of degrees as arrays."""
