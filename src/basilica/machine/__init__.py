"""Facts of this machine: its files, disks and directories, and threads to use them with. Standard library only."""
