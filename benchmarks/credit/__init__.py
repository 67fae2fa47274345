"""Credit estimators beside the exact values of the states that they credit."""
