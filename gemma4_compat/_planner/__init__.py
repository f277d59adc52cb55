"""Device maps that fit: the bytes of each block, where each goes, the code that loads the model."""
