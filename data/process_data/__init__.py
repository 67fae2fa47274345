"""Published process supervision, one file a format: published row → `AnnotatedSolution` → published row.

What all formats share is said in data/process_data/formats.py.
"""
