"""Pages about runs that have ended: the report of one, and the comparison of several."""
