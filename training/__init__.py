"""One loop for every fixed-dataset objective."""
