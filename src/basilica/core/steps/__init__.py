"""The steps of a turn: each is a function that takes the Turn further. `core.reconcile` has them in their order."""
