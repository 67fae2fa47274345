"""One file a task: problems, prompt, steps and grading. `conf/task/<name>.yaml` names the class."""
