"""What estimators are made of: state cutters, completion plans, values of states, maps from steps to tokens."""
