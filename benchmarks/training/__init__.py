"""Training on fixed datasets: beside a peer and a loop written by hand, on a GPU, killed at random moments."""
