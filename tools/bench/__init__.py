"""What is measured: one file a comparison, and what they share. People run `hoist bench`, developers the modules."""
