"""One file an objective; `conf/objective/<name>.yaml` names the class."""
