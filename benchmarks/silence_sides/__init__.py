"""What `benchmarks.silence` measures, a module for each part."""
