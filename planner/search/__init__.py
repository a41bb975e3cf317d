"""The search finds the best layout for a job and proves that it is the best."""
