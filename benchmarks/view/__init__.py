"""The speed of the page that shows runs, on a run of many episodes, and what it costs a live run."""
