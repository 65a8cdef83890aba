"""What a run stands on: worker processes with limits, memory, disks, signals, progress, keys."""
