"""The sides and parts of the reinforcement-learning benchmark."""
