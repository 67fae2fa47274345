"""Pages to read: a prompt as tokens, and the pages of docs/ that are generated."""
