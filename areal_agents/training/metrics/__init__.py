"""Metrics of a run: what each step records, how it is measured, and the trackers that receive it."""
