"""`make soak`: real servers under load, faults and hostile requests. Each check compares answers, not only counters."""
