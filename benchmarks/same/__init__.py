"""What `benchmarks.unchanged` runs on two commits, and how it compares what the runs leave behind."""
