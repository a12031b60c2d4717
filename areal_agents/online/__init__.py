"""What the operator of a run with `data.traffic` sees and orders: `areal-agents online`."""
