"""4-bit and 8-bit weights of bitsandbytes: their states, experts, offloaded layers and compute dtypes."""
