"""Runs a program that nobody has read: a process of its own without network, files, children or time without end."""
