"""Plans that turn a serial model into a sharded one, and the communication they need."""
