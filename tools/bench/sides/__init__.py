"""The sides of a comparison: programs that do the same work in a process of their own, and what they give back."""
