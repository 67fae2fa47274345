"""Problems of a task, and demonstrations: a task's own, or right samples."""
