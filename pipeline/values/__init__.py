"""What steps are worth: states to complete, values and labels of steps, and what both cost."""
