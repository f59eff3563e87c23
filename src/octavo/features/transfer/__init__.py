"""Move KV beyond the device: down the tiers, and across to other engines."""
