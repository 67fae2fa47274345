"""How a tree grows and which of its solutions is the answer: one method in each file (conf/search/)."""
