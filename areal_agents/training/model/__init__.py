"""Models as the trainer holds them: loading, sharding, attention, adapters and experts."""
