"""Checkpoints: what a resumed run needs, which ones are kept, and the model folder that a run exports."""
