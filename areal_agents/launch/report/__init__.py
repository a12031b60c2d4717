"""Shows a run while it trains: as a panel, as lines, quietly, or as JSON."""
