"""Search at test time: which solution of a problem to answer with, from a tree of steps that a policy drew and a scorer
scored. docs/search.md."""
