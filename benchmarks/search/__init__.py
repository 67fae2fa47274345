"""Search at test time: accuracy by tokens, and problems per second beside the public way."""
