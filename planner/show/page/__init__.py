"""What is known about a plan as one self-contained page: no network, no code but its own."""
