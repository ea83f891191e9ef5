"""Many processes: ranks that agree, a reducer that knows what trains, less traffic, sharded masks."""
