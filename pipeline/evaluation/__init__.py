"""How good policies are: accuracies with intervals, votes, comparisons, win rates, the grader alone."""
