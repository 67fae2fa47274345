"""What can be checked of a response without a model: verifiers, and the rows that name them."""
