"""What the models read: record kinds, files, steps, answers, tasks, examples and batches."""
