"""Paper and pencil: what a layout costs, worked out without starting a process."""
