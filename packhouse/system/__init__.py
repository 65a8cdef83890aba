"""System services: worker processes with limits, memory, disks, signals, progress, keys."""
