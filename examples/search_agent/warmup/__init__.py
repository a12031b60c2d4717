"""Everything that make_model.py needs to rebuild the example's starting policy from nothing."""
