"""The same trainings on two commits: what is run, and how what the runs leave behind is compared."""
