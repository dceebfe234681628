"""Where states live: layout, the NVMe store, I/O, the host arena, residency. Knows nothing of models or schedules; each
module is imported by its own name."""
