"""The sides of benchmarks/training.py: the corpus they share, the product, the peer, a loop written by hand."""
