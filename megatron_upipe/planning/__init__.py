"""Knowing what a run needs: live bytes."""
