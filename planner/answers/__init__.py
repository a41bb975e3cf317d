"""A module for each question about a job or a plan: it answers the question, and shows the answer."""
