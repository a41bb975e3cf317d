"""The explanation of a plan as one self-contained HTML page that loads nothing and runs only its own script."""
