"""Claims about time and about failures, each as a command that leaves a result file with its manifest."""
