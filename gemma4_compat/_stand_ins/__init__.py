"""Hardware that a machine lacks, imitated on its CPU: a second device, CUDA graphs, flash attention, ZeRO-3."""
