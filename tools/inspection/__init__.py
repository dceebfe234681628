"""`hoist inspect`: what a store and its run look like from another process, without disturbing them."""
