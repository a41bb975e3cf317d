"""Write a plan as files that training programs read, and read such files back."""
