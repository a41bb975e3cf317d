"""The search: which layout is best, and the proof of it."""
