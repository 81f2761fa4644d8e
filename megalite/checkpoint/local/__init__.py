"""The local tier: checkpoints on the nodes' own disks, with copies on neighbours."""
