"""Decoding by replay: speed, bits, memory; its kernels; cards with fewer SMs."""
