"""What a run stands on: child processes with limits, memory, disks, signals, progress, keys."""
