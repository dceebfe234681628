"""What happens when: models into stages, steps as plans, the executor, the trainer. Imports the tiers and optim; each
module is imported by its own name."""
