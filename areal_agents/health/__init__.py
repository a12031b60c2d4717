"""Says what is wrong with a run: rules about its metrics, what it waits for, and a report for an issue."""
