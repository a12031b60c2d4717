"""Records of the tokens that each step trained: one Parquet file for each step and rank."""
