"""The explanation of a plan as one HTML page without external files; it runs only its own script."""
