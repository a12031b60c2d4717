"""The quick start, trained by this project and by TRL's GRPOTrainer with its own tools, side by side."""
