"""`hoist report`: what a run left in its store, as one page or one picture."""
