"""What people run: the command line, data, model sources, import and export. Imports the scheduler, the tiers and
optim; nothing imports it."""
