"""How a program starts and what it leaves behind: configs, ranks, run directories, metrics."""
