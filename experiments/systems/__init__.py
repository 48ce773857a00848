"""The systems that this project follows, and what people use today, in one table: configurations, times, accuracies."""
