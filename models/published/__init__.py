"""Process reward models that others published: what each is given, where it is read, what its score is (`table`)."""
