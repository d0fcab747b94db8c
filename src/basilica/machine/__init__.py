"""Facts of this machine: what is true of its disks and directories, whoever asks."""
