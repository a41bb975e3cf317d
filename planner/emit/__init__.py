"""Write a plan as what other programs read."""
