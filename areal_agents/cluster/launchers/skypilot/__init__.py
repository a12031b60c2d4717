"""A run by SkyPilot: its task, made from the configuration, which `sky launch` starts on any cloud."""
