"""Logs of training programs: their lines, the times of their steps, and what they say about their own run."""
