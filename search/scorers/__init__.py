"""What a node of a tree is worth: one kind of scorer in each file (conf/scorer/)."""
