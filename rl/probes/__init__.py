"""Whether what is learnt from is what it seems: engine against trainer, falling rewards, rounding."""
