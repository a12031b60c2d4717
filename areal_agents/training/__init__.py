"""The trainer: leases groups from the store, steps the policy, publishes versions."""
